"""The routing report: what was asked, what deterministic routing does on held-out text, and what it saves.

A run in which every group is always on or always off is static pruning and says so. Cost shares are the project's
own accounting from the real geometry (`wide.routing.Cost`), beside the paper's plain mean.
"""

from torch import Tensor

from wide.model import RoutedModel
from wide.routing import KINDS, RoutingStats

ALWAYS = 0.999
"""A group on (or off) for at least this share of tokens counts as always on (or off)."""


def routing_report(routed: RoutedModel, stats: RoutingStats, length: int) -> dict:
    """JSON-ready report.

    Returns:
        `sparsity` {total, attention, ffn, layers: [[attention, ffn], ...]}, `groups` {kind: {on_rate [L][G],
        num_always_on, num_always_off, num_groups}}, `is_static`, `skipped` {params, flops, bytes} at `length` tokens.
    """
    rates = {kind: stats.on_rate(kind) for kind in KINDS}
    attention, ffn = (float(stats.sparsity(kind)) for kind in KINDS)
    layers = [[1 - float(rates[kind][layer].mean()) for kind in KINDS] for layer in range(routed.geometry.num_layers)]
    groups = {kind: _group_summary(rate) for kind, rate in rates.items()}
    constant = sum(g["num_always_on"] + g["num_always_off"] for g in groups.values())
    return {
        "sparsity": {"total": float(stats.total), "attention": attention, "ffn": ffn, "layers": layers},
        "groups": groups,
        "is_static": constant == sum(g["num_groups"] for g in groups.values()),
        "skipped": routed.cost(length).shares(attention, ffn),
        "num_tokens": int(stats.num_tokens),
        "length": length,
    }


def _group_summary(on_rate: Tensor) -> dict:
    return {
        "num_groups": on_rate.numel(),
        "num_always_on": int((on_rate >= ALWAYS).sum()),
        "num_always_off": int((on_rate <= 1 - ALWAYS).sum()),
        "on_rate": [[round(float(rate), 5) for rate in row] for row in on_rate],
    }
