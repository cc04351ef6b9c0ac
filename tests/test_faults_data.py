"""Corpora, tokenizers, prompts and lengths as people have them: each is used whole by a stated rule, or refused."""

from pathlib import Path

import pytest
from data_text import byte_tokenizer, files_config, write_texts
from test_cli import composed
from tiny import routed

from experiments import pipeline
from experiments.job import prepare
from experiments.mistakes import explain
from experiments.pipeline import check_prompts
from wide.base_model import load_tokenizer, tiny_tokenizer
from wide.data.blocks import open_blocks
from wide.data.corpus import Corpus
from wide.evaluation.sample import sample_texts
from wide.options import DataConfig, ModelConfig


def texts(path: Path) -> list[str]:
    return [d.text for d in Corpus.from_config(files_config(path)).documents()]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"[" * 100_000, "line 1: not JSON"),
        ("x.jsonl", b'{"text": ' + b"1" * 5000 + b"}", "line 1: not JSON"),
        ("x.jsonl", b"\x1f\x8b\x08\x00" * 30, r"x\.jsonl, line 1: (binary|not UTF-8)"),
        ("x.txt", "Überschrift".encode("utf-16"), r"x\.txt: (binary|not UTF-8)"),
        ("x.txt", "Überschrift".encode("latin-1"), r"x\.txt: not UTF-8"),
        ("x.jsonl", b'{"text": ["a"]}', "expected a string, found list"),
    ],
    ids=("brackets", "digits", "gzip", "utf-16", "latin-1", "list"),
)
def test_documents_that_no_one_can_read_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        texts(tmp_path)
    assert explain(caught.value) and len(explain(caught.value)) < 500


def test_a_link_to_nothing_is_named(tmp_path):
    write_texts(tmp_path, 3)
    (tmp_path / "doc-009.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(ValueError, match=r"cannot read .*doc-009\.txt: No such file"):
        Corpus.from_config(files_config(tmp_path)).fingerprint()


def test_a_folder_that_is_named_like_a_text_is_looked_into(tmp_path):
    write_texts(tmp_path / "more.txt", 3)
    assert len(texts(tmp_path)) == 3


@pytest.mark.parametrize("content", (b"", b"  \n\t\n", "\ufeff".encode()), ids=("empty", "blank", "mark"))
def test_a_corpus_of_empty_documents_says_there_is_too_little(tmp_path, content):
    for number in range(8):
        (tmp_path / f"{number}.txt").write_bytes(content)
    with pytest.raises(ValueError, match="too short for one block: 0 tokens in 0 of 0 documents"):
        open_blocks(files_config(tmp_path), byte_tokenizer(), tmp_path / "cache")


def test_an_enormous_document_is_cut_into_blocks_like_any_other(tmp_path):
    """A million characters in one line, between short ones."""
    write_texts(tmp_path, 8)
    (tmp_path / "doc-004.txt").write_text("ab " * 350_000)
    tokenizer = byte_tokenizer()
    cache = open_blocks(files_config(tmp_path), tokenizer, tmp_path / "cache")
    ids = tokenizer("ab " * 350_000, add_special_tokens=False)["input_ids"]
    tokens, documents = cache.train[:]
    number = next(n for n in range(8) if (documents == n).sum() > 10_000)
    found = tokens[documents == number].tolist()
    assert found[: len(ids)] == ids[: len(found)] and len(found) > len(ids) - 2 * 32


def test_a_cache_folder_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(OSError) as caught:
        open_blocks(files_config(write_texts(tmp_path / "t")), byte_tokenizer(), tmp_path / "cache")
    assert explain(caught.value).startswith(("Not a directory", "File exists"))


def test_a_loading_script_on_the_hub_is_not_run_and_said_so(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def script(path, split, revision):
        raise RuntimeError("Dataset scripts are no longer supported, but found name.py")

    monkeypatch.setattr(datasets, "load_dataset", script)
    with pytest.raises(ValueError, match=r"'owner/name' is a script.*data\.revision=refs/convert/parquet"):
        Corpus.from_config(DataConfig(source="hub", path="owner/name"))


def test_the_papers_corpus_is_not_the_script(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **more: asked.update(more) or 1 / 0)
    node = composed("data=redpajama").data
    with pytest.raises(ZeroDivisionError):
        Corpus.from_config(DataConfig(**{key: node[key] for key in node}))
    assert asked == {"split": "train", "revision": "refs/convert/parquet"}


@pytest.mark.parametrize("path", ("json", "../texts", "a/b/c", "owner/na me"))
def test_a_dataset_name_that_is_no_hub_id_is_refused(path):
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match=r"data\.path=.* is no dataset id; legal: OWNER/NAME"):
        Corpus.from_config(DataConfig(source="hub", path=path))


def test_a_tokenizer_without_pad_and_end_writes_a_sample(tmp_path):
    """Nothing is padded in it, and it ends after its number of tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(name="m", source="local", path=str(tmp_path)))
    assert loaded.pad_token_id is None and loaded.eos_token_id is None
    model = routed("llama")
    sample = sample_texts(model, loaded, "a b", 5)
    assert sample["prompt"] == "a b" and isinstance(sample["routed"], str)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.new_tokens=600"], r"eval\.new_tokens=600 come after it; legal: .*512 in all"),
        (["eval.prompt=''", "eval.new_tokens=4"], "eval.prompt has 0 tokens"),
        ([f"eval.prompt={'a' * 511}", "eval.new_tokens=2"], "eval.prompt has 511 tokens"),
        (["eval.chat_tasks=[sotu_copy]"], "needs a tokenizer with a chat template"),
    ],
    ids=("tokens", "empty", "long", "chat"),
)
def test_what_the_evaluation_cannot_ask_is_refused_before_training(tmp_path, monkeypatch, overrides, message):
    config, _ = prepare(composed(*overrides), sweep=False, run_dir=tmp_path)
    monkeypatch.setattr(pipeline, "load_base", lambda *args, **more: pytest.fail("a refusal must come first"))
    with pytest.raises(ValueError, match=message) as caught:
        pipeline.run(config)
    assert explain(caught.value)
    check_prompts(prepare(composed(), False, _folder(tmp_path / "other"))[0], load_tokenizer(config.model))


def test_a_prompt_beyond_the_embedding_table_is_refused(tmp_path):
    config, _ = prepare(composed(), sweep=False, run_dir=tmp_path)
    with pytest.raises(ValueError, match=r"eval\.prompt gives id \d+, but the model has 199 embedding rows"):
        check_prompts(config, byte_tokenizer(extra=config.eval.prompt * 50))


def _folder(path: Path) -> Path:
    path.mkdir()
    return path
