"""Files that are truncated, tampered with, swapped or of another kind: each is named, none is loaded in part."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_checkpoint import logits, rewrite_config, save, trained
from training import build_module, fit, tiny_run_config

from experiments.mistakes import explain
from experiments.pipeline import check_files
from experiments.tables.rows import load as load_rows
from experiments.train import checkpoint_to_resume
from wide import checkpoint, results
from wide.base_model import fingerprint, load_tiny
from wide.checkpoint_files import sha256
from wide.resume import WholeCheckpoints


def config_of(folder: Path) -> dict:
    return json.loads((folder / "wide_config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": []}, "base is of another kind"),
        ({"base": {}}, r"says nothing of base\.fingerprint"),
        ({"method": "wide"}, "method is of another kind"),
        ({"method": {}}, r"says nothing of method\.name"),
        ({"method": {"name": "../engine"}}, r"method\.name='\.\./engine' is unknown"),
        ({"method": {"name": "wide", "sparsity": "much"}}, r"method\.sparsity"),
        ({"method": {"name": "wide", "more": 1}}, r"method\.more is unknown"),
        ({"geometry": None}, "geometry is of another kind"),
        ({"geometry": {}}, r"geometry\.\w+ is None, that of the base is"),
        ({"dial_curve": [1]}, "dial_curve is of another kind"),
        ({"dial_curve": [{"target": 0.5}]}, "dial_curve is of another kind"),
        ({"sha256": {}}, r"says nothing of sha256\.routers\.safetensors"),
        ({"sha256": ["routers.safetensors"]}, "sha256 is of another kind"),
        ({"sha256": {"routers.safetensors": "0", "../secret": "0"}}, "'../secret' lies outside the checkpoint"),
        ({"sha256": {"routers.safetensors": "0", "/etc/hostname": "0"}}, "'/etc/hostname' lies outside the checkpoint"),
        ({"sha256": {"routers.safetensors": "0"}}, r"routers\.safetensors is incomplete or altered"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_tampered_config_is_refused_by_its_part(tmp_path, changes, message):
    save(tmp_path / "c")
    rewrite_config(tmp_path / "c", **changes)
    with pytest.raises(ValueError, match=message) as caught:
        checkpoint.from_pretrained(tmp_path / "c")
    assert explain(caught.value) and "\n" not in explain(caught.value)


@pytest.mark.parametrize("text", ("[" * 100_000, '{"format_version": ' + "2" * 5000 + "}"), ids=("brackets", "digits"))
def test_json_that_no_parser_takes_is_refused(tmp_path, text):
    save(tmp_path / "c")
    (tmp_path / "c" / "wide_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"wide_config\.json is incomplete or not JSON"):
        checkpoint.from_pretrained(tmp_path / "c")


@pytest.mark.parametrize("key", ("num_layers", "head_dim", "ffn_size", "family", "sliding_window"))
def test_a_stored_geometry_that_is_not_the_bases_is_refused(tmp_path, key):
    save(tmp_path / "c")
    geometry = config_of(tmp_path / "c")["geometry"]
    rewrite_config(tmp_path / "c", geometry=geometry | {key: 3})
    with pytest.raises(ValueError, match=rf"geometry\.{key} is 3, that of the base is {geometry[key]!r}"):
        checkpoint.from_pretrained(tmp_path / "c")


def test_the_fingerprint_tells_families_with_the_same_weights_apart():
    """Mistral reads Llama's tensors, and computes something else with them once its window is shorter than the text."""
    one, other = load_tiny("llama"), load_tiny("llama")
    assert fingerprint(one) == fingerprint(other)
    other.config.model_type = "mistral"
    assert fingerprint(one) != fingerprint(other)


def test_tensors_swapped_between_two_checkpoints_are_refused(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / name, trained())
    one, other = (tmp_path / name / "routers.safetensors" for name in ("a", "b"))
    tensors = {key: tensor + 1 for key, tensor in load_file(other).items()}
    save_file(tensors, other)
    shutil.copy(other, one)
    with pytest.raises(ValueError, match=r"a/routers\.safetensors is incomplete or altered"):
        checkpoint.from_pretrained(tmp_path / "a")


def test_figures_that_are_not_finite_leave_valid_json(tmp_path):
    save(tmp_path / "c", metrics={"gap": float("nan"), "list": [float("inf")], "sparsity": 0.5})
    text = (tmp_path / "c" / "wide_config.json").read_text()
    stored = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert stored["metrics"] == {"gap": None, "list": [None], "sparsity": 0.5}


def with_adapter(folder: Path) -> Path:
    """A checkpoint with LoRA in it; returns the adapter's folder."""
    model = trained()
    stock = fingerprint(model.base)
    model.model = get_peft_model(model.base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.attach_masks()
    save(folder, model, base_fingerprint=stock)
    return folder / "adapter"


def test_an_adapter_that_the_config_does_not_list_is_refused(tmp_path):
    """Else a folder put there, or left there, would be loaded unchecked."""
    expected = logits(save(tmp_path / "c"))
    adapter = with_adapter(tmp_path / "other")
    shutil.copytree(adapter, tmp_path / "c" / "adapter")
    with pytest.raises(ValueError, match=r"adapter/\w+\.(json|safetensors) is no part of the checkpoint"):
        checkpoint.from_pretrained(tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "adapter")
    assert torch.equal(logits(checkpoint.from_pretrained(tmp_path / "c")), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "no plain LoRA: PREFIX_TUNING"),
        ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "no plain LoRA: megatron_config"),
    ],
    ids=lambda value: min(value) if isinstance(value, dict) else "",
)
def test_an_adapter_that_would_import_or_is_no_lora_is_refused(tmp_path, changes, message):
    path = with_adapter(tmp_path / "c") / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    digests = config_of(tmp_path / "c")["sha256"] | {"adapter/adapter_config.json": sha256(path)}
    rewrite_config(tmp_path / "c", sha256=digests)
    with pytest.raises(ValueError, match=message):
        checkpoint.from_pretrained(tmp_path / "c")


def test_an_adapter_pickle_beside_the_tensors_is_never_read(tmp_path):
    adapter = with_adapter(tmp_path / "c")
    expected = logits(checkpoint.from_pretrained(tmp_path / "c"))
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Loud()))
    assert torch.equal(logits(checkpoint.from_pretrained(tmp_path / "c")), expected)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is missing"):
        checkpoint.from_pretrained(tmp_path / "c")


class Loud:
    """Unpickling this fails the test: code from a file has run."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory) -> Path:
    """A run folder with a resumable state after two of four steps."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny_run_config(folder, {"steps": 2, "batch_size": 4})
    fit(config, build_module(config))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


@pytest.mark.parametrize("damage", ("cut", "empty", "text", "flip"))
def test_a_damaged_resumable_state_is_refused_before_a_weight_is_loaded(tmp_path, trained_run, damage):
    data = (trained_run / "checkpoints" / "last.ckpt").read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    damaged = {"cut": data[:-100], "empty": b"", "text": b"not a checkpoint", "flip": flipped}[damage]
    (tmp_path / "last.ckpt").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"last\.ckpt is (incomplete or no checkpoint|damaged)"):
        checkpoint_to_resume(str(tmp_path / "last.ckpt"))


def test_a_resumable_state_with_code_in_it_is_refused_and_the_code_not_run(tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {}, "history": [], "global_step": 0, "more": Loud()}, path)
    with pytest.raises(ValueError, match=r"last\.ckpt holds more than tensors and is not loaded"):
        WholeCheckpoints().load_checkpoint(path)


def test_a_state_of_another_project_is_refused(tmp_path):
    torch.save({"model": torch.zeros(2)}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"last\.ckpt is no resumable checkpoint of this project"):
        WholeCheckpoints().load_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ffn_group_size": 16}, r"method\.ffn_group_size=16, but the resumed run has 32"),
        ({"sparsity": 0.7}, r"method\.sparsity=0\.7, but the resumed run has"),
    ],
    ids=("groups", "sparsity"),
)
def test_a_state_of_a_run_with_another_method_is_refused(trained_run, change, message):
    config = tiny_run_config(trained_run, {"steps": 2, "batch_size": 4}, change)
    config.resume = str(trained_run)
    with pytest.raises(ValueError, match=message):
        check_files(config)


def test_a_state_of_a_run_on_another_model_is_refused(trained_run):
    config = tiny_run_config(trained_run, {"steps": 2, "batch_size": 4})
    config.resume = str(trained_run)
    check_files(config)
    config.model.family = "qwen2"
    with pytest.raises(ValueError, match=r"model\.family='qwen2', but the resumed run has 'llama'"):
        check_files(config)


@pytest.mark.parametrize(
    "line",
    ("[" * 100_000, '{"n": ' + "1" * 5000 + "}", "\x00\x01\x02", '"text"', "null", '{"a": 1'),
    ids=("brackets", "digits", "binary", "text", "null", "cut"),
)
def test_a_line_that_is_no_row_is_named_and_the_others_are_read(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"run_id": "a"}}\n{line}\n{{"run_id": "b"}}\n')
    with pytest.warns(UserWarning, match=r"rows\.jsonl:2 is not a whole JSON row"):
        assert list(results.read_rows(path).run_id) == ["a", "b"]


def test_a_row_that_is_no_runs_does_not_stop_the_tables(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"note": "mine"}\n')
    with pytest.warns(UserWarning, match="row without run_id, status or config_hash"):
        assert load_rows(tmp_path / "rows.jsonl").empty
