"""Held-out scores against the stock model's own loss; the routing report, the costs and the figures by hand."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from tiny import pattern, routed, stock, tokens, zeroed
from torch.utils.flop_counter import FlopCounterMode
from training import tiny_run_config

from experiments import evaluate
from experiments.figures import curves, layout
from wide.base_model import tiny_tokenizer
from wide.evaluation.perplexity import TextScore, score
from wide.evaluation.report import routing_report
from wide.evaluation.sample import sample_texts
from wide.model import RoutedModel
from wide.routing import Cost, RoutingStats

PNG = b"\x89PNG\r\n\x1a\n"


def forced_report(model: RoutedModel, attention: list, ffn: list, num_tokens: int = 10) -> dict:
    kept = {"attention": torch.tensor(attention), "ffn": torch.tensor(ffn)}
    return routing_report(model, RoutingStats(kept, torch.tensor(num_tokens)), length=8)


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


@pytest.mark.parametrize("side", ("right", "left"))
def test_padding_is_neither_scored_nor_counted(side):
    model, lengths = routed("llama"), (12, 7)
    texts = [tokens(1, length, seed=length) for length in lengths]
    alone = score(model, [{"input_ids": text} for text in texts], dense=False)
    ids, mask = torch.full((2, 12), 5), torch.zeros(2, 12, dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(12 - text.shape[1], 12) if side == "left" else slice(0, text.shape[1])
        ids[row, place], mask[row, place] = text[0], 1
    padded = score(model, [{"input_ids": ids, "attention_mask": mask}], dense=False)
    assert padded.num_predicted == alone.num_predicted == 11 + 6
    assert padded.loss_sum == pytest.approx(alone.loss_sum, abs=1e-4)
    assert float(padded.stats.num_tokens) == 19
    for kind in ("attention", "ffn"):
        assert torch.equal(padded.stats.kept[kind], alone.stats.kept[kind])


def test_scoring_ignores_training_noise_and_repeats_exactly():
    model, batch = routed("llama"), {"input_ids": tokens(2, 16)}
    first = score(model, [batch], dense=False)
    model.gates.step.noise = {kind: torch.full((2, 2, 16, g), -1e9) for kind, g in model.gates.num_groups.items()}
    second = score(model, [batch], dense=False)
    assert first.loss_sum == second.loss_sum
    assert 0 < float(second.stats.total) < 1


def test_labels_may_leave_out_tokens():
    model, ids = routed("llama"), tokens(1, 10)
    labels = ids.clone()
    labels[:, :6] = -100
    partial = score(model, [{"input_ids": ids, "labels": labels}], dense=True)
    with torch.no_grad():
        per_token = stock("llama")(input_ids=ids).logits.log_softmax(-1)[0, 5:9].gather(1, ids[0, 6:, None])
    assert partial.num_predicted == 4
    assert partial.loss_sum == pytest.approx(-float(per_token.sum()), abs=1e-4)


def test_a_model_without_its_masks_is_not_scored():
    model = routed("llama")
    model.detach_masks()
    with pytest.raises(AssertionError, match="masks are missing"):
        score(model, [{"input_ids": tokens(1, 4)}], dense=False)


def test_report_counts_constant_groups_and_says_static():
    model = routed("llama")
    report = forced_report(model, [[10.0, 0.0]] * 2, [[10.0, 0, 0, 10, 10]] * 2)
    assert report["is_static"] and report["groups"]["ffn"]["num_always_off"] == 4
    assert report["groups"]["attention"] == {
        "num_groups": 4,
        "num_always_on": 2,
        "num_always_off": 2,
        "on_rate": [[1.0, 0.0]] * 2,
    }
    assert report["sparsity"]["attention"] == 0.5 and report["sparsity"]["ffn"] == pytest.approx(0.4)
    assert report["sparsity"]["total"] == pytest.approx(0.45) and report["num_tokens"] == 10
    report = forced_report(model, [[10.0, 0.0]] * 2, [[5.0, 0, 0, 10, 10], [10.0, 0, 0, 10, 10]])
    assert not report["is_static"] and report["groups"]["ffn"]["num_always_on"] == 5
    assert report["sparsity"]["layers"] == [[0.5, pytest.approx(0.5)], [0.5, pytest.approx(0.4)]]


def test_a_run_of_the_same_gates_for_all_tokens_is_reported_as_static():
    model, ids = routed("llama"), tokens(2, 8)
    gates = {kind: keep[:, :1, :1].expand_as(keep) for kind, keep in pattern(model, 2, 8).items()}
    with model.forced(**gates):
        pruned = score(model, [{"input_ids": ids}], dense=False)
    assert routing_report(model, pruned.stats, 8)["is_static"]
    with model.forced(**pattern(model, 2, 8)):
        pruned = score(model, [{"input_ids": ids}], dense=False)
    assert not routing_report(model, pruned.stats, 8)["is_static"]


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


def test_half_of_the_attention_of_an_8b_model_is_eight_percent_of_its_prunable_parameters():
    """32 layers, 32/8 heads of 128 over 4096, FFN 14336: Q and O are 16% of Q, O and FFN."""
    cost = Cost(32, 2 * 4096 * 4096, 3 * 4096 * 14336, 2 * 4096 * 1024, 4096 * 128256, 4096 * 4097, 0, 4096)
    assert cost.attention_weight == pytest.approx(0.16)
    assert cost.shares(0.5, 0)["params"] == pytest.approx(0.08)
    assert cost.shares(0, 0.5)["params"] == pytest.approx(0.42)
    assert cost.shares(1, 1)["bytes"] == pytest.approx(1 - (32 * 2 * 4096 * 1024 + 4096 * 128256) / 7_504_658_432)


@pytest.mark.parametrize("family", ("llama", "qwen3", "smol"))
def test_dense_cost_equals_what_torch_counts(family):
    """Torch counts the whole square of the attention core, of which a causal one needs (T + 1) / 2T."""
    length, g = 24, routed(family).geometry
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        stock(family, attn="eager")(input_ids=tokens(1, length))
    counted = {str(op).rsplit(".")[-1]: flops // 2 for op, flops in counter.get_flop_counts()["Global"].items()}
    cost = routed(family).cost(length)
    assert counted["mm"] == length * (g.num_layers * (cost.attention + cost.ffn + cost.other) + cost.head)
    assert counted["bmm"] * (length + 1) == 2 * length * (length * g.num_layers * cost.core)


def test_sample_texts_repeat_and_the_dense_one_is_the_stock_models():
    model, tokenizer = routed("llama"), tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    first = sample_texts(model, tokenizer, "of our union", 8)
    assert first == sample_texts(model, tokenizer, "of our union", 8)
    inputs = tokenizer("of our union", return_tensors="pt")["input_ids"]
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2}
    ids = stock("llama").generate(inputs, attention_mask=torch.ones_like(inputs), **settings)
    assert first["dense"] == tokenizer.decode(ids[0, inputs.shape[1] :], skip_special_tokens=True)
    assert first["routed"] != first["dense"] and first["prompt"] == "of our union"


def test_perplexity_of_nothing_is_not_a_division_by_zero():
    assert TextScore(0.0, 0, None).perplexity == 1.0


@pytest.fixture
def report(tmp_path, monkeypatch) -> tuple[dict, RoutedModel]:
    """The report over the first three of five held-out blocks, in two batches."""

    def first_blocks(blocks: torch.Tensor, num_blocks: int, config) -> list[dict[str, torch.Tensor]]:
        return [{"input_ids": part} for part in blocks[:num_blocks].split(2)]

    monkeypatch.setattr(evaluate, "held_batches", first_blocks)
    config = tiny_run_config(tmp_path, {})
    config.eval.blocks, config.eval.new_tokens = 3, 4
    model, tokenizer = routed("llama"), tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    return evaluate.evaluate(config, model, SimpleNamespace(eval_blocks=tokens(5, 16)), tokenizer), model


def test_evaluate_reports_dense_and_routed_over_the_same_blocks(report):
    report, model = report
    ids = tokens(5, 16)[:3]
    held = report["held_out"]
    dense = float(stock("llama")(input_ids=ids, labels=ids).loss)
    with torch.no_grad():
        pruned = float(model(input_ids=ids, labels=ids).loss)
    assert held["dense_perplexity"] == pytest.approx(math.exp(dense), rel=1e-5)
    assert held["routed_perplexity"] == pytest.approx(math.exp(pruned), rel=1e-5)
    assert held["log_perplexity_gap"] == pytest.approx(pruned - dense, abs=1e-5)
    assert (held["num_blocks"], held["num_predicted"]) == (3, 45)


def test_flat_metrics_are_the_reports_figures(report):
    report, _ = report
    row, held = evaluate.flat_metrics(report), report["held_out"]
    assert row["routed_perplexity"] == held["routed_perplexity"] != row["dense_perplexity"]
    assert row["sparsity_ffn"] == held["routing"]["sparsity"]["ffn"]
    assert row["skipped_bytes"] == held["routing"]["skipped"]["bytes"]
    assert not [key for key in row if key.startswith("other_")]
    assert evaluate.flat_metrics(report | {"other_text": held})["other_dense_perplexity"] == held["dense_perplexity"]


def test_written_report_sample_and_figures_can_be_read_back(report, tmp_path):
    report, _ = report
    evaluate.write_report(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    sample = (tmp_path / "sample.md").read_text()
    assert report["sample"]["dense"] in sample and report["sample"]["routed"] in sample
    layout.save(report["held_out"]["routing"], tmp_path / "layout.png")
    row = {"step": 1.0, "cross_entropy": 3.0, "sparsity": 0.2, "target": 0.25}
    row |= {"sparsity_attention": 0.3, "sparsity_ffn": 0.1}
    curves.save([row, row | {"step": 2.0}], "calibrate", tmp_path / "curves.png")
    for name in ("layout.png", "curves.png"):
        data = (tmp_path / name).read_bytes()
        assert data.startswith(PNG) and len(data) > 5000
