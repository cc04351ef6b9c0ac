"""Held-out scores against the stock model's own loss, the routing report and the costs by hand."""

import math

import pytest
import torch
from tiny import pattern, routed, stock, tokens, zeroed

from wide.evaluation.perplexity import score
from wide.evaluation.report import routing_report
from wide.routing import RoutingStats


def test_dense_and_routed_perplexity_equal_the_stock_models():
    model, ids = routed("llama"), tokens(3, 20)
    dense = score(model, [{"input_ids": ids[:2]}, {"input_ids": ids[2:]}], dense=True)
    expected = float(stock("llama")(input_ids=ids, labels=ids).loss)
    assert dense.loss == pytest.approx(expected, abs=1e-5) and dense.perplexity == pytest.approx(math.exp(dense.loss))
    assert dense.stats is None and dense.num_predicted == 3 * 19
    gates = pattern(model, 3, 20)
    with model.forced(**gates):
        pruned = score(model, [{"input_ids": ids}], dense=False)
    expected = float(zeroed(stock("llama"), gates, model.geometry)(input_ids=ids, labels=ids).loss)
    assert pruned.loss == pytest.approx(expected, abs=1e-5)
    assert float(pruned.stats.sparsity("ffn")) == pytest.approx(1 - float(gates["ffn"].mean()), abs=1e-6)


def test_a_model_without_its_masks_is_not_scored():
    model = routed("llama")
    model.detach_masks()
    with pytest.raises(AssertionError, match="masks are missing"):
        score(model, [{"input_ids": tokens(1, 4)}], dense=False)


def test_report_counts_constant_groups_and_says_static():
    model = routed("llama")
    kept = {"attention": torch.tensor([[10.0, 0.0]] * 2), "ffn": torch.tensor([[10.0, 0, 0, 10, 10]] * 2)}
    report = routing_report(model, RoutingStats(kept, torch.tensor(10)), length=8)
    assert report["is_static"] and report["groups"]["ffn"]["num_always_off"] == 4
    assert report["sparsity"]["attention"] == 0.5 and report["sparsity"]["ffn"] == pytest.approx(0.4)
    kept["ffn"][0, 0] = 5
    assert not routing_report(model, RoutingStats(kept, torch.tensor(10)), length=8)["is_static"]


def test_costs_by_hand():
    model = routed("llama")
    attention, ffn, other, head = 2 * 64 * 64, 3 * 64 * 160, 2 * 64 * 32, 64 * 199
    router = sum((64 * 4 + 4) + (4 * 2 * groups + 2 * groups) for groups in (2, 5))
    shares = model.cost(length=10).shares(0.5, 0.25)
    skipped = 0.5 * attention + 0.25 * ffn
    assert shares["params"] == pytest.approx(skipped / (attention + ffn))
    weights = 2 * (attention + ffn + other) + head
    assert shares["bytes"] == pytest.approx(2 * (skipped - 2 * router) / weights)
    core = 64 * 11
    assert shares["flops"] == pytest.approx(2 * (skipped + 0.5 * core - router) / (weights + 2 * core))
