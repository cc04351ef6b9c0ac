"""Routing: routers, gates, the sparsity budget, and what a decision costs. Float32 throughout (arXiv 2607.28418).

A router reads the residual stream before a layer norm and gives one logit per group, execute minus skip. Training
keeps a group when `logit + logistic noise >= 0`, which is the hard two-class Gumbel-softmax (the difference of two
Gumbel draws is logistic), with the straight-through gradient of `sigmoid((logit + noise) / tau)`; evaluation keeps
it when `logit + dial >= 0`. Nothing here knows transformers or a model family's names.

Axes, everywhere in this project: B batch, T tokens, D hidden, H query heads, K kv heads, G groups, F FFN channels,
V vocabulary, L layers. A `keep_mask` is 1 (or True) where the group runs.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

KINDS = ("attention", "ffn")


class Router(nn.Module):
    """Bottleneck router of one sublayer: Linear(D, r), [SiLU], Linear(r, 2G); logits = execute - skip.

    Args:
        hidden_size: D of the residual stream it reads.
        num_groups: G decisions per token.
        rank: bottleneck r.
        activation: "none" (published) or "silu".
        norm: divide the input by its root mean square first; the residual's scale differs by orders of magnitude
            between layers.
        init_gap: initial execute-skip logit difference; 0 starts with half of all groups off, 4 with 98% on.
    """

    def __init__(self, hidden_size: int, num_groups: int, rank: int, activation: str, norm: bool, init_gap: float):
        super().__init__()
        self.num_groups, self.norm, self.init_gap = num_groups, norm, init_gap
        self.reduce = nn.Linear(hidden_size, rank)
        self.act = nn.SiLU() if activation == "silu" else nn.Identity()
        self.decide = nn.Linear(rank, 2 * num_groups)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Kaiming-uniform weights with a linear gain and zero biases, but for the gap that starts groups on."""
        for linear in (self.reduce, self.decide):
            bound = math.sqrt(3.0 / linear.in_features)
            with torch.no_grad():
                linear.weight.copy_(torch.rand(linear.weight.shape, generator=generator) * 2 * bound - bound)
                linear.bias.zero_()
        with torch.no_grad():
            self.decide.bias.view(self.num_groups, 2)[:, 0] = self.init_gap / 2
            self.decide.bias.view(self.num_groups, 2)[:, 1] = -self.init_gap / 2

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` [..., D] of any dtype -> logits [..., G] float32; autocast is off inside."""
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.float()
            if self.norm:
                hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
            execute_skip = self.decide(self.act(self.reduce(hidden))).unflatten(-1, (self.num_groups, 2))
            return execute_skip[..., 0] - execute_skip[..., 1]


def hard_gate(logits: Tensor, noise: Tensor | None = None, tau: float | Tensor = 1.0) -> Tensor:
    """Keep decisions in {0, 1}, float32, same shape as `logits`.

    With `noise` (training) the gradient is that of `sigmoid((logits + noise) / tau)`; without it there is none.
    """
    if noise is None:
        return (logits >= 0).float()
    soft = torch.sigmoid((logits + noise) / tau)
    hard = (logits + noise >= 0).float()
    return hard + (soft - soft.detach())


def gate_noise(
    seed: int, step: int, sample_positions: list[int], shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Logistic noise [len(sample_positions), *shape] float32, one stream per (seed, step, place in the global batch).

    Keyed by the sample's place, so a step gives the same gates however it is cut into micro-batches and ranks, and a
    resumed run draws what a straight run would have drawn. Ranks differ because their samples' places differ.
    """
    generator = torch.Generator(device=device)
    noise = torch.empty((len(sample_positions), *shape), device=device)
    for row, position in zip(noise, sample_positions, strict=True):
        generator.manual_seed((seed * 1_000_003 + step) * 1_000_003 + position & 0x7FFF_FFFF_FFFF_FFFF)
        row.uniform_(generator=generator)
    noise.clamp_(1e-7, 1 - 1e-7)
    return torch.log(noise) - torch.log1p(-noise)


@dataclass
class RoutingStats:
    """Sums over valid tokens, so that batches, ranks and texts add up exactly: `stats_a + stats_b`.

    `kept["attention"]` [L, G_attn] and `kept["ffn"]` [L, G_ffn]: how many tokens ran each group. float64 when
    collected for a report; float32 with gradient inside a training step.
    """

    kept: dict[str, Tensor]
    num_tokens: Tensor

    def __add__(self, other: "RoutingStats") -> "RoutingStats":
        kept = {kind: self.kept[kind] + other.kept[kind] for kind in self.kept}
        return RoutingStats(kept, self.num_tokens + other.num_tokens)

    def on_rate(self, kind: str) -> Tensor:
        """Share of tokens that ran each group, [L, G]."""
        return self.kept[kind] / self.num_tokens.clamp(min=1)

    def sparsity(self, kind: str) -> Tensor:
        """Mean share of skipped decisions of one kind, over layers and groups."""
        return 1 - self.on_rate(kind).mean()

    @property
    def total(self) -> Tensor:
        """The paper's routing sparsity: plain mean of the attention and the FFN sparsity."""
        return torch.stack([self.sparsity(kind) for kind in self.kept]).mean()


@dataclass(frozen=True)
class Cost:
    """What groups cost in one model, per layer and token (multiply-adds of the prunable linears, or bytes).

    `attention` and `ffn`: parameters of Q and O, and of gate, up and down, in one layer; `other`: K and V in one
    layer; `head`: the output projection; `core`: multiply-adds of the attention core per token at `length`.
    """

    num_layers: int
    attention: int
    ffn: int
    other: int
    head: int
    core: int
    router: int
    length: int

    @property
    def attention_weight(self) -> float:
        """Share of the prunable parameters that attention decisions govern (8B: 0.16)."""
        return self.attention / (self.attention + self.ffn)

    def shares(
        self,
        attention_sparsity: float,
        ffn_sparsity: float,
        kv_sparsity: float = 0.0,
        core_sparsity: float | None = None,
    ) -> dict[str, float]:
        """Skipped shares, the routers' own work charged against the two whole-model ones.

        params: of the prunable parameters (Q, O, gate, up, down). flops: of all multiply-adds of a causal forward of
        `length` tokens, output projection included. bytes: of all weights that a one-token decode reads. kv: of keys
        and values. `core_sparsity` of the attention core is that of attention unless given.
        """
        core_sparsity = attention_sparsity if core_sparsity is None else core_sparsity
        skipped = attention_sparsity * self.attention + ffn_sparsity * self.ffn
        params = skipped / (self.attention + self.ffn)
        dense_bytes = self.num_layers * (self.attention + self.ffn + self.other) + self.head
        dense_flops = dense_bytes + self.num_layers * self.core
        skipped += kv_sparsity * self.other
        skipped_flops = self.num_layers * (skipped + core_sparsity * self.core - self.router)
        skipped_bytes = self.num_layers * (skipped - 2 * self.router)
        shares = {"params": params, "flops": skipped_flops / dense_flops, "bytes": skipped_bytes / dense_bytes}
        return shares | {"kv": kv_sparsity}


def sparsity_distance(stats: RoutingStats, targets: dict[str, float], price: str, attention_weight: float) -> Tensor:
    """|target - sparsity| as the loss prices it.

    Args:
        stats: counts of the scope whose rate is to meet the target, with gradient.
        targets: {"total": s}, or {"attention": s_a, "ffn": s_f} for separate budgets (mean of two distances).
        price: "mean" prices every decision alike (the paper); "cost" weighs attention and FFN by their parameters.
        attention_weight: attention's share of the prunable parameters, for "cost".
    """
    if "total" not in targets:
        return torch.stack([(targets[kind] - stats.sparsity(kind)).abs() for kind in KINDS]).mean()
    weight = attention_weight if price == "cost" else 0.5
    obtained = weight * stats.sparsity("attention") + (1 - weight) * stats.sparsity("ffn")
    return (targets["total"] - obtained).abs()


def temperature(step: int, num_steps: int, start: float, end: float) -> float:
    """Linear from `start` at the first optimiser step to `end` at the last."""
    return start + (end - start) * min(step / max(num_steps - 1, 1), 1.0)


def ramped_target(step: int, num_steps: int, target: float, ramp_ratio: float) -> float:
    """Target that rises linearly from 0 over the first `ramp_ratio` of the steps."""
    ramp_steps = ramp_ratio * num_steps
    return target if step >= ramp_steps else target * step / ramp_steps
