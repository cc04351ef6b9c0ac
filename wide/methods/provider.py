"""The contract between a pruning method and the routed model.

`GateProvider.gate(layer, kind, hidden)` is asked once per sublayer with the residual stream before the norm and
answers keep decisions [B, T, G]; `compensation(layer, kind)` may give a vector per group that stands in for a
skipped one. Whatever a step needs beyond the hidden states (noise, temperature, which tokens are real) is set on
`GateProvider.step` before the forward, so that a recomputed forward decides the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wide.families import Geometry


@dataclass
class GateStep:
    """One training step's settings. `noise[kind]` [L, B, T, G]; None means deterministic gates."""

    noise: dict[str, Tensor] | None = None
    tau: float | Tensor = 1.0


class GateProvider(nn.Module):
    """Base of all methods. Subclasses implement `gate`; `num_groups` gives G of each kind (layout of the masks)."""

    supports_dial = False
    """Whether `logits` exist, so that a bias on them can meet a target after training."""
    channel_order: Tensor | None
    """[L, F] int64 buffer of a method that reorders FFN channels: stock index of each channel (see `wide.cluster`)."""

    def __init__(self, geometry: Geometry, attn_group_size: int, ffn_group_size: int):
        super().__init__()
        self.geometry = geometry
        self.attn_group_size, self.ffn_group_size = attn_group_size, ffn_group_size
        self.num_groups = {
            "attention": geometry.num_heads // attn_group_size,
            "ffn": geometry.ffn_size // ffn_group_size,
        }
        self.step = GateStep()
        dial = torch.zeros(geometry.num_layers, 2)
        self.register_buffer("dial", dial)
        self.register_buffer("channel_order", None)

    def group_width(self, kind: str) -> int:
        """Columns of the o_proj (head group times head size) or down_proj (channels) input that one gate covers."""
        return self.attn_group_size * self.geometry.head_dim if kind == "attention" else self.ffn_group_size

    def gate(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        """Keep decisions in {0, 1}, float32 [B, T, G], from `hidden` [B, T, D]; differentiable in training."""
        raise NotImplementedError

    def compensation(self, layer: int, kind: str) -> Tensor | None:
        """Vectors [G, D] added for each skipped group, or None."""
        return None

    def separation(self) -> Tensor:
        """Mean of keep probability times skip probability in the last forward: 0 when every gate is saturated."""
        return torch.zeros(())

    def router_parameters_per_layer(self) -> int:
        """Parameters that deciding costs in one layer, charged against the savings."""
        return 0
