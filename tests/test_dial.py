"""The dial: deterministic routing meets its target, by hand on small logits and measured on tiny models."""

import pytest
import torch
from tiny import routed, tokens

from wide.dial import DialPoint, dial_for, fit_curve, fit_dial, solve


def batches():
    return [{"input_ids": tokens(4, 64, seed=s)} for s in range(4)]


@pytest.mark.parametrize("granularity", ("global", "kind", "layer"))
@pytest.mark.parametrize("target", (0.1, 0.25, 0.5, 0.7))
def test_f11_deterministic_sparsity_meets_the_target(target, granularity):
    model = routed("llama", ffn_group_size=16, init_gap=1.0)
    fit_dial(model, batches(), target, granularity)
    with torch.no_grad(), model.collect() as box:
        for batch in batches():
            model(**batch)
    assert float(box[0].total) == pytest.approx(target, abs=0.01)


@pytest.mark.parametrize("target", (0.0, 1.0))
def test_f11_all_and_nothing(target):
    model = routed("llama")
    assert fit_dial(model, batches(), target, "global").measured == target


def test_global_bias_by_hand():
    logits = {"attention": torch.tensor([[-1.0, 1.0]]), "ffn": torch.tensor([[2.0, 4.0]])}
    dial = solve(logits, 0.25, "global")
    skipped = sum(float((rows + dial[0, 0] < 0).sum()) for rows in logits.values())
    assert skipped == 1 and torch.equal(dial[:, 0], dial[:, 1])


def test_curve_is_monotone_restores_the_dial_and_interpolates():
    model = routed("llama", ffn_group_size=16)
    model.gates.dial.fill_(0.5)
    curve = fit_curve(model, batches(), "global", targets=(0.2, 0.4, 0.6))
    assert torch.equal(model.gates.dial, torch.full((2, 2), 0.5))
    assert [p.measured for p in curve] == sorted(p.measured for p in curve)
    middle = dial_for([DialPoint(0.2, 0.2, torch.zeros(2, 2)), DialPoint(0.4, 0.4, torch.ones(2, 2))], 0.3)
    torch.testing.assert_close(middle, torch.full((2, 2), 0.5))
    with pytest.raises(ValueError, match=r"legal: 0\.200 to 0\.400"):
        dial_for([DialPoint(0.2, 0.2, torch.zeros(2, 2)), DialPoint(0.4, 0.4, torch.ones(2, 2))], 0.5)
