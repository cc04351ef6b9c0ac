"""D-LLM: each token runs or skips whole layers, and leaves no key or value where it skips (NeurIPS 2024).

Router and LoRA are meant to learn together (`stage=lora` without `stage.from_checkpoint`); `stage=calibrate` trains the
router alone. The budget is each token's own: |mean over layers - target|, its weight rising as a sine.
With `capacity` and unit=sublayer it is MoD-D, the comparator of SkipGPT: in training a fixed share of each text's
tokens skips every sublayer, deployed it is a threshold that has followed those shares.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from wide.families import Geometry
from wide.methods.provider import GateProvider, check_options, per_layer
from wide.routing import KINDS, hard_gate

ALWAYS = 1e4
"""Logit of tokens and layers that are never skipped."""


@dataclass
class Config:
    name: str = "dllm"
    sparsity: float = 0.25
    unit: str = "layer"
    """layer: one decision for attention and FFN. sublayer: one each."""
    capacity: bool = False
    """A fixed share of each text's tokens skips, instead of a budget in the loss (MoD-D)."""
    evict: bool = True
    """Skipped tokens leave no keys and values."""
    router: str = "mlp"
    """mlp: Linear(D, rank), RMS norm, SiLU, two logits. linear: two logits."""
    router_rank: int = 512
    init_gap: float = 1.9
    """Execute-skip logit difference at the start: 87% run."""
    dense_layers: int = 2
    """First layers that every token runs."""
    dense_tokens: int = 2
    """First tokens of a text that run every layer."""
    ramp_ratio: float = 0.0
    tau_start: float = 1.0
    tau_end: float = 1.0
    budget_weight: float = 5.0
    weight_ramp: float = 1.0
    """Share of the steps over which the weight rises."""
    distill_weight: float = 0.0
    dial: str = "none"

    budget_scope = "micro"  # each token has a budget of its own
    budget_price = "mean"
    separation_weight = 0.0
    trains_with_lora = True

    def __post_init__(self) -> None:
        check_options(
            self,
            shares=("sparsity", "ramp_ratio", "weight_ramp", "distill_weight"),
            counts=("router_rank",),
            positive=("tau_start", "tau_end"),
            not_negative=("budget_weight", "dense_layers", "dense_tokens"),
            choices={
                "unit": ("layer", "sublayer"),
                "router": ("mlp", "linear"),
                "dial": ("none", "global", "kind", "layer"),
            },
        )

    def targets(self) -> dict[str, float]:
        return {"total": self.sparsity}


class DLLMProvider(GateProvider):
    """`routers[kind][layer]`, kind "ffn" with unit=sublayer only; buffer `thresholds` [L, 2] moves with `capacity`."""

    thresholds: Tensor
    never_skipped: Tensor
    supports_dial = True
    remembers = ("shared", "decisions")

    def __init__(self, config: Config, geometry: Geometry, seed: int):
        super().__init__(geometry)
        if config.dense_layers >= geometry.num_layers:
            raise ValueError(
                f"method.dense_layers={config.dense_layers} leaves nothing to skip; "
                f"legal: 0 to {geometry.num_layers - 1}"
            )
        self.config, self.kv = config, "evicted" if config.evict else "kept"
        self.routers = per_layer()
        for kind in KINDS if config.unit == "sublayer" else ("attention",):
            routers = [build_router(config, geometry.hidden_size) for _ in range(geometry.num_layers)]
            self.routers[kind] = nn.ModuleList(routers)
        reset_parameters(cast(nn.ModuleDict, self.routers), config, torch.Generator().manual_seed(seed))
        self.register_buffer("thresholds", torch.zeros(geometry.num_layers, 2))
        never_skipped = torch.arange(geometry.num_layers) < config.dense_layers
        self.register_buffer("never_skipped", never_skipped, persistent=False)
        self.shared: dict[int, Tensor] = {}
        self.decisions: dict[tuple[str, int], Tensor] = {}

    @property
    def num_noise(self) -> dict[str, int]:
        return {kind: int(kind in self.routers) for kind in KINDS}

    def logits(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        """Execute minus skip, above the moving threshold, [B, T, 1] float32; `ALWAYS` where nothing may be skipped."""
        if kind not in self.routers:
            return self.shared[layer]
        with torch.autocast(hidden.device.type, enabled=False):
            execute, skip = self.routers[kind][layer](hidden.float()).split(1, dim=-1)
        logits = execute - skip - self.thresholds[layer, KINDS.index(kind)]
        always = (self.step.known_positions < self.config.dense_tokens)[..., None]
        self.shared[layer] = torch.where(always | self.never_skipped[layer], ALWAYS, logits)
        return self.shared[layer]

    def gate(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        logits = self.logits(layer, kind, hidden)
        source = kind if kind in self.routers else "attention"
        column = KINDS.index(source)
        if self.step.noise is None:
            return hard_gate(logits + self.dial[layer, column])
        if self.config.capacity:
            keep = self.within_capacity(logits, layer, column)
        else:
            keep = hard_gate(logits, self.step.noise[source][layer], self.step.tau)
        self.decisions[kind, layer] = keep
        return keep

    def within_capacity(self, logits: Tensor, layer: int, column: int) -> Tensor:
        """Each text skips its lowest logits, the asked share of its real tokens; the threshold follows the cut."""
        valid = self.step.valid
        if valid is None:
            valid = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
        ordered = logits.detach()[..., 0].masked_fill(~valid, math.inf).sort(dim=1).values
        count = (valid.sum(1, keepdim=True) * self.config.sparsity).round().long()
        cut = ordered.gather(1, count.clamp(max=ordered.shape[1] - 1))[..., None]  # the lowest that stays
        movable = cut < ALWAYS / 2
        mean = torch.where(movable, cut, 0.0).sum() / movable.sum().clamp(min=1)  # no wait for the device
        rate = torch.where(self.thresholds[layer, column] == 0, 1.0, 0.1)
        self.thresholds[layer, column] += rate * mean
        return hard_gate(logits - torch.where(movable, cut, 0.0), torch.zeros_like(logits), self.step.tau)

    def penalty(self, targets: dict[str, float], step: int, num_steps: int) -> Tensor:
        """Weight times the mean over tokens of |share of layers skipped - target|; nothing with a fixed capacity."""
        skipped = 1 - torch.stack(list(self.decisions.values())).mean(0)[..., 0]  # [B, T]
        distance = (skipped - targets["total"]).abs()
        distance = distance.mean() if self.step.valid is None else distance[self.step.valid].mean()
        ramp = self.config.weight_ramp * num_steps
        weight = self.config.budget_weight * math.sin(math.pi / 2 * min(step / ramp if ramp else 1.0, 1.0))
        return (0.0 if self.config.capacity else weight) * distance

    def router_parameters_per_layer(self) -> int:
        return sum(p.numel() for routers in self.routers.values() for p in routers[0].parameters())


def build_router(config: Config, hidden_size: int) -> nn.Sequential:
    if config.router == "linear":
        return nn.Sequential(nn.Linear(hidden_size, 2))
    rank = config.router_rank
    return nn.Sequential(nn.Linear(hidden_size, rank), nn.RMSNorm(rank, eps=1e-6), nn.SiLU(), nn.Linear(rank, 2))


@torch.no_grad()
def reset_parameters(routers: nn.Module, config: Config, generator: torch.Generator) -> None:
    """PyTorch's own uniform range for weights; zero biases, but for the gap in the two logits."""
    for linear in routers.modules():
        if isinstance(linear, nn.Linear):
            bound = linear.in_features**-0.5
            linear.weight.copy_(torch.rand(linear.weight.shape, generator=generator) * 2 * bound - bound)
            linear.bias.zero_()
            if linear.out_features == 2:
                linear.bias.copy_(torch.tensor([config.init_gap / 2, -config.init_gap / 2]))


def build(config: Config, geometry: Geometry, seed: int = 0) -> DLLMProvider:
    """Fresh routers, initialised from `seed` on the CPU."""
    return DLLMProvider(config, geometry, seed)
