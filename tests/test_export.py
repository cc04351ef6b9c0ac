"""Static exports: loaded by transformers alone, equal to the masked model, smaller on disk; what needs padding."""

import json
from pathlib import Path

import pytest
import torch
from rivals import STATIC, build, config_of
from tiny import FAMILIES, routed, stock, tokens
from transformers import AutoModelForCausalLM

from experiments import export_bench
from wide import families
from wide.adapter import add_lora, merge
from wide.base_model import fingerprint
from wide.checkpoint import save_pretrained
from wide.export import export_static
from wide.families import Geometry
from wide.methods import load as load_method
from wide.model import RoutedModel
from wide.options import ModelConfig, StageConfig

HAS_BIASES = ("llama", "smol", "qwen2")
MEANS = ("flap", "flap_heads")


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def size_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("case", STATIC)
@pytest.mark.parametrize("family", FAMILIES)
def test_export_equals_the_masked_model(case, family, tmp_path):
    model, ids = build(case, family), tokens(2, 20)
    if case in MEANS and family not in HAS_BIASES:
        with pytest.raises(ValueError, match=r"legal: method\.compensation=false"):
            export_static(model, tmp_path / "e")
        model = build(case, family, compensation=False)
    shape = export_static(model, tmp_path / "e")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "e").eval()
    torch.testing.assert_close(logits(exported, ids), logits(model, ids), atol=1e-5, rtol=0)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(exported.generate(ids[:1], **settings), model.generate(input_ids=ids[:1], **settings))
    keep = model.gates.static_keep()
    groups = keep["ffn"].sum(1).long() * model.gates.ffn_group_size
    assert shape.channels == max(1, int(groups.max()))
    assert shape.padded["ffn"] == [i for i in shape.layers if int(groups[i]) < shape.channels]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", ("ddp", "wanda_sp", "sleb", "shortgpt"))
def test_equal_shares_and_whole_layers_need_no_padding_and_are_smaller(case, family, tmp_path):
    model = build(case, family)
    if case == "ddp":  # as scattered, every other group of each layer
        assert len(set(model.gates.static_keep()["ffn"].sum(1).tolist())) == 1
    shape = export_static(model, tmp_path / "e")
    assert shape.padded == {"attention": [], "ffn": []}
    stock(family).save_pretrained(tmp_path / "stock")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "e")
    removed = sum(p.numel() for p in stock(family).parameters()) - sum(p.numel() for p in exported.parameters())
    assert size_on_disk(tmp_path / "stock") - size_on_disk(tmp_path / "e") == pytest.approx(4 * removed, abs=4096)
    attention = sum(p.numel() for p in stock(family).model.layers[0].self_attn.parameters())
    assert removed > attention


def test_single_query_heads_shrink_where_all_kv_heads_lose_as_many(tmp_path):
    model, ids = build("ddp_single", "llama"), tokens(1, 9)
    shape = export_static(model, tmp_path / "e")
    assert (shape.kv_heads, shape.heads_per_kv, shape.channels) == (2, 1, 80)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "e").config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 2, 16)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "e")
    torch.testing.assert_close(logits(exported, ids), logits(model, ids), atol=1e-5, rtol=0)


def test_head_counts_that_llamas_config_refuses_become_mistral(tmp_path):
    """Hidden size 64 and three of four heads left."""
    config = stock("llama").config
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 4, 16
    torch.manual_seed(0)
    base, ids = AutoModelForCausalLM.from_config(config).eval(), tokens(1, 9)
    method = load_method("flap")
    options = {"attn_group_size": 1, "ffn_group_size": 32, "compensation": False}
    gates = method.build(method.Config(**options), Geometry.from_hf(config))
    gates.keep_attention[:, 2] = 0
    model = RoutedModel(base, gates, families.load("llama"))
    assert export_static(model, tmp_path / "e").kv_heads == 3
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "e").eval()
    assert exported.config.model_type == "mistral" and exported.config.num_attention_heads == 3
    torch.testing.assert_close(logits(exported, ids), logits(model, ids), atol=1e-5, rtol=0)


def test_lora_is_merged_first(tmp_path):
    model, ids = add_lora(build("flap", "llama"), StageConfig(name="lora", lora_rank=2), seed=1), tokens(1, 9)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    expected = logits(model, ids)
    with pytest.raises(ValueError, match="LoRA is not merged"):
        export_static(model, tmp_path / "e")
    export_static(merge(model), tmp_path / "e")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "e")
    torch.testing.assert_close(logits(exported, ids), expected, atol=1e-5, rtol=0)


def test_benchmark_weighs_and_times_what_equals_the_masked_model(tmp_path, monkeypatch):
    model = build("wanda_sp", "llama")
    base = ModelConfig(name="tiny", source="tiny", family="llama")
    options = {"model": base, "method": config_of("wanda_sp", "llama"), "base_fingerprint": fingerprint(model.base)}
    save_pretrained(model, tmp_path / "run" / "checkpoint", **options, metrics={"skipped_params": 0.5})
    monkeypatch.setattr(export_bench, "TOKENS", 20)
    export_bench.main([str(tmp_path / "run"), "--folder", str(tmp_path / "e"), "--rows", str(tmp_path / "rows.jsonl")])
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "e")
    removed = sum(p.numel() for p in stock("llama").parameters()) - sum(p.numel() for p in exported.parameters())
    assert row["stock_megabytes"] - row["megabytes"] == pytest.approx(4e-6 * removed, abs=4e-3)
    assert row["difference"] <= 1e-5 and row["shape"]["padded_layers"] == {"attention": 0, "ffn": 0}
    assert row["prefill_speedup"] == row["stock_prefill_ms"] / row["exported_prefill_ms"]
    monkeypatch.setattr(export_bench, "TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="away from the masked one"):
        export_bench.measure(tmp_path / "run" / "checkpoint", tmp_path / "other", tmp_path / "stock")


def test_methods_that_decide_per_token_are_refused(tmp_path):
    with pytest.raises(ValueError, match="decides anew for each token"):
        export_static(routed("llama"), tmp_path / "e")
