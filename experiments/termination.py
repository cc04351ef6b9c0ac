"""SIGTERM, as Slurm and other schedulers send it: the run saves, leaves a failed row, and exits with status 143.

In training the step under way is finished first and saved to `checkpoints/last.ckpt`; elsewhere the run ends at once,
and what training has saved is there already.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

STATUS = 128 + signal.SIGTERM


class Terminated(SystemExit):
    """Ends the process with status 143; its text goes into the row."""

    def __init__(self, message: str):
        super().__init__(int(STATUS))
        self.message = message

    def __str__(self) -> str:
        return self.message


class SaveWhenTerminated(Callback):
    """Saves the whole state after the step in which SIGTERM came."""

    def __init__(self, path: str):
        self.path = path

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):
            trainer.save_checkpoint(self.path)


def end_on_sigterm() -> None:
    """From here on SIGTERM raises `Terminated`, unless someone else (a job launcher) listens already."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: object) -> None:
    raise Terminated("ended by SIGTERM outside of training")


@contextmanager
def finish_the_step(run_dir: object) -> Iterator[None]:
    """Around training: Lightning listens, ends after the step, and that becomes `Terminated`."""
    ours = signal.getsignal(signal.SIGTERM) == _end
    if ours:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    except SIGTERMException:
        raise Terminated(f"ended by SIGTERM in training; go on by resume={run_dir}") from None
    finally:
        if ours:
            signal.signal(signal.SIGTERM, _end)
