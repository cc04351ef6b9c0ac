"""Dense: every group runs. The baseline of every table, through the same masks as the rest."""

from dataclasses import dataclass

from torch import Tensor

from wide.families import Geometry
from wide.methods.provider import GateProvider


@dataclass
class Config:
    name: str = "dense"
    sparsity: float = 0.0
    attn_group_size: int = 1
    ffn_group_size: int = 1

    def __post_init__(self) -> None:
        if self.sparsity != 0:
            raise ValueError(f"method.sparsity={self.sparsity} but method dense skips nothing; legal: 0")


class DenseProvider(GateProvider):
    def gate(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        return hidden.new_ones((*hidden.shape[:-1], self.num_groups[kind]), dtype=hidden.dtype).float()


def build(config: Config, geometry: Geometry, seed: int = 0) -> DenseProvider:
    return DenseProvider(geometry, config.attn_group_size, config.ffn_group_size)
