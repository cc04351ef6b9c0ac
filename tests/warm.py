"""`python ARGUMENTS` without waiting for the libraries: one process has imported them and forks a child per command.

The libraries are all that a child is given: it imports the project's own modules itself, and its arguments, folder,
environment and outputs are its own. Importing the libraries takes seven seconds and taking them apart two, a fork none.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

LIBRARIES = (
    *("hydra", "lightning.pytorch", "matplotlib.pyplot", "pandas", "peft", "torch._dynamo"),
    *("lm_eval.evaluator", "lm_eval.models.huggingface", "transformers.models.llama.modeling_llama"),
)


class WarmPython:
    """Starts the process with the first command; `end` it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None

    def __call__(self, *arguments: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
        """`arguments` are those of `python`: a script, `-c CODE` or `-m MODULE` first."""
        if self.process is None:
            command, pipe = [sys.executable, __file__], subprocess.PIPE
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, env=environment, text=True, start_new_session=True
            )
        with tempfile.TemporaryDirectory() as outputs:
            asked = {"arguments": arguments, "folder": str(folder), "environment": environment, "outputs": outputs}
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            status = int(self.process.stdout.readline())
            out, err = (Path(outputs, name).read_text(encoding="utf-8") for name in ("1", "2"))
        return subprocess.CompletedProcess(arguments, status, out, err)

    def end(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()


def serve() -> None:
    """One line of JSON for each command; the answer is its exit status."""
    for library in LIBRARIES:
        importlib.import_module(library)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            leave(become, **json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def leave(function: Callable, **arguments: object) -> NoReturn:
    """Call it and end as an interpreter does, but for two seconds of taking the libraries apart."""
    status = 0
    try:
        function(**arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def become(arguments: list[str], folder: str, environment: dict[str, str], outputs: str) -> None:
    """Do what `python ARGUMENTS` does."""
    for number, path in enumerate((os.devnull, f"{outputs}/1", f"{outputs}/2")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    start, *rest = arguments
    inline = start in ("-c", "-m")
    sys.path[0] = "" if inline else str(Path(start).parent.resolve())
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [start, *rest] if not inline else [start, *rest[1:]]
    if start == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif start == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(start, run_name="__main__")


if __name__ == "__main__":
    serve()
