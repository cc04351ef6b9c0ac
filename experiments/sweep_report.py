"""Hydra's callback for sweeps: keeps `report.html` of the sweep's folder up to date job by job, counts the jobs, and
mirrors the report into W&B at the end.

The count is taken from what the jobs leave in the folder, so it holds for every launcher, wherever the jobs ran.
"""

import json
from collections import Counter
from pathlib import Path
from typing import cast

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.html_report import write_sweep
from wide.config import to_dataclass
from wide.options import LoggerConfig

FOLDERS: list[Path] = []
"""Folder of the sweep that this process started."""
CONFIGS: list[DictConfig] = []
"""Its config, as composed before any job."""


class SweepReport(Callback):
    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        FOLDERS[:] = [Path(config.hydra.sweep.dir)]
        CONFIGS[:] = [config]

    def on_job_end(self, config: DictConfig, job_return: object, **kwargs: object) -> None:
        if config.hydra.mode == RunMode.MULTIRUN:
            write_sweep(Path(config.hydra.sweep.dir))


def mirror() -> None:
    """Log the ended sweep. Called from outside: Hydra ends a sweep that lost a job without a word to its callbacks."""
    for config, folder in zip(CONFIGS, FOLDERS, strict=True):
        if (folder / "report.html").is_file():
            log_sweep(config, folder)


def log_sweep(config: DictConfig, folder: Path) -> None:
    """The sweep's report as a W&B run of its own, job type `sweep`, failed where a job failed."""
    from lightning.pytorch.loggers import WandbLogger

    from wide.loggers import build_logger, finish

    try:
        options = to_dataclass(config.logger, LoggerConfig, "logger")
        ours = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        asked = cast(dict, OmegaConf.to_container(ours))
    except (ValueError, OmegaConfBaseException):  # every job was refused for it, and said so
        return
    if options.name != "wandb":
        return
    import wandb

    logger = build_logger(options, asked, folder, "sweep")
    if isinstance(logger, WandbLogger):
        page = (folder / "report.html").read_text(encoding="utf-8")
        logger.experiment.log({"report": wandb.Html(page, inject=False)})
    finish(logger, exit_code=int(tally()["failed"] > 0))


def tally() -> Counter[str]:
    """`started` and `failed` jobs of this process's sweep; empty without one."""
    found: Counter[str] = Counter()
    for folder in FOLDERS:
        for job in folder.glob("*/row.jsonl"):
            rows = [json.loads(line) for path in job.parent.rglob("row.jsonl") for line in path.open(encoding="utf-8")]
            found["started"] += 1
            found["failed"] += any(row["status"] == "failed" for row in rows)
    return found
