"""NVIDIA's command-line tools beside the kernels: where they lie and which version answers."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path


def cuda_tool(name: str) -> str:
    """Path of a tool of the CUDA toolkit: from PATH, else from CUDA_HOME (by default /usr/local/cuda).

    Raises FileNotFoundError when neither has it.
    """
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    found = shutil.which(name) or shutil.which(name, path=str(home))
    if found is None:
        raise FileNotFoundError(f"{name} is neither on PATH nor in {home}: set CUDA_HOME to the CUDA toolkit")
    return found


def tool_version(tool: str) -> str | None:
    """The version that `tool --version` names, None when it names none."""
    answer = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"[Vv]ersion (\d[\w.]*)", answer)
    return found.group(1) if found else None


def run_tool(command: list[str], limit_s: float, **environment: str) -> tuple[int | None, str]:
    """Exit status (None past `limit_s` seconds) and output of a command run beside this package, children included."""
    here = Path(__file__).parents[1]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=here, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and the program it watches
            process.wait()
            status = None
        output.seek(0)
        return status, output.read()
