"""DDP: one learned strength per head group and per channel group, the same for every token (ICML 2026, 2603.08065).

While training, activations are scaled by relu(z) and nothing is sampled; a surrogate keep probability with a threshold
that falls to `tau_end` carries the budget, through an augmented Lagrangian whose multipliers climb by gradient ascent.
Deployed, groups whose z is under the threshold (moved by the dial to meet the target) are gone and the others keep
their strength, so the result exports as a smaller model. Head groups of whole KV heads take keys and values along.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wide.families import Geometry
from wide.methods.provider import GateProvider, check_options, parameters_per_layer
from wide.routing import KINDS


@dataclass
class Config:
    name: str = "ddp"
    sparsity: float = 0.25
    attn_group_size: int = 1
    ffn_group_size: int = 1
    ramp_ratio: float = 0.0
    tau_start: float = 0.5
    tau_end: float = 0.05
    """Threshold of the surrogate keep probability, at the start and at the end."""
    budget_price: str = "mean"
    linear_rate: float = 0.02
    square_rate: float = 0.4
    binary_rate: float = 0.02
    """Ascent rates of the multipliers of (rate - target), of its square, and of mean s(1 - s)."""
    distill_weight: float = 2 / 3
    """CE + 2 KL, up to scale."""
    dial: str = "global"
    """none deploys the threshold; global moves it so that the target is met."""

    budget_scope = "micro"  # the gates are those of every micro-batch
    budget_weight = 0.0  # `penalty` stands in
    separation_weight = 0.0

    def __post_init__(self) -> None:
        check_options(
            self,
            shares=("sparsity", "ramp_ratio", "distill_weight"),
            counts=("attn_group_size", "ffn_group_size"),
            positive=("tau_start", "tau_end"),
            not_negative=("linear_rate", "square_rate", "binary_rate"),
            choices={"budget_price": ("mean", "cost"), "dial": ("none", "global")},
        )

    def targets(self) -> dict[str, float]:
        return {"total": self.sparsity}


class DDPProvider(GateProvider):
    """`strengths[kind][layer]` [G], all 1 at the start: the dense model."""

    multipliers: Tensor
    climbed_at: Tensor
    supports_dial = True
    kv = "removed"

    def __init__(self, config: Config, geometry: Geometry):
        super().__init__(geometry, config.attn_group_size, config.ffn_group_size)
        self.config = config
        self.strengths = parameters_per_layer()
        for kind in KINDS:
            rows = [nn.Parameter(torch.ones(self.num_groups[kind])) for _ in range(geometry.num_layers)]
            self.strengths[kind] = nn.ParameterList(rows)
        self.register_buffer("multipliers", torch.zeros(3))
        self.register_buffer("climbed_at", torch.tensor(-1))

    @property
    def num_noise(self) -> dict[str, int]:
        return dict.fromkeys(KINDS, 0)

    def keep_probability(self, layer: int, kind: str) -> Tensor:
        """Surrogate s [G] under the step's threshold: 0 at z = 0, 1 at twice the threshold."""
        threshold = self.step.tau
        logits = (self.strengths[kind][layer] - threshold) * 2.4 / threshold
        return (torch.sigmoid(logits) * 1.2 - 0.1).clamp(0, 1)

    def logits(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        """Strength above the final threshold, [B, T, G]."""
        return (self.strengths[kind][layer] - self.config.tau_end).expand(*hidden.shape[:-1], -1)

    def _learns(self) -> bool:
        """Whether this forward trains the strengths; LoRA over frozen ones meets the gates as deployed."""
        return self.step.noise is not None and self.strengths["ffn"][0].requires_grad

    def gate(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        if self._learns():
            return self.keep_probability(layer, kind).expand(*hidden.shape[:-1], -1)
        return (self.logits(layer, kind, hidden) + self.dial[layer, KINDS.index(kind)] >= 0).float()

    def factors(self, layer: int, kind: str, keep: Tensor) -> Tensor:
        strength = torch.relu(self.strengths[kind][layer])
        return strength.expand_as(keep) if self._learns() else keep * strength

    def static_keep(self) -> dict[str, Tensor]:
        rows = {kind: torch.stack(list(self.strengths[kind])).detach() for kind in KINDS}
        return {
            kind: (z - self.config.tau_end + self.dial[:, [column]] >= 0).float()
            for column, (kind, z) in enumerate(rows.items())
        }

    def penalty(self, targets: dict[str, float], step: int, num_steps: int) -> Tensor | None:
        """l1 (rate - target) + l2 (rate - target)^2 + l3 mean s(1 - s), weighed as the language loss is."""
        if not self._learns():
            return None
        keep = {k: torch.stack([self.keep_probability(i, k) for i in range(self.geometry.num_layers)]) for k in KINDS}
        share = 0.5
        if self.config.budget_price == "cost":
            attention, ffn = (n * self.group_width(k) * self.num_groups[k] for n, k in ((2, "attention"), (3, "ffn")))
            share = attention / (attention + ffn)
        weights = {"attention": share, "ffn": 1 - share}
        excess = torch.stack([weights[k] * s.mean() for k, s in keep.items()]).sum() - (1 - targets["total"])
        undecided = torch.stack([weights[k] * (s * (1 - s)).mean() for k, s in keep.items()]).sum()
        terms = torch.stack([excess, excess.square(), undecided])
        if int(self.climbed_at) != step:  # once per optimiser step, however it is cut
            self.climbed_at.fill_(step)
            rates = (self.config.linear_rate, self.config.square_rate, self.config.binary_rate)
            self.multipliers += torch.tensor(rates, device=terms.device) * terms.detach()
        return (1 - self.config.distill_weight) * (self.multipliers.clone() * terms).sum()


def build(config: Config, geometry: Geometry, seed: int = 0) -> DDPProvider:
    return DDPProvider(config, geometry)
