"""The DataModule: one item of the training loader is this rank's share of one optimiser step.

The global batch of a step depends on the corpus, the seed and the step alone (`batches`), so any number of
ranks sees the same data, and a resumed run goes on at `trainer.global_step` without repeats. Works without
a trainer too, as rank 0 of 1 from step 0. Built by the actions; stages only see its batches.
"""

from pathlib import Path

import lightning
from transformers import PreTrainedTokenizerBase

from wide.data.batches import EvalBatches, StepBatches, StepOrder
from wide.data.blocks import BlockCache, TokenBlocks, open_blocks
from wide.options import DataConfig


class CalibrationData(lightning.LightningDataModule):
    """Training and held-out blocks of one corpus, served by global optimiser step."""

    def __init__(
        self,
        cfg: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        steps: int,
        batch_size: int,
        seed: int,
        cache_root: str | Path,
        vocab_size: int | None = None,
        val_blocks: int | None = None,
    ) -> None:
        """`batch_size`: sequences of a step over all ranks; `val_blocks` limits validation (None: all)."""
        super().__init__()
        self.cfg, self.tokenizer, self.vocab_size = cfg, tokenizer, vocab_size
        self.steps, self.batch_size, self.seed, self.val_blocks = steps, batch_size, seed, val_blocks
        self.cache_root = Path(cfg.cache_dir or cache_root).expanduser()
        self._cache: BlockCache | None = None

    def prepare_data(self) -> None:
        """Tokenises on the first rank of each node; the others find the finished cache entry in `setup`."""
        open_blocks(self.cfg, self.tokenizer, self.cache_root, self.vocab_size)

    def setup(self, stage: str | None = None) -> None:
        self._cache = open_blocks(self.cfg, self.tokenizer, self.cache_root, self.vocab_size)
        if len(self.train_blocks) < self.batch_size:
            raise ValueError(
                f"the corpus gives {len(self.train_blocks)} training blocks of {self.cfg.block_size} tokens, "
                f"fewer than stage.batch_size={self.batch_size}; give more text or lower either size"
            )

    @property
    def train_blocks(self) -> TokenBlocks:
        return self._opened.train

    @property
    def eval_blocks(self) -> TokenBlocks:
        return self._opened.eval

    @property
    def meta(self) -> dict:
        """The record of the cache entry: fingerprints, options, begin and end ids, counts per split."""
        return self._opened.meta

    @property
    def _opened(self) -> BlockCache:
        if self._cache is None:
            self.setup()
        assert self._cache is not None
        return self._cache

    def train_dataloader(self) -> StepBatches:
        rank, world_size = self._place()
        order = StepOrder(len(self.train_blocks), self.batch_size, self.seed)
        return StepBatches(
            self.train_blocks, order, self.steps, rank, world_size, self._start, self.cfg.document_boundaries
        )

    def val_dataloader(self) -> EvalBatches:
        rank, world_size = self._place()
        available = len(self.eval_blocks)
        num_blocks = available if self.val_blocks is None else min(available, self.val_blocks)
        rows = max(1, self.batch_size // world_size)
        return EvalBatches(self.eval_blocks, num_blocks, rows, rank, world_size, self.cfg.document_boundaries)

    def state_dict(self) -> dict[str, str | int]:
        return {"cache_key": self._opened.folder.name, "seed": self.seed, "batch_size": self.batch_size}

    def load_state_dict(self, state_dict: dict[str, str | int]) -> None:
        """A resumed run must see the stream it left; any other would repeat or miss text without a sign."""
        for key, now in self.state_dict().items():
            if state_dict[key] != now:
                raise ValueError(f"cannot resume on other data: {key} was {state_dict[key]!r}, is {now!r}")

    def _place(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _start(self) -> int:
        return self.trainer.global_step if self.trainer else 0
