"""WIDE: two routers per decoder layer choose head groups and FFN channel groups for each token (arXiv 2607.28418).

`conf/method/paper.yaml` is the published recipe; the defaults here are the project's own. Both presets' runs are in
`experiments/results`; what each single option contributes has not been measured yet.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wide.families import Geometry
from wide.methods.provider import GateProvider, parameters_per_layer, per_layer
from wide.routing import KINDS, Router, hard_gate
from wide.statistics import mean_outputs

if TYPE_CHECKING:
    from wide.model import RoutedModel


@dataclass
class Config:
    name: str = "wide"
    sparsity: float = 0.25
    """Asked share of (token, layer, group) decisions that skip."""
    attention_sparsity: float | None = None
    ffn_sparsity: float | None = None
    """Separate budgets (the paper's uniform variant when equal): give both or neither."""
    attn_group_size: int = 3
    """Query heads per group."""
    ffn_group_size: int = 128
    """Consecutive FFN channels per group."""
    cluster_channels: bool = False
    """Before training, reorder each layer's FFN channels exactly, so that those that fire together form a group."""
    router_rank: int = 32
    router_activation: str = "none"
    router_norm: bool = True
    init_gap: float = 4.0
    """Execute-skip logit difference at the start: 0 starts half off (paper), 4 starts 98% on."""
    ramp_ratio: float = 0.5
    """Share of the steps over which the target rises from 0; 0 asks for all of it at once (paper)."""
    tau_start: float = 5.0
    tau_end: float = 0.5
    budget_weight: float = 20.0
    budget_price: str = "cost"
    """"mean": every decision alike (paper). "cost": attention and FFN weighed by their parameters."""
    budget_scope: str = "step"
    """"micro": each micro-batch of each rank meets the target by itself (paper). "step": the whole step together."""
    compensation: bool = True
    """Learned vector per group, added whenever the group is skipped."""
    compensation_start: str = "zero"
    """"mean": each vector starts as its group's mean output on training text."""
    distill_weight: float = 0.0
    """Weight of KL(dense || routed) in place of that share of the cross-entropy, in [0, 1]."""
    separation_weight: float = 0.0
    """Weight of mean keep probability times skip probability, late in training (drives gates to saturate)."""
    dial: str = "global"
    """After training, bias the logits so that deterministic routing meets the target: none, global, kind, layer."""

    def __post_init__(self) -> None:
        for key in ("sparsity", "attention_sparsity", "ffn_sparsity", "ramp_ratio", "distill_weight"):
            value = getattr(self, key)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"method.{key}={value} is out of range; legal: 0 to 1")
        if (self.attention_sparsity is None) != (self.ffn_sparsity is None):
            raise ValueError("method.attention_sparsity and method.ffn_sparsity: give both or neither")
        for key in ("attn_group_size", "ffn_group_size", "router_rank"):
            if getattr(self, key) < 1:
                raise ValueError(f"method.{key}={getattr(self, key)} is out of range; legal: 1 or more")
        for key in ("tau_start", "tau_end"):
            if not getattr(self, key) > 0:
                raise ValueError(f"method.{key}={getattr(self, key)} is out of range; legal: above 0")
        for key in ("budget_weight", "separation_weight"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"method.{key}={getattr(self, key)} is out of range; legal: 0 or more")
        for key, legal in _CHOICES.items():
            if getattr(self, key) not in legal:
                raise ValueError(f"method.{key}={getattr(self, key)!r} is unknown; legal: {', '.join(legal)}")

    def targets(self) -> dict[str, float]:
        """What the budget loss asks for: one total, or one per kind."""
        if self.attention_sparsity is None or self.ffn_sparsity is None:
            return {"total": self.sparsity}
        return {"attention": self.attention_sparsity, "ffn": self.ffn_sparsity}


_CHOICES = {
    "compensation_start": ("zero", "mean"),
    "router_activation": ("none", "silu"),
    "budget_price": ("mean", "cost"),
    "budget_scope": ("step", "micro"),
    "dial": ("none", "global", "kind", "layer"),
}


class WideProvider(GateProvider):
    """`routers[kind][layer]`, and `vectors[kind][layer]` [G, D] when compensation is on."""

    supports_dial = True
    remembers = ("spread",)

    def __init__(self, config: Config, geometry: Geometry, seed: int):
        super().__init__(geometry, config.attn_group_size, config.ffn_group_size)
        self.spread: dict[tuple[str, int], Tensor] | None = {} if config.separation_weight > 0 else None
        if config.compensation and config.compensation_start == "mean":
            self.calibration_blocks = 64
        self.routers = per_layer()
        self.vectors = parameters_per_layer() if config.compensation else None
        if config.cluster_channels:
            self.channel_order = torch.arange(geometry.ffn_size).repeat(geometry.num_layers, 1)
        generator = torch.Generator().manual_seed(seed)
        for kind in KINDS:
            groups = self.num_groups[kind]
            routers = [
                Router(
                    geometry.hidden_size,
                    groups,
                    config.router_rank,
                    config.router_activation,
                    config.router_norm,
                    config.init_gap,
                )
                for _ in range(geometry.num_layers)
            ]
            for router in routers:
                router.reset_parameters(generator)
            self.routers[kind] = nn.ModuleList(routers)
            if self.vectors is not None:
                rows = [nn.Parameter(torch.zeros(groups, geometry.hidden_size)) for _ in range(geometry.num_layers)]
                self.vectors[kind] = nn.ParameterList(rows)

    def logits(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        """Execute minus skip [B, T, G] float32, before noise and dial."""
        return self.routers[kind][layer](hidden)

    def gate(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        logits = self.logits(layer, kind, hidden)
        if self.spread is not None:
            keep = torch.sigmoid(logits)
            self.spread[kind, layer] = (keep * (1 - keep)).mean()
        if self.step.noise is not None:
            return hard_gate(logits, self.step.noise[kind][layer], self.step.tau)
        return hard_gate(logits + self.dial[layer, KINDS.index(kind)])

    @torch.no_grad()
    def prepare(self, routed: "RoutedModel", batches: list[dict[str, Tensor]]) -> None:
        """Start the vectors at the groups' mean outputs."""
        assert self.vectors is not None
        for kind, means in mean_outputs(routed, batches).items():
            for vectors, mean in zip(self.vectors[kind], means, strict=True):
                vectors.copy_(mean)

    def compensation(self, layer: int, kind: str) -> Tensor | None:
        return None if self.vectors is None else self.vectors[kind][layer]

    def separation(self) -> Tensor:
        assert self.spread, "separation is recorded only when method.separation_weight > 0"
        return torch.stack(list(self.spread.values())).mean()

    def router_parameters_per_layer(self) -> int:
        return sum(p.numel() for kind in KINDS for p in self.routers[kind][0].parameters())


def build(config: Config, geometry: Geometry, seed: int = 0) -> WideProvider:
    """Fresh routers, initialised from `seed` on the CPU (the same on every device and rank)."""
    return WideProvider(config, geometry, seed)
