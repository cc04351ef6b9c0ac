"""Hydra's callback that keeps `report.html` of a sweep's folder up to date, job by job: also where jobs fail."""

from pathlib import Path

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from experiments.html_report import write_sweep


class SweepReport(Callback):
    def on_job_end(self, config: DictConfig, **kwargs: object) -> None:
        if config.hydra.mode == RunMode.MULTIRUN:
            write_sweep(Path(config.hydra.sweep.dir))
