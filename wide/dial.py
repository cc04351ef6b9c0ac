"""The dial: a bias on the gate logits, fitted after training so that deterministic routing meets a target.

Training samples gates, evaluation takes the sign of the logit, and nothing in the loss ties the two rates. One
scalar closes the gap; fitted for several targets it turns one checkpoint into a family of sparsities. Biasing a
layer changes what later layers see, so the fit alternates between measuring logits and solving for the bias.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from wide.model import RoutedModel
from wide.routing import KINDS

CURVE_TARGETS = tuple(round(0.05 * i, 2) for i in range(1, 18))
MAX_LOGITS_PER_LAYER = 200_000


@dataclass
class DialPoint:
    """One fitted setting: `dial` [L, 2] (attention, ffn) float32, and the total sparsity measured with it."""

    target: float
    measured: float
    dial: Tensor


@torch.no_grad()
def measure_logits(
    routed: RoutedModel, batches: Iterable[dict[str, Tensor]], attention_weight: float = 0.5
) -> tuple[dict[str, Tensor], float]:
    """Raw logits [L, N] of each kind under the current dial (a fixed sample of them), and the weighted sparsity."""
    gates, recorded = routed.gates, {}
    seen: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    original = gates.logits

    def record(layer: int, kind: str, hidden: Tensor) -> Tensor:
        recorded[kind, layer] = original(layer, kind, hidden)
        return recorded[kind, layer]

    gates.step.noise = None
    gates.logits = record  # type: ignore[method-assign]  # for a while, and taken off again below
    try:
        with routed.collect() as box:
            for batch in batches:
                routed.hidden_states(**batch)
                valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
                for kind in KINDS:
                    layers = range(routed.geometry.num_layers)
                    seen[kind].append(torch.stack([recorded[kind, i][valid].flatten() for i in layers]))
    finally:
        del gates.logits
    logits = {kind: torch.cat(rows, dim=1) for kind, rows in seen.items()}
    for kind, rows in logits.items():
        logits[kind] = rows[:, :: _stride(rows.shape[1], gates.num_groups[kind])].sort(dim=1).values
    return logits, float(weighted(box[0].sparsity, attention_weight))


def weighted(rate_of_kind, attention_weight: float):
    """Sparsity with attention counted at `attention_weight` and the FFN at the rest; 0.5 is the paper's plain mean."""
    attention, ffn = (rate_of_kind(kind) for kind in KINDS)
    return attention_weight * attention + (1 - attention_weight) * ffn


def _stride(num_logits: int, num_groups: int) -> int:
    """Step that leaves about MAX_LOGITS_PER_LAYER of a layer's logits and meets every group equally often."""
    stride = max(1, num_logits // MAX_LOGITS_PER_LAYER)
    while math.gcd(stride, num_groups) > 1:
        stride += 1
    return stride


def fit_dial(
    routed: RoutedModel,
    batches: list[dict[str, Tensor]],
    target: float,
    granularity: str,
    tolerance: float = 5e-4,
    max_rounds: int = 8,
    attention_weight: float = 0.5,
) -> DialPoint:
    """Set `routed.gates.dial` so that the sparsity on `batches` is `target`; returns what was reached.

    Args:
        batches: model inputs of calibration text (never the text that is reported on).
        target: sparsity, 0 to 1, as `attention_weight` counts it.
        granularity: "global" one bias; "kind" or "layer": each kind or (kind, layer) keeps its own sampled rate's
            place, so that the layout found in training is what is deployed, and one shift meets the total.
        attention_weight: 0.5 for the plain mean of both kinds, `Cost.attention_weight` for the share of parameters.
    """
    gates = routed.gates
    best: DialPoint | None = None
    logits, measured = measure_logits(routed, batches, attention_weight)
    bracket = [(0.0, None), (1.0, None)]
    aim = target
    for _ in range(max_rounds):
        gates.dial.copy_(solve(logits, aim, granularity, attention_weight).to(gates.dial.device))
        logits, measured = measure_logits(routed, batches, attention_weight)
        point = DialPoint(target, measured, gates.dial.detach().cpu().clone())
        if best is None or abs(measured - target) < abs(best.measured - target):
            best = point
        if abs(measured - target) <= tolerance:
            break
        aim = _next_aim(bracket, aim, measured, target)
    assert best is not None
    gates.dial.copy_(best.dial)
    return best


def _next_aim(bracket: list, aim: float, measured: float, target: float) -> float:
    """What to ask the solver for next: asked and measured differ because later layers react to earlier gates."""
    side = 0 if measured < target else 1
    bracket[side] = (aim, measured)
    (low_aim, low), (high_aim, high) = bracket
    if low is None or high is None:
        return min(max(aim + target - measured, 0.0), 1.0)
    share = (target - low) / max(high - low, 1e-9)
    return low_aim + (high_aim - low_aim) * min(max(share, 0.05), 0.95)


def solve(logits: dict[str, Tensor], target: float, granularity: str, attention_weight: float = 0.5) -> Tensor:
    """Dial [L, 2] whose deterministic sparsity over these (sorted) logits is `target`."""
    if granularity == "global":

        def rate(bias: float) -> float:
            return weighted(lambda kind: float((logits[kind] < -bias).float().mean()), attention_weight)

        bias = _bisect(rate, target)
        num_layers = logits[KINDS[0]].shape[0]
        return torch.full((num_layers, 2), bias)

    def sampled_rate(shift: float) -> float:
        means = dict(zip(KINDS, _sampled_rates(logits, shift, granularity).mean(0).tolist(), strict=True))
        return weighted(means.__getitem__, attention_weight)

    shift = _bisect(sampled_rate, target)
    rates = _sampled_rates(logits, shift, granularity)  # [L, 2] wanted skip rates
    dial = torch.zeros_like(rates)
    for column, kind in enumerate(KINDS):
        rows = logits[kind]
        if granularity == "kind":
            rows = rows.flatten().sort().values.expand(1, -1)
        for layer in range(len(rates)):
            row = rows[0 if granularity == "kind" else layer]
            num_skipped = round(float(rates[layer, column]) * len(row))
            dial[layer, column] = -row[num_skipped] if num_skipped < len(row) else -row[-1] - 1
    return dial


def _sampled_rates(logits: dict[str, Tensor], shift: float, granularity: str) -> Tensor:
    """Skip rates [L, 2] that sampling would give with every logit shifted by `shift`, pooled per kind if asked."""
    rates = torch.stack([torch.sigmoid(-(logits[kind] + shift)).mean(dim=1) for kind in KINDS], dim=1)
    return rates.mean(dim=0, keepdim=True).expand_as(rates) if granularity == "kind" else rates


def _bisect(rate_of_bias, target: float) -> float:
    """Bias b with rate_of_bias(b) closest to `target`; the rate falls with b."""
    low, high = -60.0, 60.0
    for _ in range(50):
        middle = (low + high) / 2
        if rate_of_bias(middle) > target:
            low = middle
        else:
            high = middle
    return high


def fit_curve(
    routed: RoutedModel, batches: list[dict[str, Tensor]], granularity: str, targets: Iterable[float] = CURVE_TARGETS
) -> list[DialPoint]:
    """Dial points for a range of targets, lowest first, for `sparsity=` at load time. Restores the dial."""
    before = routed.gates.dial.detach().clone()
    curve = [fit_dial(routed, batches, target, granularity, tolerance=2e-3, max_rounds=4) for target in targets]
    routed.gates.dial.copy_(before)
    return curve


def dial_for(curve: list[DialPoint], sparsity: float) -> Tensor:
    """Dial [L, 2] for any sparsity within the curve, linear between its points.

    Raises:
        ValueError: no curve was stored, or `sparsity` lies outside it.
    """
    points = sorted(curve, key=lambda point: point.measured)
    if not points:
        raise ValueError("this checkpoint stores no dial curve; legal sparsity: the one it was trained at")
    if not points[0].measured <= sparsity <= points[-1].measured:
        low, high = points[0].measured, points[-1].measured
        raise ValueError(f"sparsity={sparsity} lies outside the stored dial curve; legal: {low:.3f} to {high:.3f}")
    for below, above in pairwise(points):
        if below.measured <= sparsity <= above.measured:
            share = (sparsity - below.measured) / max(above.measured - below.measured, 1e-9)
            return below.dial + (above.dial - below.dial) * share
    return points[-1].dial
