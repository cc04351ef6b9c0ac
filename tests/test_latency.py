"""The action `latency` on tiny models: rows, correctness gate, limits, learned checkpoints, mistakes. Times nothing."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from hydra import compose, initialize_config_dir
from tiny import routed

from experiments import latency
from wide import methods
from wide.base_model import fingerprint, tiny_config
from wide.checkpoint import save_pretrained
from wide.config import build, register_schemas
from wide.engine.check import check_engine
from wide.engine.limits import Limits
from wide.engine.synthetic import SIZES, forced_keep, published_config
from wide.families import Geometry
from wide.methods import load as load_method
from wide.options import Config, ModelConfig

OPTIONS = {"attn_group_size": 2, "ffn_group_size": 32, "router_rank": 4, "init_gap": 0.0}
TINY = (
    "model=tiny_llama",
    "logger=none",
    "action=latency",
    "method.attn_group_size=2",
    "method.ffn_group_size=32",
    "bench.prefill=[16,24]",
    "bench.decode=[8]",
    "bench.check_tokens=150",
    "bench.new_tokens=2",
    "bench.repeats=1",
)


@pytest.fixture(scope="module", autouse=True)
def hydra_conf():
    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


def make(folder, *overrides: str) -> Config:
    node = compose("config", overrides=[*TINY, *overrides])
    return build(node, methods.load(node.method.name).Config, str(folder))


def test_random_masks_give_a_row_for_every_point(tmp_path):
    config = make(tmp_path, "bench.batch=[1,2]", "bench.sparsity=[0.3,0.7]", "bench.ffn_group_sizes=[32,16]")
    latency.check(config)
    report = latency.run(config)
    rows = report["measurements"]
    assert {(row["phase"], row["batch"], row["tokens"]) for row in rows} == {
        (phase, batch, tokens)
        for batch in (1, 2)
        for phase, tokens in (("prefill", 16), ("prefill", 24), ("decode", 8))
    }
    settings = {(row["path"], row["sparsity"], row.get("ffn_group_size")) for row in rows}
    assert settings == {("engine dense", 0.0, None), ("transformers", 0.0, None)} | {
        ("engine", sparsity, size) for sparsity in (0.3, 0.7) for size in (32, 16)
    }
    assert len(rows) == 6 * len(settings) and report["correct"] and all(row["correct"] for row in rows)
    for row in rows:
        assert row["fastest_ms"] <= row["ms"] <= row["slowest_ms"]
        dense = [r["ms"] for r in rows if r["path"] == "engine dense" and latency._point(r) == latency._point(row)]
        assert row["speedup_over_engine_dense"] == pytest.approx(dense[0] / row["ms"])
        assert row["speedup_over_best_dense"] <= row["speedup_over_engine_dense"]
    assert json.loads((tmp_path / "latency.json").read_text())["measurements"] == rows
    assert (tmp_path / "latency.png").stat().st_size > 0


def test_learned_masks_come_from_the_checkpoint(tmp_path):
    model = routed("llama", **OPTIONS)
    save_pretrained(
        model,
        tmp_path / "run" / "checkpoint",
        model=ModelConfig(name="tiny_llama", source="tiny", family="llama"),
        method=load_method("wide").Config(**OPTIONS, compensation=False),
        base_fingerprint=fingerprint(model.base),
        metrics={"sparsity_total": 0.41},
    )
    checkpoint = f"bench.checkpoint={tmp_path / 'run'}"
    config = make(tmp_path, checkpoint, "bench.sparsity=[]", "bench.baselines=[reference]", "data.block_size=32",
                  f"data.cache_dir={tmp_path / 'cache'}", "data=files", f"data.path={tmp_path / 'text'}")  # fmt: skip
    (tmp_path / "text").mkdir()
    for name in "abcdefghijklmnop":
        (tmp_path / "text" / f"{name}.txt").write_text(f"{name} state of the union " * 20)
    latency.check(config)
    rows = latency.run(config)["measurements"]
    assert {(row["path"], row["sparsity"], row.get("masks")) for row in rows} == {
        ("engine dense", 0.0, None),
        ("engine", 0.41, "learned"),
        ("reference", 0.41, "learned"),
    }
    assert all("speedup_over_engine_dense" in row for row in rows)


MISTAKES = [
    (["bench.ffn_group_sizes=[33]"], "ffn_group_size=33"),
    (["bench.prefill=[4096]"], "4096 tokens are too long; legal: 512"),
    (["bench.baselines=[reference]"], "need learned masks"),
    (["bench.sparsity=[]"], "need learned masks"),
    (["bench.checkpoint=nowhere"], "bench.checkpoint='nowhere'"),
    (["bench.baselines=[vllm]"], "bench.baselines='vllm'"),
    (["bench.sparsity=[1.5]"], "bench.sparsity=1.5"),
    (["bench.prefill=[]", "bench.decode=[]"], "at least one length"),
    (["method=dense", "method.attn_group_size=1", "method.ffn_group_size=1"], "method.name='dense'"),
]


@pytest.mark.parametrize(("overrides", "message"), MISTAKES, ids=[" ".join(case[0]) for case in MISTAKES])
def test_mistakes_are_refused_before_anything_is_built(tmp_path, overrides, message):
    with pytest.raises(ValueError) as caught:
        latency.check(make(tmp_path, *overrides))
    assert message in str(caught.value)


@pytest.mark.parametrize("family", ("llama", "qwen2", "qwen3", "mistral"))
def test_the_gate_is_green_for_every_family_and_red_for_a_broken_engine(family, monkeypatch):
    arguments = (tiny_config(family), load_method("wide").Config(**OPTIONS), 0.5, torch.device("cpu"), torch.float32)
    verdict = check_engine(*arguments, 150)
    assert verdict["correct"], verdict
    assert {"prefill", "prefill in chunks", "unequal prompts", "prefill, decoded", "unequal prompts, decoded"} == set(
        verdict["errors"]
    )
    monkeypatch.setattr("wide.engine.model.Decoder._owed", lambda *_: None)
    assert not check_engine(*arguments, 150)["correct"], "compensation left out must show"


def test_forced_masks_skip_what_was_asked():
    gates = routed("llama").gates
    keep = forced_keep(gates, 0.3, seed=0, period=2000)
    assert {kind: rows.shape for kind, rows in keep.items()} == {"attention": (2, 2000, 2), "ffn": (2, 2000, 5)}
    for rows in keep.values():
        assert float(rows.float().mean()) == pytest.approx(0.7, abs=0.02)


@pytest.mark.parametrize(
    ("name", "billions"), [("llama8b", 8.03), ("qwen3_14b", 14.77)]
)  # parameters that the models' cards state
def test_published_sizes_have_the_published_number_of_parameters(name, billions):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(published_config(name))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
    assert name in SIZES


def test_limits_of_llama8b_by_hand():
    geometry = Geometry.from_hf(published_config("llama8b"))
    model = SimpleNamespace(geometry=geometry, gates=SimpleNamespace(router_parameters_per_layer=lambda: 0))
    from wide.model import RoutedModel

    model.cost = lambda length: RoutedModel.cost(model, length)
    limits = Limits(bytes_per_second=4e12, flops_per_second=7e14)
    weights = 2 * (32 * (2 * 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096 * 1024) + 4096 * 128256)
    keys = 2 * 2 * 32 * 1024 * 1000
    assert limits.milliseconds(model, "decode", 1, 1000, 0.0) == pytest.approx((weights + keys) / 4e9)
    half = 2 * (32 * (4096 * 4096 + 1.5 * 4096 * 14336 + 2 * 4096 * 1024) + 4096 * 128256) + keys / 2
    assert limits.milliseconds(model, "decode", 1, 1000, 0.5) == pytest.approx(half / 4e9)
    products = 32 * (2 * 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096 * 1024 + 4096 * 8193) * 8192 + 4096 * 128256
    assert limits.milliseconds(model, "prefill", 1, 8192, 0.0) == pytest.approx(2 * products / 7e11)
