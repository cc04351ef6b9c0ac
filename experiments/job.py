"""One job of a run or sweep: validate, run the action, leave one results row whether it ends well or not."""

import importlib
import os
import pkgutil
import sys
import traceback
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

import experiments
from experiments.mistakes import explain
from wide import methods, results
from wide.config import Config, build

NUM_STARTED = 0
"""Jobs started in this process, so that a sweep that launched none can be refused."""


def run_job(node: DictConfig) -> None:
    """Run one composed config. A failure leaves a failed row and `error.txt`, then goes on to the caller."""
    global NUM_STARTED
    NUM_STARTED += 1
    hydra = HydraConfig.get()
    try:
        _run(node, hydra.mode, Path(hydra.runtime.output_dir))
    except ValueError as error:
        line = explain(error)
        if line is None or hydra.mode == RunMode.MULTIRUN:  # a sweep goes on with its other jobs
            raise
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)


def _run(node: DictConfig, mode: RunMode, run_dir: Path) -> None:
    config = build(node, methods.load(node.method.name).Config, str(run_dir))
    action = load_action(config.action)
    refuse_shared_sweep(config, mode)
    refuse_used_folder(run_dir)
    environment = results.environment_report()
    row = results.base_row(config.to_dict(), run_dir.name, results.command_line(), environment)
    try:
        metrics = action.run(config)
    except BaseException as error:
        _leave(config, run_dir, results.failed(row, error))
        (run_dir / "error.txt").write_text(traceback.format_exc())
        raise
    _leave(config, run_dir, results.finished(row, metrics))


def _leave(config: Config, run_dir: Path, row: dict) -> None:
    if rank_zero_only.rank == 0:
        results.append_row(run_dir / "row.jsonl", row)
        results.append_row(config.results_file, row)


def load_action(name: str):
    """Module `experiments.<name>` with a `run(config)`; ValueError listing the actions otherwise."""
    legal = [m.name for m in pkgutil.iter_modules(experiments.__path__) if not m.ispkg]
    if name in legal:
        module = importlib.import_module(f"experiments.{name}")
        if hasattr(module, "run"):
            return module
    actions = [n for n in legal if "def run(" in (Path(experiments.__path__[0]) / f"{n}.py").read_text()]
    raise ValueError(f"action={name!r} is unknown; legal: {', '.join(actions)}")


def refuse_shared_sweep(config: Config, mode: RunMode) -> None:
    """Several devices inside a sequential sweep would re-enter the sweep on every rank."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_PROCID" in os.environ
    if mode == RunMode.MULTIRUN and config.trainer.devices * config.trainer.num_nodes > 1 and not launched:
        raise ValueError(
            "-m with trainer.devices > 1 needs one process group per job: start each job with torchrun, use a "
            "Slurm launcher, or sweep with trainer.devices=1"
        )


def refuse_used_folder(run_dir: Path) -> None:
    if (run_dir / "row.jsonl").exists():
        raise ValueError(f"{run_dir} already holds a run; choose another folder, or resume from it with resume=")
