"""The dial after training: fitted to the run's own target, and to other targets that the same weights report on.

Called by `experiments.pipeline`. Always fitted on training text, never on what is reported.
"""

import torch
from transformers import PreTrainedTokenizerBase

from experiments.evaluate import flat_metrics, task_scores, text_scores
from experiments.train import held_batches
from wide.data.batches import forward_inputs
from wide.data.module import CalibrationData
from wide.dial import DialPoint, fit_curve, fit_dial
from wide.evaluation.perplexity import score
from wide.evaluation.report import routing_report
from wide.model import RoutedModel
from wide.options import Config


def fit_dials(
    config: Config, routed: RoutedModel, data: CalibrationData, device: torch.device
) -> tuple[DialPoint | None, list[DialPoint]]:
    """Fit the dial to the method's target on training text, and the whole curve if the stage asks for it.

    Under bf16 autocast when training was, so that the rates are those of the numbers that will be reported.
    """
    method = config.method
    granularity = getattr(method, "dial", "none")
    if not routed.gates.supports_dial or granularity == "none":
        return None, []
    batches = calibration_batches(config, data, config.stage.dial_blocks, device)
    weight = routed.cost(length=1).attention_weight if _price(method) == "cost" else 0.5
    with torch.autocast(device.type, torch.bfloat16, enabled=config.trainer.precision != "fp32"):
        curve = fit_curve(routed, batches, granularity) if config.stage.dial_curve else []
        point = fit_dial(routed, batches, target_total(method), granularity, attention_weight=weight)
    return point, curve


def _price(method) -> str:
    return getattr(method, "budget_price", "mean")


@torch.no_grad()
def scores_at_other_settings(
    config: Config,
    routed: RoutedModel,
    data: CalibrationData,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    report: dict,
) -> list[dict]:
    """What the same weights score, tasks included, with the dial fitted to each of `eval.at_mean` and `eval.at_cost`.

    `at_cost` fits the skipped share of the prunable parameters, so that methods which split a budget differently are
    compared at equal cost. One dict each: `price`, `asked`, and the flat figures of `experiments.evaluate`. The dial is
    put back.
    """
    asked = [("mean", target) for target in config.eval.at_mean] + [("cost", target) for target in config.eval.at_cost]
    if not asked or not routed.gates.supports_dial:
        return []
    own: str = getattr(config.method, "dial", "none")
    granularity = own if own != "none" else "global"
    batches = calibration_batches(config, data, config.stage.dial_blocks, device)
    before = routed.gates.dial.clone()
    rows = []
    for price, target in asked:
        weight = routed.cost(length=1).attention_weight if price == "cost" else 0.5
        with torch.autocast(device.type, torch.bfloat16, enabled=config.trainer.precision != "fp32"):
            fit_dial(routed, batches, target, granularity, attention_weight=weight)
        found = text_scores(config, routed, data, tokenizer, report)
        if "accuracy" in report:
            found["accuracy"] = task_scores(config, routed, tokenizer, report["accuracy"], f"_{price}_{target:g}")
        rows.append({"price": price, "asked": target, **flat_metrics(found)})
    routed.gates.dial.copy_(before)
    return rows


CURVE_BLOCKS = 24


@torch.no_grad()
def curve_scores(config: Config, routed: RoutedModel, data: CalibrationData, curve: list[DialPoint]) -> dict:
    """Held-out perplexity and sparsity at every fitted point of the curve, over CURVE_BLOCKS blocks; the dial is put
    back.
    """
    batches = held_batches(data.eval_blocks, min(CURVE_BLOCKS, len(data.eval_blocks)), config)
    bf16 = config.trainer.precision != "fp32"
    before, points = routed.gates.dial.clone(), []
    for point in curve:
        routed.gates.dial.copy_(point.dial)
        result = score(routed, batches, dense=False, bf16=bf16)
        assert result.stats is not None
        report = routing_report(routed, result.stats, config.data.block_size)
        found = {"target": point.target, "sparsity_total": report["sparsity"]["total"]}
        points.append(found | {"skipped_params": report["skipped"]["params"], "routed_perplexity": result.perplexity})
    routed.gates.dial.copy_(before)
    dense = score(routed, batches, dense=True, bf16=bf16)
    num_blocks = sum(len(batch["input_ids"]) for batch in batches)
    return {"num_blocks": num_blocks, "dense_perplexity": dense.perplexity, "points": points}


def calibration_batches(
    config: Config, data: CalibrationData, num_blocks: int, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Model inputs of training blocks, spread evenly over the split."""
    batches = held_batches(data.train_blocks, min(num_blocks, len(data.train_blocks)), config)
    inputs = [forward_inputs(batch) for batch in batches]
    return [{k: v.to(device) for k, v in found.items() if isinstance(v, torch.Tensor)} for found in inputs]


def target_total(method) -> float:
    """Asked total sparsity: the plain mean of the two kinds where they are asked for separately."""
    targets = method.targets() if hasattr(method, "targets") else {"total": method.sparsity}
    return sum(targets.values()) / len(targets)
