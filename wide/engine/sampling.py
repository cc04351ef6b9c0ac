"""The next token from logits: greedy, or sampled with temperature, top-k and top-p (nucleus, arXiv 1904.09751)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. `top_k` keeps the k likeliest tokens, `top_p` the fewest that hold that probability."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} is out of range; legal: 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} is out of range; legal: 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is out of range; legal: above 0, to 1")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p need temperature above 0 (0 is greedy)")

    def pick(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """logits [B, V] -> tokens [B] int64."""
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = self.probabilities(logits)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        """What tokens are drawn from, float32 [B, V]."""
        logits = logits.float() / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probabilities = logits.softmax(-1)
        if self.top_p is None:
            return probabilities
        ordered, order = probabilities.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # probability of the likelier tokens
        kept = torch.zeros_like(probabilities).scatter(-1, order, ordered.masked_fill(before >= self.top_p, 0))
        return kept / kept.sum(-1, keepdim=True)
