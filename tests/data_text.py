"""Small tokenizers and texts for the data tests, made on the spot: no network, no files of their own."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from wide.options import DataConfig

SPECIAL = ("<unk>", "<begin>", "<end>", "<fill>")
LINES = tuple(f"line {n} speaks of {n * n} things and then of {n * 7} others" for n in range(60))


def byte_tokenizer(
    *,
    extra: str = "",
    adds_bos: bool = False,
    bos: str | None = "<begin>",
    eos: str | None = "<end>",
    pad: str | None = None,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over LINES. `<unk>` is 0, `<begin>` 1, `<end>` 2, `<fill>` 3; `extra` is further text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*LINES, extra], trainer)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<begin> $A", pair="<begin> $A $B", special_tokens=[("<begin>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad)


def write_texts(folder: Path, count: int = 24, lines: int = 6) -> Path:
    """`count` .txt documents with different words, named so that the sorted order is the written one."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        text = "\n".join(LINES[(number + k) % len(LINES)] for k in range(lines))
        (folder / f"doc-{number:03d}.txt").write_text(f"document {number}\n{text}")
    return folder


def files_config(path: Path, **options: object) -> DataConfig:
    """Every 4th document held out, blocks of 32."""
    defaults = {
        "source": "files",
        "path": str(path),
        "block_size": 32,
        "held_out_every": 4,
        "held_out_offset": 1,
    }
    return DataConfig(**defaults | options)
