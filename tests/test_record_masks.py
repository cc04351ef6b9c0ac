"""Recorded masks: forced upon the model they give its own output back, and the kernels' benchmark reads them."""

import json

import pytest
import torch
from tiny import routed, tokens
from wide_kernels.bench import recorded_masks

from experiments import record_masks
from wide.base_model import fingerprint
from wide.checkpoint import from_pretrained, save_pretrained
from wide.methods import load as load_method
from wide.options import ModelConfig


@pytest.fixture
def model():
    made = routed("llama")
    with torch.no_grad():  # routers that decide by token, not by their bias
        for parameter in made.gates.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    return made


@torch.no_grad()
def test_recorded_masks_forced_upon_the_model_give_its_own_output(model):
    ids = tokens(1, 23)[0]
    masks = record_masks.record(model, ids, length=9)
    for start in (0, 9, 18):
        sequence = ids[None, start : start + 9]
        chosen = model(input_ids=sequence).logits
        part = {kind: mask[:, None, start : start + 9].float() for kind, mask in masks.items()}
        with model.forced(**part):
            assert torch.equal(model(input_ids=sequence).logits, chosen)
        with model.dense():
            assert not torch.allclose(model(input_ids=sequence).logits, chosen)
    last = record_masks.record(model, ids, length=9, layers=[model.geometry.num_layers - 1])
    assert torch.equal(last["ffn"][0], masks["ffn"][-1])


def test_what_cannot_be_recorded_is_refused(model):
    with pytest.raises(ValueError, match="no tokens"):
        record_masks.record(model, torch.empty(0, dtype=torch.long), 4)
    with pytest.raises(ValueError, match=r"0\.\.1, got \[7\]"):
        record_masks.record(model, tokens(1, 4)[0], 4, [7])


def test_a_checkpoints_masks_over_a_text_are_what_the_benchmark_reads(model, tmp_path, capsys):
    method = load_method("wide")
    config = method.Config(
        attn_group_size=model.geometry.heads_per_kv, ffn_group_size=32, router_rank=4, init_gap=0.0, compensation=False
    )
    base = ModelConfig(name="tiny", source="tiny", family="llama")
    options = {"model": base, "method": config, "base_fingerprint": fingerprint(model.base)}
    save_pretrained(model, tmp_path / "run" / "checkpoint", **options, metrics={})
    (tmp_path / "text.txt").write_text("The state of the union is a text. " * 20)
    arguments = [str(tmp_path / "run"), "--text", str(tmp_path / "text.txt"), "--tokens", "30", "--length", "16"]
    record_masks.main([*arguments, "--out", str(tmp_path / "masks" / "m.safetensors")])
    said = json.loads(capsys.readouterr().out)
    read = recorded_masks(tmp_path / "masks" / "m.safetensors")
    loaded = from_pretrained(tmp_path / "run" / "checkpoint")
    num_layers, groups = loaded.geometry.num_layers, loaded.gates.num_groups
    assert set(read) == {f"{kind}.{layer}" for kind in groups for layer in range(num_layers)}
    for kind, count in groups.items():
        assert said["shapes"][kind] == [num_layers, 30, count]
        kept = torch.stack([read[f"{kind}.{layer}"] for layer in range(num_layers)])
        assert kept.shape == (num_layers, 30, count) and kept.dtype == torch.bool
        assert said["kept"][kind] == pytest.approx(kept.float().mean().item(), abs=1e-4) and 0 < said["kept"][kind] < 1
    with pytest.raises(SystemExit):
        record_masks.main([*arguments, "--out", str(tmp_path / "m.npz")])
