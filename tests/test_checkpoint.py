"""The checkpoint folder: round trip, every damaged or foreign folder refused by name, saves killed at any moment."""

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import ROOT, environment
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import routed, stock, tokens

from wide import checkpoint
from wide.base_model import fingerprint
from wide.checkpoint_files import sha256
from wide.dial import DialPoint, fit_curve
from wide.methods import load as load_method
from wide.model import RoutedModel
from wide.options import ModelConfig

OPTIONS = {"attn_group_size": 2, "ffn_group_size": 32, "router_rank": 4, "init_gap": 0.0, "compensation": True}
TINY = ModelConfig(name="tiny", source="tiny", family="llama")
FILES = ["README.md", "routers.safetensors", "wide_config.json"]


def trained(dtype: torch.dtype = torch.float32) -> RoutedModel:
    """Routers as if they had learned something, over a base stored in `dtype`."""
    model = routed("llama", **OPTIONS)
    model.base.to(dtype)
    with torch.no_grad():
        for parameter in model.gates.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(folder: Path, model: RoutedModel | None = None, **more) -> RoutedModel:
    model = model or trained()
    method = load_method("wide").Config(**OPTIONS)
    name = more.pop("base_fingerprint", None) or fingerprint(model.base)
    checkpoint.save_pretrained(model, folder, model=TINY, method=method, base_fingerprint=name, **more)
    return model


def logits(model: RoutedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(2, 9)).logits


def rewrite_config(folder: Path, **changes) -> None:
    path = folder / "wide_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_loaded_model_is_bit_equal(tmp_path, dtype):
    model = save(tmp_path / "c", trained(getattr(torch, dtype)))
    expected = logits(model)
    loaded = checkpoint.from_pretrained(tmp_path / "c", base=ModelConfig(source="tiny", family="llama", dtype=dtype))
    assert torch.equal(logits(loaded), expected)
    for kind in ("attention", "ffn"):
        assert torch.equal(loaded.last_gates(kind), model.last_gates(kind))
        assert 0 < float(loaded.last_gates(kind).mean()) < 1
    assert {p.dtype for p in loaded.gates.parameters()} == {torch.float32}
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == FILES


def test_a_checkpoint_of_a_float32_base_fits_the_same_base_in_bfloat16(tmp_path):
    save(tmp_path / "c")
    options = ModelConfig(source="tiny", family="llama", dtype="bfloat16")
    assert checkpoint.from_pretrained(tmp_path / "c", base=options).base.dtype == torch.bfloat16


def test_f27_another_base_is_refused(tmp_path, monkeypatch):
    save(tmp_path / "c")
    with pytest.raises(ValueError, match="another base"):
        checkpoint.from_pretrained(tmp_path / "c", base=ModelConfig(source="tiny", family="qwen2"))
    other = stock("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    monkeypatch.setattr(checkpoint, "load_base", lambda config, device: other)
    with pytest.raises(ValueError, match="another base"):
        checkpoint.from_pretrained(tmp_path / "c")


@pytest.mark.parametrize("damage", ("cut", "empty", "text", "flip"))
def test_f31_damaged_tensors_are_refused(tmp_path, damage):
    save(tmp_path / "c")
    path = tmp_path / "c" / "routers.safetensors"
    data = path.read_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    path.write_bytes({"cut": data[:-100], "empty": b"", "text": b"not tensors", "flip": flipped}[damage])
    with pytest.raises(ValueError, match=r"routers\.safetensors is incomplete or altered"):
        checkpoint.from_pretrained(tmp_path / "c")


def test_f31_a_missing_tensor_file_is_named(tmp_path):
    save(tmp_path / "c")
    (tmp_path / "c" / "routers.safetensors").unlink()
    with pytest.raises(ValueError, match=r"routers\.safetensors is missing: the checkpoint is incomplete"):
        checkpoint.from_pretrained(tmp_path / "c")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, r"is no WIDE checkpoint: wide_config\.json is missing"),
        (b"", r"wide_config\.json is incomplete or not JSON"),
        (b'{"format_version": 2, "base"', r"wide_config\.json is incomplete or not JSON"),
        (b"\xff\xfe", r"wide_config\.json is incomplete or not JSON"),
        (b"[1]", r"wide_config\.json: format_version None; legal: 2"),
        (b'{"format_version": 7}', r"wide_config\.json: format_version 7; legal: 2"),
        (b'{"format_version": 2}', r"wide_config\.json is incomplete: it says nothing of base, geometry"),
    ],
)
def test_f31_damaged_config_is_refused(tmp_path, content, cause):
    save(tmp_path / "c")
    path = tmp_path / "c" / "wide_config.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=cause):
        checkpoint.from_pretrained(tmp_path / "c")


@pytest.mark.parametrize("change", ("delete", "add", "shape"))
def test_f27_tensors_that_do_not_fit_are_named(tmp_path, change):
    save(tmp_path / "c")
    path = tmp_path / "c" / "routers.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    if change == "delete":
        del tensors[name]
    elif change == "add":
        name, tensors["more"] = "more", torch.zeros(1)
    else:
        tensors[name] = torch.zeros(1, 3)
    save_file(tensors, path)
    rewrite_config(tmp_path / "c", sha256={path.name: sha256(path)})
    with pytest.raises(ValueError, match=rf"routers\.safetensors: .*{name}"):
        checkpoint.from_pretrained(tmp_path / "c")


def test_adapter_comes_back_bit_equal_and_is_refused_when_damaged(tmp_path):
    """F27 and F31 for the part that PEFT would load with at most a warning."""
    model = trained()
    stock_fingerprint = fingerprint(model.base)
    torch.manual_seed(3)
    lora = LoraConfig(r=2, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
    model.model = get_peft_model(model.base, lora)
    model.attach_masks()
    save(tmp_path / "c", model, base_fingerprint=stock_fingerprint)
    assert torch.equal(logits(checkpoint.from_pretrained(tmp_path / "c")), logits(model))
    weights = tmp_path / "c" / "adapter" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is incomplete or altered"):
        checkpoint.from_pretrained(tmp_path / "c")
    weights.unlink()
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is missing"):
        checkpoint.from_pretrained(tmp_path / "c")


@pytest.mark.parametrize("moment", ("tensors", "card", "swap", "move"))
def test_f31_a_failed_save_leaves_the_previous_checkpoint(tmp_path, monkeypatch, moment):
    """A full disk while writing the tensors or the card, or while moving the folder, with and without a swap."""
    expected = logits(save(tmp_path / "c"))
    rename, moved = os.rename, []

    def full(*args, **kwargs):
        raise OSError("no space left")

    def second_fails(source, target):
        moved.append(source)
        full() if len(moved) == 2 else rename(source, target)

    if moment == "move":
        monkeypatch.setattr(checkpoint, "_swap", lambda one, other: False)
        monkeypatch.setattr(checkpoint.os, "rename", second_fails)
    else:
        monkeypatch.setattr(checkpoint, {"tensors": "save_file", "card": "model_card", "swap": "_swap"}[moment], full)
    with pytest.raises(OSError, match="no space left"):
        save(tmp_path / "c")
    monkeypatch.undo()
    assert torch.equal(logits(checkpoint.from_pretrained(tmp_path / "c")), expected)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("can_swap", (True, False))
def test_a_second_save_replaces_the_first(tmp_path, monkeypatch, can_swap):
    save(tmp_path / "c")
    if not can_swap:
        monkeypatch.setattr(checkpoint, "_swap", lambda one, other: False)
    second = save(tmp_path / "c")
    assert torch.equal(logits(checkpoint.from_pretrained(tmp_path / "c")), logits(second))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == FILES


KILLED_SAVES = """
import os, random, signal, sys, time, warnings
from pathlib import Path
from safetensors.torch import load_file
from test_checkpoint import save, trained
from wide import checkpoint

folder, waits = Path(sys.argv[1]), random.Random(0)

def filled(value):
    model = trained()
    for parameter in model.gates.parameters():
        parameter.data.fill_(value)
    return model

models = [filled(1.0), filled(2.0)]
save(folder, models[0])
for _ in range(20):
    child = os.fork()
    if not child:
        while True:
            for model in models:
                save(folder, model)
    time.sleep(waits.uniform(0.02, 0.12))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    checkpoint.read_config(folder)
    tensors = load_file(folder / "routers.safetensors")
    values = {float(v) for n, t in tensors.items() if n != "dial" for v in t.unique()}
    assert values in ({1.0}, {2.0}), values
print("whole after 20 kills")
"""


def test_f31_killed_saves_leave_a_whole_checkpoint(tmp_path, python):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    arguments = ("-c", KILLED_SAVES, str(tmp_path / "c"))
    done = python(*arguments, folder=tmp_path, environment=environment(PYTHONPATH=paths))
    assert done.stdout == "whole after 20 kills\n", done.stderr


def test_sparsity_at_load_time_comes_from_the_stored_curve(tmp_path):
    curve = [DialPoint(0.2, 0.21, torch.zeros(2, 2)), DialPoint(0.6, 0.61, torch.ones(2, 2))]
    save(tmp_path / "c", curve=curve)
    loaded = checkpoint.from_pretrained(tmp_path / "c", sparsity=0.31)
    torch.testing.assert_close(loaded.gates.dial, torch.full((2, 2), 0.25))
    assert torch.equal(checkpoint.from_pretrained(tmp_path / "c").gates.dial, torch.zeros(2, 2))
    for asked in (0.1, 0.7):
        with pytest.raises(ValueError, match=rf"sparsity={asked} .*legal: 0\.210 to 0\.610"):
            checkpoint.from_pretrained(tmp_path / "c", sparsity=asked)
    rewrite_config(tmp_path / "c", dial_curve=[])
    with pytest.raises(ValueError, match=r"lists 0 dial points, routers\.safetensors holds 2"):
        checkpoint.from_pretrained(tmp_path / "c", sparsity=0.31)


def test_sparsity_at_load_time_is_what_the_loaded_model_skips(tmp_path):
    model, batches = trained(), [{"input_ids": tokens(8, 64, seed=s)} for s in range(2)]
    curve = fit_curve(model, batches, "global", targets=(0.3, 0.4, 0.5))
    save(tmp_path / "c", model, curve=curve)
    loaded = checkpoint.from_pretrained(tmp_path / "c", sparsity=0.45)
    with torch.no_grad(), loaded.collect() as box:
        for batch in batches:
            loaded(**batch)
    assert float(box[0].total) == pytest.approx(0.45, abs=0.01)


def test_sparsity_without_a_curve_is_refused(tmp_path):
    save(tmp_path / "c")
    with pytest.raises(ValueError, match="stores no dial curve"):
        checkpoint.from_pretrained(tmp_path / "c", sparsity=0.5)


def test_foreign_folders_are_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        save(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="is no WIDE checkpoint"):
        checkpoint.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        checkpoint.from_pretrained(tmp_path / "nowhere")
