"""Learned and random rivals: penalties, budgets, sizes and ways of deciding by hand; mistakes in their settings."""

import math

import numpy as np
import pytest
import torch
from rivals import build, config_of, text
from tiny import stock, tokens

from wide.evaluation.perplexity import score
from wide.families import Geometry
from wide.methods import load as load_method
from wide.methods.ddp import build as build_ddp
from wide.routing import KINDS


def test_random_gates_keep_their_rates():
    model = build("random", "llama", sparsity=0.3, attention_sparsity=0.1, ffn_sparsity=0.5)
    for kind, rate in (("attention", 0.1), ("ffn", 0.5)):
        table = getattr(model.gates, f"table_{kind}")
        deviation = math.sqrt(rate * (1 - rate) / table.numel())
        assert abs((~table).double().mean().item() - rate) < 4 * deviation


def test_ddp_penalty_and_ascent_by_hand():
    config = config_of("ddp", "llama", distill_weight=0.0)
    gates = build_ddp(config, Geometry.from_hf(stock("llama").config))
    gates.step.noise, gates.step.tau = {}, torch.tensor(0.2)
    with torch.no_grad():
        for rows in gates.strengths.values():
            for row in rows:
                row.copy_(torch.linspace(0.0, 0.4, len(row)))
    by_kind = []
    for kind in KINDS:
        z = np.linspace(0.0, 0.4, gates.num_groups[kind])
        by_kind.append(np.clip(1.2 / (1 + np.exp(-(z - 0.2) * 2.4 / 0.2)) - 0.1, 0, 1))
    excess = sum(s.mean() for s in by_kind) / 2 - (1 - 0.3)
    undecided = sum((s * (1 - s)).mean() for s in by_kind) / 2
    multipliers = np.zeros(3)
    for step in range(3):
        multipliers += np.array([0.02, 0.4, 0.02]) * np.array([excess, excess**2, undecided])
        wanted = multipliers @ np.array([excess, excess**2, undecided])
        for _ in range(2):  # a second micro-batch of the step climbs no further
            assert gates.penalty({"total": 0.3}, step, 10).item() == pytest.approx(wanted, rel=1e-4)


def test_dllm_budget_is_each_tokens_own_with_a_sine_weight():
    model = build("dllm", "llama")
    model.gates.step.noise = {"attention": torch.zeros(2, 2, 24, 1), "ffn": torch.zeros(2, 2, 24, 0)}
    with torch.no_grad():
        model(input_ids=text()[0]["input_ids"])
    attention = model.last_gates("attention")[..., 0].numpy()
    assert np.array_equal(attention, model.last_gates("ffn")[..., 0].numpy())
    assert attention[:, :, :2].min() == 1  # first tokens run everything
    distance = np.abs(1 - attention.mean(axis=0) - 0.4).mean()
    for step, weight in ((0, 0.0), (5, 5 * math.sin(math.pi / 4)), (10, 5.0)):
        assert model.gates.penalty({"total": 0.4}, step, 10).item() == pytest.approx(weight * distance, abs=1e-5)


def test_dllm_first_layers_run_for_every_token():
    model = build("dllm_kept", "llama")
    with torch.no_grad():
        model(input_ids=tokens(2, 24))
    assert model.last_gates("attention")[0].min() == 1 and model.last_gates("attention")[1].min() == 0


def test_skipgpt_routers_have_the_sizes_of_the_paper_of_its_code_and_of_wide():
    geometry = Geometry.from_hf(stock("llama").config)
    sizes = {"linear": 2 * 64 + 2, "mlp": 64 * 16 + 16 + 16 * 2 + 2, "bottleneck": 64 * 4 + 4 + 4 * 2 + 2}
    for router, size in sizes.items():
        config = load_method("skipgpt").Config(router=router, router_rank=4)
        assert load_method("skipgpt").build(config, geometry).router_parameters_per_layer() == 2 * size


def test_skipgpt_is_evaluated_sampled_by_arg_max_and_with_the_dial():
    model = build("skipgpt", "llama")
    model.gates.dial.fill_(-100.0)
    rates = {}
    for way in model.gates.evaluations:
        with model.gates.evaluated(way):
            rates[way] = float(score(model, text(), dense=False).stats.total)
            again = float(score(model, text(), dense=False).stats.total)
            assert (rates[way] == again) == (way == "argmax")
    assert float(score(model, text(), dense=False).stats.total) == 1.0
    with torch.no_grad(), model.gates.evaluated("argmax"):
        model(input_ids=text()[0]["input_ids"])
        signs = model.last_gates("ffn")[0]
    with torch.no_grad():
        stream = []
        base = stock("llama")
        base.model.layers[0].post_attention_layernorm.register_forward_pre_hook(lambda m, a: stream.append(a[0]))
        keep_first = model.last_gates("attention")[0]
        base.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda m, a: (a[0] * keep_first,))
        base(input_ids=text()[0]["input_ids"])
        first = model.gates.routers["ffn"][0].layers[0]
        two = stream[0] @ first.weight.T + first.bias
    assert torch.equal(signs[..., 0], (two[..., 0] >= two[..., 1]).float())
    assert 0.0 < rates["sampled"] < 1.0


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("skipgpt", {"router": "deep"}, "legal: linear, mlp, bottleneck"),
        ("skipgpt", {"attention_sparsity": 0.5}, "give both or neither"),
        ("ddp", {"sparsity": float("nan")}, "0 to 1"),
        ("ddp", {"tau_end": 0.0}, "above 0"),
        ("flap", {"spread": "wide"}, "legal: global, layer"),
        ("depth", {"score": "taylor"}, "legal: method.greedy=false"),
        ("cats", {"attention_sparsity": 0.5, "ffn_sparsity": 0.5}, "is not the mean"),
        ("random", {"ffn_sparsity": 0.5}, "give both or neither"),
        ("dllm", {"unit": "model"}, "legal: layer, sublayer"),
    ],
)
def test_mistakes_are_named(method, options, says):
    with pytest.raises(ValueError, match=says):
        load_method(method).Config(**options)


def test_settings_that_leave_nothing_to_remove_are_named():
    geometry = Geometry.from_hf(stock("llama").config)
    with pytest.raises(ValueError, match="leave 1 of 2 layers"):
        config = load_method("depth").Config(keep_first=1, sparsity=0.75)
        load_method("depth").build(config, geometry)
    with pytest.raises(ValueError, match="legal: 0 to 1"):
        load_method("dllm").build(load_method("dllm").Config(), geometry)
    with pytest.raises(ValueError, match="evicts keys; legal: sdpa, eager"):
        build("dllm", "llama", attn="flex_attention")
