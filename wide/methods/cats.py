"""Training-free dynamic width: groups whose activations are small are skipped, token by token.

CATS (2404.08763) and TEAL (2408.14690) in blocks of WIDE's size, so that they say how much a trained router buys.
Scores of an FFN group: `gate`, the norm of act(gate_proj(x)) over its channels, for which gate_proj runs in full;
`product`, the norm of what down_proj would read, for which gate_proj and up_proj run; `oracle`, the same norm counted
as if it had been known beforehand, a bound for routers that choose by it. A head group is scored by the norm of its
output, for which Q and the attention core run. Thresholds are quantiles of the scores on training text.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wide.families import Geometry
from wide.methods.provider import GateProvider, check_options
from wide.routing import KINDS

if TYPE_CHECKING:
    from wide.model import RoutedModel


@dataclass
class Config:
    name: str = "cats"
    sparsity: float = 0.25
    attention_sparsity: float | None = None
    ffn_sparsity: float | None = None
    """Separate rates (CATS itself: attention 0): give both, with `sparsity` as their mean, or neither."""
    attn_group_size: int = 3
    ffn_group_size: int = 128
    score: str = "gate"
    spread: str = "layer"
    """layer: a quantile for each layer. global: one for all, of scores divided by their layer's mean."""
    dial: str = "global"
    """none keeps the quantiles, met by the dense model; global moves them until the pruned model meets the target."""
    blocks: int = 16
    """Blocks of training text."""

    def __post_init__(self) -> None:
        check_options(
            self,
            shares=("sparsity", "attention_sparsity", "ffn_sparsity"),
            counts=("attn_group_size", "ffn_group_size", "blocks"),
            choices={
                "score": ("gate", "product", "oracle"),
                "spread": ("layer", "global"),
                "dial": ("none", "global"),
            },
        )
        if (self.attention_sparsity is None) != (self.ffn_sparsity is None):
            raise ValueError("method.attention_sparsity and method.ffn_sparsity: give both or neither")
        if self.attention_sparsity is not None and abs(sum(self.rates().values()) / 2 - self.sparsity) > 1e-6:
            raise ValueError(
                f"method.sparsity={self.sparsity} is not the mean of method.attention_sparsity="
                f"{self.attention_sparsity} and method.ffn_sparsity={self.ffn_sparsity}"
            )

    def rates(self) -> dict[str, float]:
        """Wanted skip rate of each kind."""
        if self.attention_sparsity is None or self.ffn_sparsity is None:
            return dict.fromkeys(KINDS, self.sparsity)
        return {"attention": self.attention_sparsity, "ffn": self.ffn_sparsity}


class CatsProvider(GateProvider):
    """Buffer `thresholds` [L, 2]: a group runs where its score reaches its layer's (attention, ffn)."""

    thresholds: Tensor
    supports_dial = True

    def __init__(self, config: Config, geometry: Geometry):
        super().__init__(geometry, config.attn_group_size, config.ffn_group_size)
        self.config, self.calibration_blocks = config, config.blocks
        self.reads = {"attention": "product", "ffn": "gate" if config.score == "gate" else "product"}
        self.saved = {
            "gate": {"attention": 1 / 2, "ffn": 2 / 3},
            "product": {"attention": 1 / 2, "ffn": 1 / 3},
            "oracle": {"attention": 1.0, "ffn": 1.0},
        }[config.score]
        self.register_buffer("thresholds", torch.zeros(geometry.num_layers, 2))
        self.recorded: dict[tuple[str, int], list[Tensor]] | None = None

    @property
    def num_noise(self) -> dict[str, int]:
        return dict.fromkeys(KINDS, 0)

    def scores(self, kind: str, activations: Tensor) -> Tensor:
        """Norm of each group's activations, [B, T, G] float32."""
        return activations.float().unflatten(-1, (self.num_groups[kind], -1)).norm(dim=-1)

    def logits(self, layer: int, kind: str, activations: Tensor) -> Tensor:
        """Logarithm of score over threshold, [B, T, G]."""
        threshold = self.thresholds[layer, KINDS.index(kind)]
        return torch.log(self.scores(kind, activations) + 1e-30) - torch.log(threshold)

    def gate(self, layer: int, kind: str, activations: Tensor) -> Tensor:
        if self.recorded is not None:
            scores = self.scores(kind, activations)
            real = scores.flatten(0, 1) if self.step.valid is None else scores[self.step.valid]
            self.recorded.setdefault((kind, layer), []).append(real.flatten().cpu())
            return torch.ones_like(scores)
        with torch.no_grad():
            logits = self.logits(layer, kind, activations)
            return (logits + self.dial[layer, KINDS.index(kind)] >= 0).float()

    @torch.no_grad()
    def prepare(self, routed: "RoutedModel", batches: list[dict[str, Tensor]]) -> None:
        """Set the thresholds to quantiles of the scores in the dense model."""
        self.recorded = {}
        for batch in batches:
            routed.hidden_states(**batch)
        recorded, self.recorded = self.recorded, None
        for column, (kind, rate) in enumerate(self.config.rates().items()):
            rows = torch.stack([torch.cat(recorded[kind, i]).double() for i in range(self.geometry.num_layers)])
            scale = rows.mean(1) if self.config.spread == "global" else torch.ones(len(rows)).double()
            pooled = (rows / scale[:, None]).flatten()[None] if self.config.spread == "global" else rows
            limits = pooled.sort(dim=1).values
            place = min(round(rate * limits.shape[1]), limits.shape[1] - 1)
            self.thresholds[:, column] = (limits[:, place] * scale if rate > 0 else torch.zeros_like(scale)).float()


def build(config: Config, geometry: Geometry, seed: int = 0) -> CatsProvider:
    return CatsProvider(config, geometry)
