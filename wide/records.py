"""What may be written to disk or to a tracker: valid JSON, whole files, no secret.

JSON has no NaN and no infinity, so such a figure becomes null. A secret is the value of a key, of an argument or of an
environment variable whose name says so (API key, token, password), or a text of a known form. Rows, run folders,
checkpoints and trackers all pass through here.
"""

import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

HIDDEN = "***"
SECRET_NAME = re.compile(r"(api_?key|access_?key|token|secret|passw(or)?d|credentials?)$", re.IGNORECASE)
SECRET_ARGUMENT = re.compile(
    r"((?:api_?key|access_?key|token|secret|passw(?:or)?d|credentials?)=)[^\s,}]+", re.IGNORECASE
)
SECRET_FORMS = (
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}"), HIDDEN),  # Hugging Face
    (re.compile(r"(://)[^/\s:@]+:[^/\s@]+@"), rf"\1{HIDDEN}@"),  # user and password in an address
)
SHORTEST = 8
"""Values of environment variables shorter than this are no secrets and would hide ordinary words."""


def redact(text: str) -> str:
    """`text` with every secret in it replaced by `***`."""
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and len(value) >= SHORTEST:
            text = text.replace(value, HIDDEN)
    text = SECRET_ARGUMENT.sub(rf"\1{HIDDEN}", text)
    for form, replacement in SECRET_FORMS:
        text = form.sub(replacement, text)
    return text


def clean(value: object, name: str = "", lost: list[str] | None = None) -> object:
    """A copy of nested dicts and lists that may be written.

    Strings are redacted; null stands for every NaN and infinity, whose dotted names are added to `lost`.
    """
    if isinstance(value, dict):
        return {
            key: _clean_item(key, inner, f"{name}.{key}" if name else str(key), lost) for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [clean(inner, f"{name}.{index}", lost) for index, inner in enumerate(value)]
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, float) and not math.isfinite(value):
        if lost is not None:
            lost.append(name)
        return None
    return value


def _clean_item(key: object, value: object, name: str, lost: list[str] | None) -> object:
    if isinstance(value, str) and value and SECRET_NAME.search(str(key)):
        return HIDDEN
    return clean(value, name, lost)


def write_json(path: Path, value: object, **options: Any) -> None:
    """Write cleaned `value` to `path` at once: the file is the old one or the new one, never a part of one."""
    write_whole(path, (json.dumps(clean(value), allow_nan=False, **options) + "\n").encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file beside `path`, flush it to disk and move it into place. A failure leaves what was there."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp closes it to others
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
