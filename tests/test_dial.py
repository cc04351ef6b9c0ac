"""The dial: deterministic routing meets its target, by hand on small logits and measured on tiny models."""

import math

import pytest
import torch
from tiny import routed, tokens

from wide import dial as dial_module
from wide.dial import DialPoint, dial_for, fit_curve, fit_dial, measure_logits, solve
from wide.model import RoutedModel

GRANULARITIES = ("global", "kind", "layer")


def batches() -> list[dict[str, torch.Tensor]]:
    """The last batch has left padding, which must not count."""
    mask = torch.ones(4, 64, dtype=torch.long)
    mask[1, :40] = 0
    texts = [{"input_ids": tokens(4, 64, seed=s)} for s in range(4)]
    return [*texts[:3], texts[3] | {"attention_mask": mask}]


def skipped(model: RoutedModel) -> dict[str, float]:
    """Share of skipped decisions of each kind over all real tokens, counted from the gates themselves."""
    off, total = {"attention": 0.0, "ffn": 0.0}, {"attention": 0, "ffn": 0}
    for batch in batches():
        with torch.no_grad():
            model(**batch)
        valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        for kind in off:
            gates = model.last_gates(kind)[:, valid]  # [L, tokens, G]
            off[kind] += float((gates == 0).sum())
            total[kind] += gates.numel()
    return {kind: off[kind] / total[kind] for kind in off}


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("init_gap", (0.0, 1.0))
@pytest.mark.parametrize("target", (0.1, 0.25, 0.5, 0.7))
def test_f11_deterministic_sparsity_meets_the_target(target, init_gap, granularity):
    model = routed("llama", ffn_group_size=16, init_gap=init_gap)
    point = fit_dial(model, batches(), target, granularity)
    rates = skipped(model)
    total = (rates["attention"] + rates["ffn"]) / 2
    assert total == pytest.approx(target, abs=0.01)
    assert point.measured == pytest.approx(total, abs=1e-6) and point.target == target
    assert torch.equal(model.gates.dial, point.dial)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("target", (0.0, 1.0))
def test_f11_all_and_nothing(target, granularity):
    model = routed("llama")
    assert fit_dial(model, batches(), target, granularity).measured == target
    assert skipped(model) == {"attention": target, "ffn": target}


def test_fitting_leaves_gates_and_noise_as_they_should_be():
    model = routed("llama")
    model.gates.step.noise = {"attention": torch.zeros(1), "ffn": torch.zeros(1)}
    fit_dial(model, batches(), 0.5, "global")
    assert model.gates.step.noise is None
    assert "logits" not in vars(model.gates), "the recorder is gone"


def test_global_bias_by_hand():
    """Bias 0: attention skips 1 of 2, FFN none, mean 1/4."""
    logits = {"attention": torch.tensor([[-1.0, 1.0]]), "ffn": torch.tensor([[2.0, 4.0]])}
    for target, num_skipped in ((0.25, (1, 0)), (0.5, (2, 0)), (0.75, (2, 1)), (0.0, (0, 0)), (1.0, (2, 2))):
        dial = solve(logits, target, "global")
        assert torch.equal(dial[:, 0], dial[:, 1])
        assert tuple(int((rows + dial[0, 0] < 0).sum()) for rows in logits.values()) == num_skipped


def test_global_bias_by_cost_by_hand():
    """Attention counts a quarter: skipping one of its two decisions is 1/8, one of the FFN's 3/8."""
    logits = {"attention": torch.tensor([[-1.0, 1.0]]), "ffn": torch.tensor([[2.0, 4.0]])}
    for target, num_skipped in ((0.125, (1, 0)), (0.25, (2, 0)), (0.625, (2, 1)), (1.0, (2, 2))):
        dial = solve(logits, target, "global", attention_weight=0.25)
        assert tuple(int((rows + dial[0, 0] < 0).sum()) for rows in logits.values()) == num_skipped


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_fit_by_cost_meets_the_share_of_parameters(granularity):
    model = routed("llama", ffn_group_size=16)
    cost = model.cost(length=1)
    fit_dial(model, batches(), 0.4, granularity, attention_weight=cost.attention_weight)
    rates = skipped(model)
    assert cost.shares(rates["attention"], rates["ffn"])["params"] == pytest.approx(0.4, abs=0.01)


def test_kinds_and_layers_keep_their_place_by_hand():
    """All logits of a layer equal, so that its sampled skip rate is the sigmoid of one number."""

    def rows(*rates: float) -> torch.Tensor:
        middle = torch.tensor([[math.log((1 - rate) / rate)] for rate in rates])  # skip rate sigmoid(-logit)
        return middle + torch.linspace(-1e-3, 1e-3, 1000)

    logits = {"attention": rows(0.6, 0.8), "ffn": rows(0.1, 0.3)}  # mean rate 0.45
    dial = solve(logits, 0.45, "layer")
    for column, (kind, rates) in enumerate({"attention": (0.6, 0.8), "ffn": (0.1, 0.3)}.items()):
        for layer, rate in enumerate(rates):
            off = float((logits[kind][layer] + dial[layer, column] < 0).float().mean())
            assert off == pytest.approx(rate, abs=0.002)
    dial = solve(logits, 0.45, "kind")
    for column, (kind, rate) in enumerate({"attention": 0.7, "ffn": 0.2}.items()):
        assert torch.equal(dial[0, column], dial[1, column])
        off = float((logits[kind] + dial[:, column, None] < 0).float().mean())
        assert off == pytest.approx(rate, abs=0.002)


def test_the_sample_of_logits_meets_every_group(monkeypatch):
    """Ten groups with a logit each: a sample of every tenth logit must not be ten times the same group."""
    model = routed("llama", ffn_group_size=16)
    with torch.no_grad():
        for router in model.gates.routers["ffn"]:
            router.decide.weight.zero_()
            router.decide.bias.view(10, 2)[:, 0] = torch.arange(10.0)
            router.decide.bias.view(10, 2)[:, 1] = 0
    monkeypatch.setattr(dial_module, "MAX_LOGITS_PER_LAYER", 4 * 64)
    logits, _ = measure_logits(model, [{"input_ids": tokens(4, 64)}])
    found, counts = logits["ffn"][0].round().unique(return_counts=True)
    assert found.tolist() == list(range(10))
    assert int(counts.max() - counts.min()) <= 1 and int(counts.sum()) <= 4 * 64


def test_curve_is_monotone_meets_its_targets_and_restores_the_dial():
    model = routed("llama", ffn_group_size=16)
    model.gates.dial.fill_(0.5)
    curve = fit_curve(model, batches(), "global", targets=(0.2, 0.4, 0.6))
    assert torch.equal(model.gates.dial, torch.full((2, 2), 0.5))
    assert [p.measured for p in curve] == [pytest.approx(t, abs=0.01) for t in (0.2, 0.4, 0.6)]
    assert [float(p.dial.mean()) for p in curve] == sorted((float(p.dial.mean()) for p in curve), reverse=True)
    model.gates.dial.copy_(dial_for(curve, 0.5))
    rates = skipped(model)
    assert (rates["attention"] + rates["ffn"]) / 2 == pytest.approx(0.5, abs=0.03)


def test_between_two_points_the_dial_is_linear():
    points = [DialPoint(0.4, 0.4, torch.ones(2, 2)), DialPoint(0.2, 0.2, torch.zeros(2, 2))]
    for sparsity, value in ((0.2, 0.0), (0.25, 0.25), (0.3, 0.5), (0.4, 1.0)):
        torch.testing.assert_close(dial_for(points, sparsity), torch.full((2, 2), value))
    for outside in (0.19, 0.5):
        with pytest.raises(ValueError, match=rf"sparsity={outside} .*legal: 0\.200 to 0\.400"):
            dial_for(points, outside)
    with pytest.raises(ValueError, match="stores no dial curve"):
        dial_for([], 0.3)
