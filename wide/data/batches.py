"""Batches: which blocks make up a step, what a rank gets of it, the tensors for model and loss.

Sample k of step s is number `s * batch_size + k` of an endless stream that walks a fresh permutation of all
blocks in every epoch, drawn from (seed, epoch); it belongs to rank `k % world_size`. Held-out blocks are
served in order, each counted once. The loaders are plain iterables: Lightning adds no sampler of its own to
them, and reading mapped rows needs no workers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np
import torch
from torch import Tensor

from wide.data.blocks import TokenBlocks

IGNORED_LABEL = -100
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class StepOrder:
    """Which blocks make up the global batch of a step."""

    num_blocks: int
    batch_size: int
    seed: int

    def blocks(self, step: int) -> list[int]:
        """[batch_size] block numbers; a batch may straddle two epochs."""
        first = step * self.batch_size
        numbers = np.arange(first, first + self.batch_size)
        epochs, places = np.divmod(numbers, self.num_blocks)
        pairs = zip(epochs.tolist(), places.tolist(), strict=True)
        return [int(_permutation(self.num_blocks, self.seed, epoch)[place]) for epoch, place in pairs]


@lru_cache(maxsize=4)
def _permutation(num_blocks: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_blocks)


@dataclass(frozen=True)
class StepBatches:
    """Items from step `start()` on; the length stays the whole run, as Lightning counts against it."""

    blocks: TokenBlocks
    order: StepOrder
    steps: int
    rank: int
    world_size: int
    start: Callable[[], int]
    document_boundaries: bool

    def __post_init__(self) -> None:
        if self.order.batch_size % self.world_size:
            raise ValueError(
                f"stage.batch_size={self.order.batch_size} must be a multiple of the {self.world_size} ranks"
            )

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.start(), self.steps):
            yield self.batch(step)

    def batch(self, step: int) -> Batch:
        """b = batch_size / world_size sequences; `sample_positions` [b]: their places in the global batch."""
        positions = range(self.rank, self.order.batch_size, self.world_size)
        chosen = self.order.blocks(step)
        item = make_batch(self.blocks, [chosen[p] for p in positions], self.document_boundaries)
        return item | {"sample_positions": torch.tensor(positions)}


@dataclass(frozen=True)
class EvalBatches:
    """Blocks `rank, rank + world_size, ...` in order, `rows` a batch.

    Ranks make equally many forwards, as collectives require: where the blocks do not divide, a rank ends on a
    filler row with `counted` [b] false and all labels ignored.
    """

    blocks: TokenBlocks
    num_blocks: int
    rows: int
    rank: int
    world_size: int
    document_boundaries: bool

    def __len__(self) -> int:
        return ceil(self._num_rows / self.rows)

    @property
    def _num_rows(self) -> int:
        return ceil(self.num_blocks / self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        mine = range(self.rank, self._num_rows * self.world_size, self.world_size)
        for first in range(0, len(mine), self.rows):
            positions = torch.tensor(mine[first : first + self.rows])
            counted = positions < self.num_blocks
            item = make_batch(self.blocks, positions.clamp(max=self.num_blocks - 1).tolist(), self.document_boundaries)
            item["labels"][~counted] = IGNORED_LABEL
            yield item | {"sample_positions": positions, "counted": counted}


def make_batch(blocks: TokenBlocks, indices: list[int] | range | slice, document_boundaries: bool) -> Batch:
    """input_ids and labels [b, T]; with boundaries also position_ids and document_ids [b, T].

    Labels are the ids themselves, the shift is left to the loss. With boundaries the first token of a
    document is ignored by its place, since nothing before it belongs to it; a token is never ignored for
    what it is, so end tokens are learnt.
    """
    tokens, documents = blocks[indices]
    input_ids = torch.from_numpy(tokens).long()
    item = {"input_ids": input_ids, "labels": input_ids.clone()}
    if document_boundaries:
        document_ids = torch.from_numpy(documents).long()
        position_ids = positions_within(document_ids)
        item["labels"][position_ids == 0] = IGNORED_LABEL
        item |= {"position_ids": position_ids, "document_ids": document_ids}
    return item


def positions_within(document_ids: Tensor) -> Tensor:
    """Distance of each token from the start of its document in the block; [b, T] from document numbers."""
    places = torch.arange(document_ids.shape[1]).expand_as(document_ids)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return places - torch.where(starts, places, 0).cummax(dim=1).values


def forward_inputs(batch: Batch) -> dict[str, Tensor | bool]:
    """What the stock model takes.

    Where position_ids restart it keeps attention inside documents by itself, but only with neither a cache
    nor an attention mask in the call, and with flash_attention_2 only for one sequence per forward.
    """
    inputs: dict[str, Tensor | bool] = {"input_ids": batch["input_ids"], "use_cache": False}
    if "position_ids" in batch:
        inputs["position_ids"] = batch["position_ids"]
    return inputs


def check_boundaries(document_boundaries: bool, attn_implementation: str, micro_batch_size: int) -> None:
    """Refuses the one setting where the stock model would silently attend across documents."""
    if document_boundaries and attn_implementation == "flash_attention_2" and micro_batch_size > 1:
        raise ValueError(
            "data.document_boundaries=true with model.attn_implementation=flash_attention_2 needs "
            f"stage.micro_batch_size=1, got {micro_batch_size}; or use sdpa, eager or flex_attention"
        )
