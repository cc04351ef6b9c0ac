"""The checkpoint folder: round trip, and every damaged or foreign folder refused by name."""

import json

import pytest
import torch
from tiny import routed, tokens

from wide import checkpoint
from wide.base_model import fingerprint
from wide.config import ModelConfig
from wide.methods import load as load_method

OPTIONS = {"attn_group_size": 2, "ffn_group_size": 32, "router_rank": 4, "init_gap": 0.0, "compensation": True}


def save(folder, **more):
    model = routed("llama", **OPTIONS)
    with torch.no_grad():
        for parameter in model.gates.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    checkpoint.save_pretrained(
        model,
        folder,
        model=ModelConfig(name="tiny", source="tiny", family="llama"),
        method=load_method("wide").Config(**OPTIONS),
        base_fingerprint=fingerprint(model.base),
        **more,
    )
    return model


def test_loaded_model_is_bit_equal(tmp_path):
    model, ids = save(tmp_path / "c"), tokens(2, 9)
    loaded = checkpoint.from_pretrained(tmp_path / "c")
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert torch.equal(loaded.last_gates("ffn"), model.last_gates("ffn"))
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "README.md",
        "routers.safetensors",
        "wide_config.json",
    ]


def test_f27_another_base_is_refused(tmp_path):
    save(tmp_path / "c")
    with pytest.raises(ValueError, match="another base"):
        checkpoint.from_pretrained(tmp_path / "c", base=ModelConfig(source="tiny", family="qwen2"))


@pytest.mark.parametrize("damage", ("cut", "empty", "text", "flip"))
def test_f31_damaged_tensors_are_refused(tmp_path, damage):
    save(tmp_path / "c")
    path = tmp_path / "c" / "routers.safetensors"
    data = path.read_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    path.write_bytes({"cut": data[:-100], "empty": b"", "text": b"not tensors", "flip": flipped}[damage])
    with pytest.raises(ValueError, match=r"routers\.safetensors is incomplete or altered"):
        checkpoint.from_pretrained(tmp_path / "c")


@pytest.mark.parametrize("change", ("delete", "add"))
def test_f27_missing_and_extra_keys_are_named(tmp_path, change):
    from safetensors.torch import load_file, save_file

    save(tmp_path / "c")
    path = tmp_path / "c" / "routers.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    if change == "delete":
        del tensors[name]
    else:
        name, tensors["more"] = "more", torch.zeros(1)
    save_file(tensors, path)
    config = json.loads((tmp_path / "c" / "wide_config.json").read_text())
    config["sha256"]["routers.safetensors"] = checkpoint._sha256(path)
    (tmp_path / "c" / "wide_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=name):
        checkpoint.from_pretrained(tmp_path / "c")


def test_f31_a_failed_save_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    first, ids = save(tmp_path / "c"), tokens(1, 5)
    monkeypatch.setattr(checkpoint, "model_card", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(tmp_path / "c")
    monkeypatch.undo()
    with torch.no_grad():
        expected = first(input_ids=ids).logits
        assert torch.equal(checkpoint.from_pretrained(tmp_path / "c")(input_ids=ids).logits, expected)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_foreign_folders_are_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        save(tmp_path)
    with pytest.raises(ValueError, match="is no WIDE checkpoint"):
        checkpoint.from_pretrained(tmp_path)
