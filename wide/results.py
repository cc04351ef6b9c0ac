"""Results: one JSON object per finished or failed run, appended to a JSONL file; a reader that gives a DataFrame.

The row says what was asked, what was measured, on what, with which versions and which command. Appends take a lock
and are flushed to disk, so parallel jobs may share a file; a line torn by a killed writer is skipped with a warning
and does not spoil the next one.
"""

import fcntl
import glob
import hashlib
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

import pandas as pd

from wide.records import clean, redact

SCHEMA_VERSION = 1
PACKAGES = ("torch", "triton", "transformers", "peft", "lightning", "hydra-core", "lm-eval", "wandb", "safetensors")


def append_row(path: str | Path, row: dict) -> None:
    """Append one JSON row, atomically with respect to other writers of the same file.

    JSON has no NaN and no infinity: such a figure becomes null, and its key is listed under `not_finite`. Secrets are
    hidden. On a full disk nothing is left of the row, and the error goes on.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lost: list[str] = []
    row = cast(dict, clean(row, "", lost))
    if lost:
        row["not_finite"] = sorted(lost)
    line = json.dumps(row, sort_keys=True, allow_nan=False) + "\n"
    with open(path, "ab+", buffering=0) as file:  # a buffer would be written again when the file is closed
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":  # a writer was killed in mid-line
                warnings.warn(f"{path} ended in a torn row, left as it is", stacklevel=2)
                line = "\n" + line
        left = line.encode()
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), size)
            raise


def check_writable(path: str | Path) -> None:
    """ValueError where no row could be appended: found before days of training, not after."""
    path = Path(path)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"results_file={str(path)!r} cannot be written; legal: the path of a JSONL file")


def read_rows(paths: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """All rows of the files (names or glob patterns) as a DataFrame.

    A line that is no JSON object is skipped with a warning naming file and line.

    Raises:
        ValueError: a name or pattern that no file answers to.
    """
    patterns = [paths] if isinstance(paths, str | Path) else list(paths)
    rows = []
    for path in (file for pattern in patterns for file in _files(str(pattern))):
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            try:
                row = json.loads(line) if line.strip() else {}
            except (ValueError, RecursionError):  # also a number of thousands of digits, brackets without end
                row = None
            if not isinstance(row, dict):
                warnings.warn(f"{path}:{number} is not a whole JSON row and was skipped", stacklevel=2)
            elif row:
                rows.append(row)
    return pd.DataFrame(rows)


def _files(pattern: str) -> list[Path]:
    files = [Path(pattern)] if Path(pattern).is_file() else [Path(name) for name in sorted(glob.glob(pattern))]
    if not files:
        raise ValueError(f"{pattern!r} names no results file")
    return files


def config_hash(config: dict) -> str:
    """Equal for two runs that were asked for the same thing, wherever they wrote and whoever watched."""
    asked = {key: value for key, value in config.items() if key not in ("output_dir", "results_file", "logger")}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def base_row(config: dict, run_id: str, command: str, environment: dict) -> dict:
    """The part of a row that is known at the start of a run. `config` may be one that validation refused."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "experiment": config.get("experiment_name"),
        "action": config.get("action"),
        "model": config.get("model", {}).get("name"),
        "method": config.get("method", {}).get("name"),
        "asked_sparsity": config.get("method", {}).get("sparsity"),
        "seed": config.get("seed"),
        "config": config,
        "config_hash": config_hash(config),
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": environment["device"],
        "versions": environment["versions"],
        "git_revision": environment["git_revision"],
    }


def finished(row: dict, metrics: dict) -> dict:
    return row | metrics | {"status": "finished", "finished": datetime.now(UTC).isoformat(timespec="seconds")}


def failed(row: dict, error: BaseException) -> dict:
    message = str(error).strip().split("\n")[0][:500]
    end = datetime.now(UTC).isoformat(timespec="seconds")
    return row | {"status": "failed", "error": type(error).__name__, "message": message, "finished": end}


def environment_report() -> dict:
    """Versions, device, platform and git revision; no paths, no environment variables."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "versions": package_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "num_devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "git_revision": git_revision(),
    }


def package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """Commit of the checkout the code lies in, with `+` when files differ from it; None outside a checkout."""
    folder = Path(__file__).parent
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("WIDE_GIT_REVISION")
    return head + ("+" if changed.stdout.strip() else "")


def command_line() -> str:
    """What was typed, without the interpreter's path and without secrets."""
    return redact(" ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]))
