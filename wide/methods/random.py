"""Random gates at a rate: what any choice of groups must beat.

Each (layer, position, group) is drawn once and stored, the positions repeating after a prime number, so that a text is
decided alike however it arrives and beside whatever other text.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from wide.families import Geometry
from wide.methods.provider import GateProvider, check_options
from wide.routing import KINDS

PERIOD = 1021


@dataclass
class Config:
    name: str = "random"
    sparsity: float = 0.25
    attention_sparsity: float | None = None
    ffn_sparsity: float | None = None
    """Separate rates: give both or neither."""
    attn_group_size: int = 3
    ffn_group_size: int = 128

    def __post_init__(self) -> None:
        shares = ("sparsity", "attention_sparsity", "ffn_sparsity")
        check_options(self, shares=shares, counts=("attn_group_size", "ffn_group_size"))
        if (self.attention_sparsity is None) != (self.ffn_sparsity is None):
            raise ValueError("method.attention_sparsity and method.ffn_sparsity: give both or neither")


class RandomProvider(GateProvider):
    """Buffers `table_attention` and `table_ffn` [L, PERIOD, G] bool: whether the group runs."""

    def __init__(self, config: Config, geometry: Geometry, seed: int):
        super().__init__(geometry, config.attn_group_size, config.ffn_group_size)
        generator = torch.Generator().manual_seed(seed)
        rates = {"attention": config.attention_sparsity, "ffn": config.ffn_sparsity}
        for kind in KINDS:
            own = rates[kind]
            rate = config.sparsity if own is None else own
            shape = (geometry.num_layers, PERIOD, self.num_groups[kind])
            self.register_buffer(f"table_{kind}", torch.rand(shape, generator=generator) >= rate)

    @property
    def num_noise(self) -> dict[str, int]:
        return dict.fromkeys(KINDS, 0)

    def gate(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        rows = self.get_buffer(f"table_{kind}")[layer][self.step.known_positions % PERIOD]  # [1 or B, T, G]
        return rows.expand(hidden.shape[0], -1, -1).float()


def build(config: Config, geometry: Geometry, seed: int = 0) -> RandomProvider:
    return RandomProvider(config, geometry, seed)
