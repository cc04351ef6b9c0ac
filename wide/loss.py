"""Token losses from hidden states, without ever holding all logits: chunks of tokens, recomputed in the backward.

[B, T, V] logits in float32 are the largest tensor of a step (3.2 GB for 32 x 512 tokens at V = 49k), so both the
cross-entropy and the distillation term go chunk by chunk. Losses are sums over predicted tokens; the caller divides
by the count of the whole optimiser step, which makes accumulation equal to the big batch. Compiled, a chunk's softmax,
loss and gradient are fused passes over its logits.
"""

from collections.abc import Iterable
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 2**27
"""Logits held at a time: 512 MiB in float32, some four such tensors at the peak."""


def next_token_labels(batch: dict[str, Tensor]) -> Tensor:
    """Labels [B, T] aligned with the positions that predict them; -100 where nothing is predicted.

    Padding is recognised by the attention mask, a document's first token by the labels given, never by token id.
    """
    labels = batch.get("labels", batch["input_ids"])
    attention_mask = batch.get("attention_mask")
    if attention_mask is not None:
        labels = labels.masked_fill(attention_mask == 0, -100)
    labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    if attention_mask is not None:  # nor does the padding on the left of a text predict its first token
        labels = labels.masked_fill(attention_mask == 0, -100)
    return labels


def check_finite(rows: list[dict[str, Tensor]], parameters: Iterable[Tensor]) -> None:
    """RuntimeError once a step's loss or a trained tensor is not finite: no later step mends it, no save may keep it.

    The loss is the one summed over ranks, so that all of them end together.
    """
    bad = [int(row["step"]) for row in rows if not row["loss"].isfinite()]
    if bad or not all(p.isfinite().all() for p in parameters if p.requires_grad):
        what = f"the loss of step {bad[0]}" if bad else "a trained weight"
        raise RuntimeError(
            f"training diverged: {what} is not finite; lower stage.learning_rate, or look for a damaged base model. "
            "What was saved before stays"
        )


def token_losses(
    hidden: Tensor, head: nn.Module, labels: Tensor, teacher_hidden: Tensor | None = None, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy, and summed KL(teacher || student) when `teacher_hidden` is given (else 0).

    Args:
        hidden: [B, T, D] normed last hidden states of the student.
        head: output projection D -> V.
        labels: [B, T], already shifted, -100 = not counted.
        teacher_hidden: [B, T, D] of the dense model.
        compiled: run each chunk through `torch.compile`.
    """
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    teacher = None if teacher_hidden is None else teacher_hidden.flatten(0, 1)
    cross_entropy, divergence = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
    chunk = _compiled_chunk() if compiled else _chunk
    size = max(1, CHUNK_LOGITS // cast(nn.Linear, head).out_features)
    for start in range(0, len(labels), size):
        part = slice(start, start + size)
        arguments = (hidden[part], labels[part], None if teacher is None else teacher[part])
        if torch.is_grad_enabled():
            ce, kl = checkpoint(chunk, head, *arguments, use_reentrant=False)
        else:
            ce, kl = chunk(head, *arguments)
        cross_entropy, divergence = cross_entropy + ce, divergence + kl
    return cross_entropy, divergence


def _chunk(head: nn.Module, hidden: Tensor, labels: Tensor, teacher: Tensor | None) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float()
    cross_entropy = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    if teacher is None:
        return cross_entropy, torch.zeros_like(cross_entropy)
    with torch.no_grad():
        reference = head(teacher).float().log_softmax(-1)
    per_token = F.kl_div(logits.log_softmax(-1), reference, reduction="none", log_target=True).sum(-1)
    return cross_entropy, torch.where(labels != -100, per_token, 0.0).sum()


@cache
def _compiled_chunk():
    return torch.compile(_chunk)
