"""Experiment trackers through Lightning's loggers: W&B (default, offline unless logged in, never a prompt), CSV, none.

The results row is the truth and is written whatever is chosen here; the tracker is a mirror. Every run keeps its
tracker files in its own folder, so parallel offline runs share nothing.
"""

import netrc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from wide.options import LoggerConfig
from wide.records import clean, redact


def global_rank() -> int:
    """Number of this process among all of the run, as Lightning knows it."""
    return vars(rank_zero_only).get("rank", 0)


def wandb_mode(asked: str) -> str:
    """For "auto": online when a key is configured (variable or netrc entry of the W&B host), else offline."""
    if asked != "auto":
        return asked
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return "online" if host and netrc.netrc(os.environ.get("NETRC")).authenticators(host) else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"


@contextmanager
def lost_tracker() -> Iterator[None]:
    """The tracker is a mirror: when it dies (its process, its disk, its server), the run goes on and says so once."""
    try:
        yield
    except Exception as error:  # wandb passes on whatever its process, its socket and its threads raise
        if not _LOST:
            _LOST.append(error)
            print(f"the tracker no longer answers, the run goes on without it ({error})", file=sys.stderr, flush=True)


_LOST: list[Exception] = []


class StageLogger(WandbLogger):
    """W&B through Lightning, with an axis per stage: `calibrate/*` is drawn over `calibrate/step`.

    A tracker that has one clock for all drops whatever comes later with a lower step (a resume, a second stage).
    """

    def __init__(self, run, run_dir: Path, stage: str):
        super().__init__(experiment=run, save_dir=run_dir)
        self.stage = stage
        run.define_metric(f"{stage}/step")
        run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        axis = {} if step is None else {f"{self.stage}/step": step}
        with lost_tracker():
            self.experiment.log({**metrics, **axis})


def build_logger(options: LoggerConfig, config: dict, run_dir: Path, stage: str) -> Logger | None:
    """The tracker of one run; its files lie under `run_dir`. `config` is the resolved, plain configuration.

    None when no tracker is wanted, and for W&B on every rank but zero.
    """
    if options.name == "none":
        return None
    if options.name == "csv":
        return CSVLogger(save_dir=run_dir, name="csv", version="")
    if global_rank() != 0:
        return None
    return StageLogger(_start_wandb(options, config, run_dir, stage), run_dir, stage)


def _start_wandb(options: LoggerConfig, config: dict, run_dir: Path, stage: str):
    """A W&B run that asks nothing and prints nothing. Without a network, mode auto goes on offline."""
    import wandb

    run_dir.mkdir(parents=True, exist_ok=True)
    mode: Any = wandb_mode(options.mode)
    arguments: dict[str, Any] = {
        "project": options.project,
        "name": f"{config['experiment_name']}-{stage}",
        "group": options.group or config["experiment_name"],
        "job_type": stage,
        "tags": [config["method"]["name"], config["model"]["name"], *options.tags],
        "dir": str(run_dir),
        "config": clean(config),
        "reinit": "finish_previous",
        "settings": wandb.Settings(silent=True, console="off", init_timeout=30, x_disable_meta=_argv_is_secret()),
    }
    try:
        return wandb.init(**arguments, mode=mode)
    except wandb.Error as error:
        if options.mode != "auto" or mode != "online":
            raise
        print(f"W&B is not reachable, so this run is kept offline ({str(error).splitlines()[0]})", flush=True)
        return wandb.init(mode="offline", **arguments)


def _argv_is_secret() -> bool:
    """W&B stores the command line as it was typed, unless it is told to store nothing about the machine."""
    return any(redact(argument) != argument for argument in sys.argv)


def finish(logger: Logger | None, exit_code: int) -> None:
    """End the tracker's run; a non-zero exit code marks it as failed."""
    if logger is None:
        return
    with lost_tracker():
        logger.finalize("failed" if exit_code else "success")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=exit_code)
