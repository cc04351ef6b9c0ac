"""The pieces of the loss and the schedules, by hand and against the stock model's own loss."""

import pytest
import torch
from tiny import routed, stock, tokens

from wide.loss import next_token_labels, token_losses
from wide.routing import (
    RoutingStats,
    ramped_target,
    sparsity_distance,
    temperature,
)


def test_temperature_and_ramp_end_where_configured():
    assert temperature(0, 100, 5.0, 0.5) == 5.0 and temperature(99, 100, 5.0, 0.5) == 0.5
    assert ramped_target(0, 100, 0.5, 0.0) == 0.5 and ramped_target(25, 100, 0.5, 0.5) == 0.25


def test_sparsity_distance_by_hand():
    kept = {"attention": torch.tensor([[6.0, 2.0]]), "ffn": torch.tensor([[8.0, 8.0, 4.0, 0.0]])}
    stats = RoutingStats(kept, torch.tensor(8))
    assert float(stats.sparsity("attention")) == 0.5 and float(stats.sparsity("ffn")) == 0.375
    assert float(stats.total) == 0.4375
    assert float(sparsity_distance(stats, {"total": 0.5}, "mean", 0.2)) == pytest.approx(0.0625)
    assert float(sparsity_distance(stats, {"total": 0.5}, "cost", 0.2)) == pytest.approx(0.1)
    separate = sparsity_distance(stats, {"attention": 0.25, "ffn": 0.5}, "mean", 0.2)
    assert float(separate) == pytest.approx((0.25 + 0.125) / 2)


def test_statistics_count_valid_tokens_only():
    model = routed("llama")
    ids = tokens(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
        together = model.last_stats()
        model(input_ids=ids[:1])
        apart = model.last_stats()
        model(input_ids=ids[1:, 2:])
        apart = apart + model.last_stats()
    assert int(together.num_tokens) == 10
    for kind in together.kept:
        assert torch.equal(together.kept[kind], apart.kept[kind])


def test_token_losses_equal_the_stock_models_loss(monkeypatch):
    monkeypatch.setattr("wide.loss.CHUNK_LOGITS", 7 * 199)
    model, ids = stock("llama"), tokens(3, 11)
    expected = model(input_ids=ids, labels=ids).loss
    hidden = model.model(input_ids=ids)[0]
    labels = next_token_labels({"input_ids": ids})
    cross_entropy, _ = token_losses(hidden, model.lm_head, labels)
    torch.testing.assert_close(cross_entropy / (labels != -100).sum(), expected, atol=1e-5, rtol=0)
