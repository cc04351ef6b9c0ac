"""Fixed blocks of token ids in a memory-mapped cache.

The documents of a split are encoded, joined and cut into blocks of `block_size`; the last partial block is
dropped and counted. Beside every id lies the number of its document, so that attention can later be kept
inside documents. One cache entry is a folder named by a sha256 over tokenizer, corpus and options:
    <split>-<shard>.tokens.npy, <split>-<shard>.documents.npy  [blocks, T] int32;  meta.json
It is built in a private folder and renamed into place: concurrent builders never see or spoil half an entry.
"""

import dataclasses
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from wide.data.corpus import Corpus, Document, Files, Split
from wide.data.encoding import Encoder, tokenizer_fingerprint
from wide.options import DataConfig

FORMAT = 1
SPLITS: tuple[Split, ...] = ("train", "eval")
SHARD_BLOCKS = 65_536
DOCUMENTS_PER_CALL = 64
# What decides the ids of a block. Locations are not listed: the corpus fingerprint stands for their content.
KEY_OPTIONS = (
    "source", "split", "text_field", "block_size", "bos", "eos",
    "held_out_every", "held_out_offset", "max_train_blocks", "max_eval_blocks",
)  # fmt: skip
logger = logging.getLogger(__name__)


class TokenBlocks:
    """Blocks of one split: `blocks[indices]` reads only those rows from disk."""

    def __init__(self, folder: Path, split: Split, num_blocks: int, block_size: int) -> None:
        self.folder, self.split, self.block_size = folder, split, block_size
        self._tokens = [np.load(p, mmap_mode="r") for p in sorted(folder.glob(f"{split}-*.tokens.npy"))]
        self._documents = [np.load(p, mmap_mode="r") for p in sorted(folder.glob(f"{split}-*.documents.npy"))]
        for shards in (self._tokens, self._documents):
            found = sum(len(s) for s in shards)
            fits = all(s.dtype == np.int32 and s.shape[1:] == (block_size,) for s in shards)
            if found != num_blocks or not fits:
                raise ValueError(
                    f"{split}: found {found} blocks, meta.json says {num_blocks} of {block_size} int32 ids"
                )
        self._num_blocks = num_blocks
        self._shard_blocks = len(self._tokens[0]) if self._tokens else 1  # every shard but the last is full

    def __len__(self) -> int:
        return self._num_blocks

    def __getitem__(self, indices: list[int] | range | slice) -> tuple[np.ndarray, np.ndarray]:
        """(ids, document numbers), both [len(indices), T] int32."""
        places = range(len(self))[indices] if isinstance(indices, slice) else indices
        tokens = np.empty((len(places), self.block_size), dtype=np.int32)
        documents = np.empty_like(tokens)
        for row, place in enumerate(places):
            if not 0 <= place < len(self):
                raise IndexError(f"block {place} of {len(self)}")
            shard, offset = divmod(place, self._shard_blocks)
            tokens[row], documents[row] = self._tokens[shard][offset], self._documents[shard][offset]
        return tokens, documents


@dataclasses.dataclass(frozen=True)
class BlockCache:
    """An opened cache entry."""

    folder: Path
    meta: dict
    train: TokenBlocks
    eval: TokenBlocks


def open_blocks(
    cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_root: Path, vocab_size: int | None = None
) -> BlockCache:
    """The cache entry for this corpus, tokenizer and options, built first if it is missing.

    `vocab_size` is the number of embedding rows; every id must be smaller, or the model reads outside its
    table.
    """
    return _open(Corpus.from_config(cfg), cfg, tokenizer, cache_root, vocab_size)


def open_text(
    path: str | Path,
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    cache_root: Path,
    vocab_size: int | None = None,
) -> TokenBlocks:
    """All of a file or folder as held-out blocks under the policy of `cfg`: text of another kind."""
    corpus = Corpus(None, Files(path, cfg.text_field))
    return _open(corpus, cfg, tokenizer, cache_root, vocab_size).eval


def _open(
    corpus: Corpus, cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, root: Path, vocab_size: int | None
) -> BlockCache:
    encoder = Encoder.from_config(cfg, tokenizer)
    identity = _identity(cfg, encoder, corpus)
    folder = root / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    if not folder.is_dir():
        _build(folder, cfg, encoder, corpus, identity)
    cache = _load(folder, identity)
    highest = cache.meta["highest_id"]
    if vocab_size is not None and highest >= vocab_size:
        raise ValueError(
            f"the tokenizer gives id {highest}, but the model has {vocab_size} embedding rows (legal: 0 to "
            f"{vocab_size - 1}); use the model's own tokenizer or resize its embeddings"
        )
    return cache


def _identity(cfg: DataConfig, encoder: Encoder, corpus: Corpus) -> dict:
    return {
        "format": FORMAT,
        "tokenizer": tokenizer_fingerprint(encoder.tokenizer),
        "corpus": corpus.fingerprint(),
        "options": {key: getattr(cfg, key) for key in KEY_OPTIONS},
        "bos_id": encoder.bos_id,
        "eos_id": encoder.eos_id,
    }


def _load(folder: Path, identity: dict) -> BlockCache:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        stored = {key: meta[key] for key in identity}
        blocks = {
            s: TokenBlocks(folder, s, meta["splits"][s]["num_blocks"], meta["options"]["block_size"]) for s in SPLITS
        }
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"the token cache {folder} is damaged ({error}); delete the folder to rebuild it") from error
    if stored != identity:
        raise ValueError(f"the token cache {folder} was built from other inputs; delete the folder to rebuild it")
    return BlockCache(folder, meta, blocks["train"], blocks["eval"])


def _build(folder: Path, cfg: DataConfig, encoder: Encoder, corpus: Corpus, identity: dict) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix=f".{folder.name[:16]}-", dir=folder.parent))
    private.chmod(0o755)  # mkdtemp closes it to other users of a shared cache
    try:
        limits = {"train": cfg.max_train_blocks, "eval": cfg.max_eval_blocks}
        packers = {split: _Packer(private, split, cfg.block_size, limits[split]) for split in SPLITS}
        _pack(corpus, encoder, packers)
        for packer in packers.values():
            packer.flush()
        counts = {split: packer.counts() for split, packer in packers.items()}
        _check_counts(cfg, {split: counts[split] for split in corpus.splits})
        highest = max(packer.highest_id for packer in packers.values())
        meta = identity | {"splits": counts, "num_empty_documents": corpus.num_empty, "highest_id": highest}
        (private / "meta.json").write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n")
        try:
            private.rename(folder)  # fails when another builder was first; its entry is as good as ours
        except OSError:
            if not folder.is_dir():
                raise
        logger.info("token cache %s: %s, %d empty documents skipped", folder.name[:16], counts, corpus.num_empty)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _pack(corpus: Corpus, encoder: Encoder, packers: dict[Split, "_Packer"]) -> None:
    """Encodes in small groups and hands each document to its split, until both are full or the text ends."""
    names: dict[Split, set[str]] = {split: set() for split in SPLITS}
    for documents in _groups(d for d in corpus.documents() if not packers[d.split].is_full):
        encoded = encoder.encode([d.text for d in documents])
        for document, ids in zip(documents, encoded, strict=True):
            names[document.split].add(document.name)
            packers[document.split].add(ids)
        if all(packers[split].is_full for split in corpus.splits):
            break
    shared = names["train"] & names["eval"]
    assert not shared, f"documents in training and held-out text: {sorted(shared)[:3]}"


def _groups(documents: Iterator[Document]) -> Iterator[list[Document]]:
    while group := list(islice(documents, DOCUMENTS_PER_CALL)):
        yield group


def _check_counts(cfg: DataConfig, counts: dict[str, dict[str, int]]) -> None:
    total = sum(c["num_documents"] for c in counts.values())
    for split, count in counts.items():
        if count["num_blocks"] == 0:
            raise ValueError(
                f"the {split} split is too short for one block: {count['num_tokens']} tokens in "
                f"{count['num_documents']} of {total} documents, data.block_size={cfg.block_size}. Give "
                "more text, lower data.block_size, or change what is held out: data.held_out_every="
                f"{cfg.held_out_every} from data.held_out_offset={cfg.held_out_offset} on, or data.eval_path"
            )


class _Packer:
    """Collects the ids of one split and writes full blocks, a shard at a time: memory stays bounded."""

    def __init__(self, folder: Path, split: Split, block_size: int, max_blocks: int | None) -> None:
        self.folder, self.split, self.block_size, self.max_blocks = folder, split, block_size, max_blocks
        self.num_blocks = self.num_tokens = self.num_documents = self.num_shards = 0
        self.highest_id = -1
        self._tokens: list[np.ndarray] = []
        self._documents: list[np.ndarray] = []
        self._num_pending = 0

    @property
    def is_full(self) -> bool:
        return self.max_blocks is not None and self.num_tokens >= self.max_blocks * self.block_size

    def add(self, ids: list[int]) -> None:
        if self.is_full:
            return
        self._tokens.append(np.asarray(ids, dtype=np.int32))
        self._documents.append(np.full(len(ids), self.num_documents, dtype=np.int32))
        self.highest_id = max(self.highest_id, max(ids, default=-1))
        self.num_documents += 1
        self.num_tokens += len(ids)
        self._num_pending += len(ids)
        while self._num_ready >= SHARD_BLOCKS:
            self._write(SHARD_BLOCKS)

    @property
    def _num_ready(self) -> int:
        full = self._num_pending // self.block_size
        return full if self.max_blocks is None else min(full, self.max_blocks - self.num_blocks)

    def flush(self) -> None:
        if self._num_ready > 0:
            self._write(self._num_ready)

    def counts(self) -> dict[str, int]:
        return {
            "num_blocks": self.num_blocks,
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "num_dropped_tokens": self.num_tokens - self.num_blocks * self.block_size,
        }

    def _write(self, num_blocks: int) -> None:
        size = num_blocks * self.block_size
        for name, pending in (("tokens", self._tokens), ("documents", self._documents)):
            joined = np.concatenate(pending)
            path = self.folder / f"{self.split}-{self.num_shards:05d}.{name}.npy"
            np.save(path, joined[:size].reshape(num_blocks, self.block_size))
            pending[:] = [joined[size:]]
        self.num_shards += 1
        self.num_blocks += num_blocks
        self._num_pending -= size
