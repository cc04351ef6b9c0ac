"""Dense: every group runs. The baseline of every table, through the same masks as the rest.

With `bias` it is the control for compensation: the same free vectors, trained by the same recipe, nothing skipped.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wide.families import Geometry
from wide.methods.provider import GateProvider, parameters_per_layer
from wide.routing import KINDS


@dataclass
class Config:
    name: str = "dense"
    sparsity: float = 0.0
    attn_group_size: int = 1
    ffn_group_size: int = 1
    bias: bool = False
    """Train a vector per group, always added: what compensation's parameters are worth without any skipping."""

    def __post_init__(self) -> None:
        if self.sparsity != 0:
            raise ValueError(f"method.sparsity={self.sparsity} but method dense skips nothing; legal: 0")


class DenseProvider(GateProvider):
    """All ones; `vectors[kind][layer]` [G, D] when `bias` is on."""

    def __init__(self, config: Config, geometry: Geometry):
        super().__init__(geometry, config.attn_group_size, config.ffn_group_size)
        self.vectors = parameters_per_layer() if config.bias else None
        for kind in KINDS:
            if self.vectors is not None:
                shape = (self.num_groups[kind], geometry.hidden_size)
                rows = [nn.Parameter(torch.zeros(shape)) for _ in range(geometry.num_layers)]
                self.vectors[kind] = nn.ParameterList(rows)

    def gate(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        return hidden.new_ones((*hidden.shape[:-1], self.num_groups[kind]), dtype=torch.float32)

    def compensation(self, layer: int, kind: str) -> Tensor | None:
        return None if self.vectors is None else self.vectors[kind][layer]

    def stands_in(self, keep: Tensor) -> Tensor:
        return keep


def build(config: Config, geometry: Geometry, seed: int = 0) -> DenseProvider:
    return DenseProvider(config, geometry)
