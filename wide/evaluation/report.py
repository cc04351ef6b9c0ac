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
        num_always_on, num_always_off, num_groups}}, `is_static`, `skipped` {params, flops, bytes, kv} at `length`
        tokens, `kv` what becomes of keys and values (see `GateProvider.kv`).
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
        "skipped": _skipped(routed, attention, ffn, rates["attention"], length),
        "kv": routed.gates.kv,
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


def _skipped(routed: RoutedModel, attention: float, ffn: float, on_rate: Tensor, length: int) -> dict[str, float]:
    """Shares of `Cost.shares`, less what deciding needs done, with keys and values where the method saves them.

    A method that saves only part of attention needs its core for deciding.
    """
    saved, kv = routed.gates.saved, 0.0
    if routed.gates.kv != "kept":  # a token's key and value are needed while one query head of theirs runs
        heads = on_rate.repeat_interleave(routed.gates.attn_group_size, dim=1)
        kv = 1 - float(heads.unflatten(1, (routed.geometry.num_kv_heads, -1)).amax(-1).mean())
    core = attention if saved["attention"] == 1 else 0.0
    return routed.cost(length).shares(attention * saved["attention"], ffn * saved["ffn"], kv, core)
