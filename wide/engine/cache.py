"""Static key-value cache, with what a CUDA graph needs on the device: how far each row is filled and where it starts.

Slots are shared by the batch: text of unequal length is left-padded, row b starts at slot `start[b]` and its position
in the rotary embedding is slot - start[b]. `filled` is the host's copy of `length`, for slicing in prefill.
"""

import torch
from torch import Tensor

from wide.engine.weights import Weights


class Cache:
    """Keys and values [B, capacity, K, head size] of every layer, and the rotary tables of `capacity` positions."""

    def __init__(self, weights: Weights, batch: int, capacity: int):
        g, device = weights.geometry, weights.device
        shape = (batch, capacity, g.num_kv_heads, g.head_dim)
        self.batch, self.capacity = batch, capacity
        self.keys = [torch.zeros(shape, dtype=weights.dtype, device=device) for _ in range(g.num_layers)]
        self.values = [torch.zeros(shape, dtype=weights.dtype, device=device) for _ in range(g.num_layers)]
        self.cos, self.sin = rotary_tables(weights, capacity)
        self.start = torch.zeros(batch, dtype=torch.int32, device=device)
        self.length = torch.zeros(batch, dtype=torch.int32, device=device)
        self.filled = 0
        self.padded = False
        self._positions: Tensor | None = None
        self.all_groups = torch.ones(batch, 1, g.num_kv_heads, dtype=torch.bool, device=device)
        """The keep mask of one token that skips nothing."""

    def reset(self, start: Tensor | None) -> None:
        """Empty it for new texts; `start` [B] is the number of padding tokens in front of each, None for none."""
        self.length.zero_()
        self.start.zero_() if start is None else self.start.copy_(start)
        self.filled, self.padded = 0, start is not None

    def advance(self, num_tokens: int) -> None:
        """Count the tokens that the coming forward writes; called before it."""
        self.length.add_(num_tokens)
        self.filled += num_tokens
        self._positions = None

    def positions(self, num_tokens: int) -> Tensor:
        """Positions [B x num_tokens] int64 of the last tokens counted; computed once a forward."""
        if self._positions is None:
            steps = torch.arange(-num_tokens, 0, device=self.length.device)
            self._positions = (self.length[:, None] + steps - self.start[:, None]).clamp(min=0).flatten()
        return self._positions

    def valid(self, num_tokens: int) -> Tensor:
        """Whether each of the last tokens counted is real, bool [B, num_tokens]."""
        steps = torch.arange(-num_tokens, 0, device=self.length.device)
        return self.length[:, None] + steps >= self.start[:, None]


def rotary_tables(weights: Weights, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin [num_positions, head size / 2] float32 from the stock module."""
    positions = torch.arange(num_positions, device=weights.device)[None]
    probe = torch.zeros(1, device=weights.device)
    cos, sin = weights.rotary(probe, positions)
    half = cos.shape[-1] // 2
    return cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()
