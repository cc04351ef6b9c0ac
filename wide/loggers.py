"""Experiment trackers through Lightning's loggers: W&B (default, offline unless logged in, never a prompt), CSV, none.

The results row is the truth and is written whatever is chosen here; the tracker is a mirror. Every run keeps its
tracker files in its own folder, so parallel offline runs share nothing.
"""

import netrc
import os
from pathlib import Path
from urllib.parse import urlparse

from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_only

from wide.config import Config


def wandb_mode(asked: str) -> str:
    """ "auto" is online when a key is configured (variable or netrc entry of the W&B host), else offline."""
    if asked != "auto":
        return asked
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return "online" if host and netrc.netrc().authenticators(host) else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"


def build_logger(config: Config, run_dir: Path, job_type: str) -> Logger | None:
    """The tracker of one run; its files lie under `run_dir`. None on ranks other than zero for W&B."""
    if config.logger.name == "none":
        return None
    if config.logger.name == "csv":
        return CSVLogger(save_dir=run_dir, name="csv", version="")
    if rank_zero_only.rank != 0:
        return None
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    run = wandb.init(
        project=config.logger.project,
        name=f"{config.experiment_name}-{job_type}",
        group=config.logger.group or config.experiment_name,
        job_type=job_type,
        tags=[config.method.name, config.model.name, *config.logger.tags],
        dir=str(run_dir),
        config=config.to_dict(),
        mode=wandb_mode(config.logger.mode),
        settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        reinit="finish_previous",
    )
    run.define_metric(f"{job_type}/*", step_metric=f"{job_type}/step")
    return WandbLogger(experiment=run, save_dir=run_dir)


def finish(logger: Logger | None, exit_code: int) -> None:
    """End the tracker's run; a non-zero exit code marks it as failed."""
    if logger is None:
        return
    run = getattr(logger, "experiment", None)
    if hasattr(run, "finish"):
        run.finish(exit_code=exit_code)
    else:
        logger.finalize("failed" if exit_code else "success")
