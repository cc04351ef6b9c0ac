"""LoRA under masks: merging against weights merged by hand, and the checkpoint folder of stage 2."""

import json

import pytest
import torch
from conftest import ROOT, environment
from lora_models import METHODS, NO_DROPOUT, PROJECTIONS, method_options, randomise, recovered, untrained
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, pattern, stock, tokens, zeroed
from torch import Tensor
from training import tiny_run_config, trained_tensors

from experiments import lora as experiment
from wide import checkpoint, checkpoint_files
from wide.adapter import LoraRoutedModel, add_lora, merge
from wide.base_model import fingerprint
from wide.methods import load as load_method
from wide.model import RoutedModel
from wide.options import ModelConfig, StageConfig


def by_hand(model: LoraRoutedModel, family: str, gates: dict[str, Tensor]):
    """The stock model with W + alpha / rank * B A, masked and compensated by hooks of the test's own."""
    oracle = stock(family)
    weights = dict(model.model.named_parameters())
    for index, layer in enumerate(oracle.model.layers):
        for path in PROJECTIONS:
            name = f"base_model.model.model.layers.{index}.{path}"
            a, b = (weights[f"{name}.lora_{side}.default.weight"].detach() for side in "AB")
            assert b.abs().max() > 0
            layer.get_submodule(path).weight.data += 2.0 * b @ a
        for kind, path in (("attention", "self_attn.o_proj"), ("ffn", "mlp.down_proj")):
            if getattr(model.gates, "vectors", None) is not None:
                added = (1 - gates[kind][index]) @ model.gates.vectors[kind][index].detach()
                layer.get_submodule(path).register_forward_hook(lambda module, args, out, added=added: out + added)
    return zeroed(oracle, gates, model.geometry)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_unmerged_merged_in_place_and_unloaded_agree_with_hand_merged_weights(family, method):
    model, ids = recovered(family, method), tokens(2, 12)
    num_masks = 2 * model.geometry.num_layers
    gates = pattern(model, 2, 12)
    if method == "dense":
        gates = {kind: torch.ones_like(keep) for kind, keep in gates.items()}
    with torch.no_grad():
        expected = by_hand(model, family, gates)(input_ids=ids).logits
        assert (expected - stock(family)(input_ids=ids).logits).abs().max() > 0.1

        def close(candidate: RoutedModel) -> None:
            assert candidate.num_attached_masks() == num_masks
            with candidate.forced(**gates):
                torch.testing.assert_close(candidate(input_ids=ids).logits, expected, atol=1e-5, rtol=0)

        close(model)
        model.model.merge_adapter()
        close(model)
        model.model.unmerge_adapter()
        close(model)
        assert (model.base.lm_head.weight is model.base.model.embed_tokens.weight) == (family == "smol")
        merged = merge(model)
        close(merged)
    assert set(merged.base.state_dict()) == set(stock(family).state_dict())
    assert (merged.base.lm_head.weight is merged.base.model.embed_tokens.weight) == (family == "smol")


def test_masks_hung_before_lora_are_wrong():
    """P12: on the inner projection a mask misses the LoRA branch. This is what the test above can tell apart."""
    right, ids = recovered("llama", "wide"), tokens(2, 12)
    wrong = untrained("llama", "wide")
    wrong.model = get_peft_model(wrong.base, right.model.peft_config["default"])
    wrong.load_state_dict(right.state_dict())
    gates = pattern(right, 2, 12)
    with torch.no_grad(), right.forced(**gates), wrong.forced(**gates):
        difference = right(input_ids=ids).logits - wrong(input_ids=ids).logits
    assert difference.abs().max() > 0.05
    assert wrong.num_attached_masks() == 0


def test_fresh_lora_changes_nothing_and_dense_is_the_stock_model():
    ids, plain = tokens(2, 12), untrained("llama", "compensated")
    with torch.no_grad():
        before = plain(input_ids=ids).logits
        model = add_lora(plain, StageConfig(**NO_DROPOUT))
        assert torch.equal(model(input_ids=ids).logits, before)
        randomise(model)
        with model.dense():
            assert torch.equal(model(input_ids=ids).logits, stock("llama")(input_ids=ids).logits)
        assert (model(input_ids=ids).logits - before).abs().max() > 0.05
    model.requires_grad_(False)
    with model.dense():
        pass
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_lora_is_float32_over_a_bfloat16_base_and_drawn_from_the_seed():
    def adapters(seed: int) -> dict[str, Tensor]:
        plain = untrained("llama", "wide")
        plain.model.to(torch.bfloat16)
        return trained_tensors(add_lora(plain, StageConfig(**NO_DROPOUT), seed))

    first, again, other = adapters(1), adapters(1), adapters(2)
    for name in first:
        if "lora_" in name:
            assert first[name].dtype == torch.float32
            assert torch.equal(first[name], again[name])
            assert "lora_B" in name or not torch.equal(first[name], other[name])


def save(folder, model: RoutedModel, family: str, method: str):
    """The folder that a run of stage 2 leaves."""
    options = {} if method == "dense" else method_options(model, compensation=method == "compensated")
    return checkpoint.save_pretrained(
        model,
        folder,
        model=ModelConfig(name="tiny", source="tiny", family=family),
        method=load_method("dense" if method == "dense" else "wide").Config(**options),
        base_fingerprint=fingerprint(stock(family)),
    )


def logits(model, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ("llama", "qwen3", "smol"))
def test_f27_folder_comes_back_bit_equal_tied_or_not(tmp_path, family, method):
    model, ids = recovered(family, method), tokens(2, 12)
    expected = logits(model, ids)
    loaded = checkpoint.from_pretrained(save(tmp_path / "c", model, family, method))
    assert torch.equal(logits(loaded, ids), expected)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    with loaded.dense():
        assert torch.equal(logits(loaded, ids), logits(stock(family), ids))
    assert (loaded.base.lm_head.weight is loaded.base.model.embed_tokens.weight) == (family == "smol")
    again = checkpoint.from_pretrained(save(tmp_path / "again", loaded, family, method))
    assert torch.equal(logits(again, ids), expected)
    torch.testing.assert_close(logits(merge(again), ids), expected, atol=1e-5, rtol=0)


def test_f27_fresh_process_computes_the_same(tmp_path, python):
    model, ids = recovered("llama", "compensated"), tokens(2, 12)
    save(tmp_path / "c", model, "llama", "compensated")
    torch.save(ids, tmp_path / "ids.pt")
    code = """
import sys, torch
from wide.checkpoint import from_pretrained
model = from_pretrained(sys.argv[1] + "/c")
with torch.no_grad():
    torch.save(model(input_ids=torch.load(sys.argv[1] + "/ids.pt")).logits, sys.argv[1] + "/logits.pt")
"""
    variables = environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS=str(torch.get_num_threads()))
    done = python("-c", code, str(tmp_path), folder=tmp_path, environment=variables)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(model, ids))


def test_adapter_is_peft_own_and_its_stock_tools_load_it(tmp_path):
    model, ids = recovered("llama", "wide"), tokens(2, 12)
    folder = save(tmp_path / "c", model, "llama", "wide") / "adapter"
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    options = json.loads((folder / "adapter_config.json").read_text())
    assert options["base_model_name_or_path"] == "tiny"
    assert (options["r"], options["lora_alpha"], options["lora_dropout"]) == (4, 8, 0.0)
    assert set(options["target_modules"]) == {path.split(".")[1] for path in PROJECTIONS}
    plain = PeftModel.from_pretrained(stock("llama"), folder)
    everything = {kind: torch.ones_like(keep) for kind, keep in pattern(model, 2, 12).items()}
    with model.forced(**everything):
        assert torch.equal(logits(plain, ids), logits(model, ids))


@pytest.mark.parametrize("change", ("delete", "add", "rename"))
def test_f27_missing_and_extra_lora_keys_are_named(tmp_path, change):
    folder = save(tmp_path / "c", recovered("llama", "wide"), "llama", "wide")
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[5]
    if change == "add":
        name = name.replace("layers.0", "layers.7")
        tensors[name] = torch.zeros(4, 64)
    else:
        tensor = tensors.pop(name)
        if change == "rename":
            tensors[name.replace("lora_", "other.lora_")] = tensor
    save_file(tensors, path)
    config = json.loads((folder / "wide_config.json").read_text())
    config["sha256"]["adapter/adapter_model.safetensors"] = checkpoint_files.sha256(path)
    (folder / "wide_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        checkpoint.from_pretrained(folder)


def test_merged_weights_are_not_saved_as_if_they_were_stock(tmp_path):
    merged = merge(recovered("llama", "wide"))
    with pytest.raises(ValueError, match="LoRA merged into them"):
        save(tmp_path / "c", merged, "llama", "wide")
    assert not (tmp_path / "c").exists()


def stage_two(tmp_path, folder, method: dict):
    return tiny_run_config(tmp_path / "two", NO_DROPOUT | {"from_checkpoint": str(folder)}, method)


@pytest.mark.parametrize("named", ("c", "."))
def test_stage_two_starts_from_stage_ones_routers(tmp_path, named):
    """Named by the checkpoint folder or by the run folder around it."""
    one, ids = untrained("llama", "compensated"), tokens(2, 12)
    one.gates.dial.fill_(0.25)
    save(tmp_path / "checkpoint", one, "llama", "compensated")
    folder = tmp_path if named == "." else tmp_path / "checkpoint"
    config = stage_two(tmp_path, folder, method_options(one, compensation=True) | {"tau_end": 0.4})
    assert experiment.check(config) == tmp_path / "checkpoint"
    two = experiment.start(config, untrained("llama", "compensated", seed=5), fingerprint(stock("llama")))
    assert torch.equal(logits(two, ids), logits(one, ids)) and torch.equal(two.gates.dial, one.gates.dial)
    assert set(trained_tensors(two)) >= {name for name in dict(two.named_parameters()) if "lora_" in name}


def test_stage_two_refuses_what_does_not_fit(tmp_path):
    one = untrained("llama", "compensated")
    options = method_options(one, compensation=True)
    save(tmp_path / "c", one, "llama", "compensated")
    for change in ({"router_norm": False}, {"router_activation": "silu"}, {"sparsity": 0.5}, {"ffn_group_size": 16}):
        with pytest.raises(ValueError, match=f"method.{next(iter(change))}=.* legal"):
            experiment.check(stage_two(tmp_path, tmp_path / "c", options | change))
    with pytest.raises(ValueError, match="another base"):
        experiment.start(stage_two(tmp_path, tmp_path / "c", options), one, fingerprint(stock("qwen3")))
    with pytest.raises(ValueError, match="no WIDE checkpoint"):
        experiment.check(stage_two(tmp_path, tmp_path / "nowhere", options))
