"""Held-out token perplexity and routing, dense and routed over the same blocks, without noise.

Token perplexity of fixed contiguous blocks, `exp(sum CE / predicted tokens)`; the paper's WikiText-2 figure is a
word perplexity through the harness and is a different column.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from wide.loss import next_token_labels, token_losses
from wide.model import RoutedModel
from wide.routing import RoutingStats


@dataclass
class TextScore:
    """Sums over one text. `perplexity` and `loss` are per predicted token; `stats` is None for the dense model."""

    loss_sum: float
    num_predicted: int
    stats: RoutingStats | None

    @property
    def loss(self) -> float:
        return self.loss_sum / max(self.num_predicted, 1)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf  # math.exp overflows just above


@torch.no_grad()
def score(routed: RoutedModel, batches: list[dict[str, Tensor]], dense: bool, bf16: bool = False) -> TextScore:
    """Cross-entropy of the next token over `batches` (model inputs, optionally `labels`), deterministic gates.

    Args:
        routed: the model; its masks must all hang on the projections in use.
        batches: `input_ids` [B, T] and, optionally, `attention_mask`, `position_ids`, `labels`.
        dense: bypass every gate.
        bf16: run under bfloat16 autocast, as training did.
    """
    expected = 2 * routed.geometry.num_layers
    assert routed.num_attached_masks() == expected, "masks are missing: the model would silently run dense"
    routed.gates.step.noise = None
    device = next(routed.parameters()).device
    loss_sum, num_predicted = 0.0, 0
    autocast = torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
    with routed.dense() if dense else nullcontext(), routed.collect() as box, autocast:
        for batch in batches:
            batch = {key: value.to(device) for key, value in batch.items()}
            labels = next_token_labels(batch)
            inputs = {k: v for k, v in batch.items() if k in ("input_ids", "attention_mask", "position_ids")}
            hidden = routed.hidden_states(**inputs)
            cross_entropy, _ = token_losses(hidden, routed.base.get_output_embeddings(), labels)
            loss_sum += float(cross_entropy)
            num_predicted += int((labels != -100).sum())
    return TextScore(loss_sum, num_predicted, box[0] if box else None)
