"""Shared by all tests: no network, no tracker account, one thread a worker; the command line as a fixture."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


class CommandLine:
    """`python run.py ...` in a subprocess whose working directory, and so every output, is the test's own.

    W&B leaves the address of a running writer in the environment; a child must not find the one of another test.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), *arguments],
            cwd=self.folder,
            env={k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | OFFLINE | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@pytest.fixture
def cli(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)
