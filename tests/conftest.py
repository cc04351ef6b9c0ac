"""Shared by all tests: no network, no tracker account, one thread a worker; commands as fixtures."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm import WarmPython

ROOT = Path(__file__).parent.parent
OFFLINE = {
    "WANDB_MODE": "offline",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ.update(OFFLINE)


@pytest.fixture(autouse=True)
def no_interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' tests switch Triton's interpreter on when they are collected; everyone else runs the references."""
    if "kernels" not in request.path.relative_to(ROOT / "tests").parts:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def environment(**more: str) -> dict[str, str]:
    """Of a child process. W&B leaves the address of a running writer there; a child must not find that of another."""
    return {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | OFFLINE | more


class CommandLine:
    """`python run.py ...` in a process whose working directory, and so every output, is the test's own."""

    def __init__(self, folder: Path, python: WarmPython):
        self.folder, self.python = folder, python

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        return self.python(str(ROOT / "run.py"), *arguments, folder=self.folder, environment=environment(**variables))

    def start(self, *arguments: str) -> subprocess.Popen:
        """An interpreter of its own, running on: for several at once, and for signals."""
        return subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), *arguments],
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="session")
def python() -> Iterator[WarmPython]:
    found = WarmPython()
    yield found
    found.end()


@pytest.fixture
def cli(tmp_path: Path, python: WarmPython) -> CommandLine:
    return CommandLine(tmp_path, python)
