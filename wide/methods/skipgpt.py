"""SkipGPT: a router per sublayer lets each token run or skip whole attention and whole FFN (ICML 2025, 2506.04179).

Keys and values of skipped tokens are still computed, so it is WIDE with one group per sublayer and no compensation.
`conf/method/skipgpt.yaml` is the authors' recipe (with the dial instead of sampled inference), `skipgpt_paper.yaml`
the protocol under which the WIDE paper ran it. The authors' own inference samples its gates; `evaluations` reports that
way and the plain arg-max beside the deployed one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wide.families import Geometry
from wide.methods.provider import GateProvider, check_options, per_layer
from wide.routing import KINDS, Router, hard_gate


@dataclass
class Config:
    name: str = "skipgpt"
    sparsity: float = 0.25
    attention_sparsity: float | None = None
    ffn_sparsity: float | None = None
    """Separate budgets: give both or neither."""
    router: str = "linear"
    """linear: one map to two logits (the paper). mlp: D to D/4, ReLU, two logits (the authors' code). bottleneck: as
    WIDE's router, of `router_rank`, for equal router sizes (the WIDE paper)."""
    router_rank: int = 32
    router_norm: bool = False
    init_gap: float = 0.0
    """Execute-skip logit difference at the start."""
    ramp_ratio: float = 0.0
    tau_start: float = 5.0
    tau_end: float = 1.0
    budget_weight: float = 8.0
    budget_price: str = "mean"
    budget_scope: str = "step"
    distill_weight: float = 0.0
    separation_weight: float = 0.0
    dial: str = "global"
    """none deploys the arg-max; otherwise a bias on the logits meets the target."""

    def __post_init__(self) -> None:
        check_options(
            self,
            shares=("sparsity", "attention_sparsity", "ffn_sparsity", "ramp_ratio", "distill_weight"),
            counts=("router_rank",),
            positive=("tau_start", "tau_end"),
            not_negative=("budget_weight", "separation_weight"),
            choices={
                "router": ("linear", "mlp", "bottleneck"),
                "budget_price": ("mean", "cost"),
                "budget_scope": ("step", "micro"),
                "dial": ("none", "global", "kind", "layer"),
            },
        )
        if (self.attention_sparsity is None) != (self.ffn_sparsity is None):
            raise ValueError("method.attention_sparsity and method.ffn_sparsity: give both or neither")

    def targets(self) -> dict[str, float]:
        """What the budget loss asks for: one total, or one per kind."""
        if self.attention_sparsity is None or self.ffn_sparsity is None:
            return {"total": self.sparsity}
        return {"attention": self.attention_sparsity, "ffn": self.ffn_sparsity}


class PlainRouter(nn.Module):
    """One logit (execute minus skip) per token from one linear, or from Linear(D, D/4), ReLU, Linear."""

    def __init__(self, hidden_size: int, hidden: int | None, norm: bool, init_gap: float):
        super().__init__()
        self.norm, self.init_gap = norm, init_gap
        if hidden is None:
            self.layers = nn.Sequential(nn.Linear(hidden_size, 2))
        else:
            self.layers = nn.Sequential(nn.Linear(hidden_size, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """PyTorch's own uniform range for weights, zero biases but for the gap."""
        with torch.no_grad():
            for linear in self.layers:
                if isinstance(linear, nn.Linear):
                    bound = linear.in_features**-0.5
                    linear.weight.copy_(torch.rand(linear.weight.shape, generator=generator) * 2 * bound - bound)
                    linear.bias.zero_()
            last = self.layers[-1]
            assert isinstance(last, nn.Linear)
            last.bias.copy_(torch.tensor([self.init_gap / 2, -self.init_gap / 2]))

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` [..., D] of any dtype -> logit [..., 1] float32; autocast is off inside."""
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.float()
            if self.norm:
                hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
            execute, skip = self.layers(hidden).split(1, dim=-1)
            return execute - skip


class SkipGPTProvider(GateProvider):
    """`routers[kind][layer]`."""

    supports_dial = True
    remembers = ("spread",)
    evaluations = ("argmax", "sampled")

    def __init__(self, config: Config, geometry: Geometry, seed: int):
        super().__init__(geometry)
        self.spread: dict[tuple[str, int], Tensor] | None = {} if config.separation_weight > 0 else None
        self.sampling: torch.Generator | None = None
        generator = torch.Generator().manual_seed(seed)
        self.routers = per_layer()
        for kind in KINDS:
            routers = [build_router(config, geometry.hidden_size) for _ in range(geometry.num_layers)]
            for router in routers:
                router.reset_parameters(generator)
            self.routers[kind] = nn.ModuleList(routers)

    def logits(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        """Execute minus skip [B, T, 1] float32, before noise and dial."""
        return self.routers[kind][layer](hidden)

    def gate(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        logits = self.logits(layer, kind, hidden)
        if self.spread is not None:
            keep = torch.sigmoid(logits)
            self.spread[kind, layer] = (keep * (1 - keep)).mean()
        if self.step.noise is not None:
            return hard_gate(logits, self.step.noise[kind][layer], self.step.tau)
        if self.sampling is not None:
            return (torch.rand(logits.shape, generator=self.sampling).to(logits) < torch.sigmoid(logits)).float()
        return hard_gate(logits + self.dial[layer, KINDS.index(kind)])

    @contextmanager
    def evaluated(self, way: str) -> Iterator[None]:
        """argmax: the sign of the logit, no dial. sampled: each gate drawn with its probability, from a fixed seed."""
        dial = self.dial.clone()
        self.dial.zero_()
        self.sampling = torch.Generator().manual_seed(0) if way == "sampled" else None
        try:
            yield
        finally:
            self.dial.copy_(dial)
            self.sampling = None

    def separation(self) -> Tensor:
        assert self.spread, "separation is recorded only when method.separation_weight > 0"
        return torch.stack(list(self.spread.values())).mean()

    def router_parameters_per_layer(self) -> int:
        return sum(p.numel() for kind in KINDS for p in self.routers[kind][0].parameters())


def build_router(config: Config, hidden_size: int) -> Router | PlainRouter:
    if config.router == "bottleneck":
        return Router(hidden_size, 1, config.router_rank, "none", config.router_norm, config.init_gap)
    hidden = hidden_size // 4 if config.router == "mlp" else None
    return PlainRouter(hidden_size, hidden, config.router_norm, config.init_gap)


def build(config: Config, geometry: Geometry, seed: int = 0) -> SkipGPTProvider:
    """Fresh routers, initialised from `seed` on the CPU."""
    return SkipGPTProvider(config, geometry, seed)
