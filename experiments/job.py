"""One job of a run or sweep: validate, run the action, leave one results row whether it ends well or not.

A mistake in a single run is one line on standard error and exit status 2. In a sweep every job that fails leaves a
failed row (and a failed tracker run), the others go on, and the sweep as a whole exits non-zero.
"""

import importlib
import json
import os
import pkgutil
import re
import sys
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NoReturn, cast

import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import experiments
from experiments.mistakes import explain
from experiments.termination import Terminated, end_on_sigterm
from wide import methods, results
from wide.config import build, to_dataclass
from wide.loggers import build_logger, finish, global_rank
from wide.options import Config, LoggerConfig, RecoveryConfig, RootConfig, StageConfig, TrainerConfig
from wide.records import clean, redact

CONFIG = "config.json"
"""The resolved config of a run; its presence makes a folder that run's own."""

JOBS: Counter[str] = Counter()
"""`started` and `failed` jobs of this process: a sweep that launched none, or lost some, must say so."""


OBJECTIVE = "log_perplexity_gap"
"""Figure of the row that a job returns: what a sweeper that searches minimises."""


def run_job(node: DictConfig) -> float | None:
    """Run one composed config; what goes wrong is recorded, printed and raised again. Returns OBJECTIVE if measured."""
    hydra = HydraConfig.get()
    sweep = hydra.mode == RunMode.MULTIRUN
    run_dir = relative(hydra.runtime.output_dir)
    JOBS["started"] += 1
    end_on_sigterm()
    try:
        config, action = prepare(node, sweep, run_dir)
    except Exception as error:
        if sweep:
            leave_refused(node, run_dir, error)
        raise_or_exit(error, run_dir, sweep)
    try:
        return execute(config, action, run_dir).get(OBJECTIVE)
    except Terminated as end:
        print(f"error: {end}", file=sys.stderr, flush=True)
        raise
    except Exception as error:
        raise_or_exit(error, run_dir, sweep)


def prepare(node: DictConfig, sweep: bool, run_dir: Path) -> tuple[Config, ModuleType]:
    """Everything that can be refused before a weight is loaded; then the folder is this run's own."""
    name = OmegaConf.select(node, "method.name")
    config = build(node, methods.load(name).Config, str(run_dir))
    action = load_action(config.action)
    check_processes(config.trainer)
    results.check_writable(config.results_file)
    if config.recovery.name != "none" and (config.action, config.stage.name) != ("pipeline", "calibrate"):
        raise ValueError("recovery=lora follows action=pipeline with stage=calibrate; legal here: recovery=none")
    if sweep:
        refuse_shared_sweep(config)
    if hasattr(action, "check"):
        action.check(config)
    claim_folder(run_dir, config)
    return config, action


def execute(config: Config, action: ModuleType, run_dir: Path) -> dict:
    """Run every part of the job, each with a folder and a row of its own; returns the last part's metrics."""
    metrics = {}
    for part in parts(config):
        folder = Path(part.output_dir)
        if folder != run_dir:
            action.check(part)
            folder.mkdir(exist_ok=True)  # every rank comes by here
            claim_folder(folder, part)
        metrics = execute_part(part, action, folder, "/".join((run_dir.name, *folder.relative_to(run_dir).parts)))
        if dist.is_initialized():
            dist.barrier()  # the next part reads what rank 0 has just written
    return metrics


def parts(config: Config) -> list[Config]:
    """The run itself; with `recovery`, stage 1 and then stage 2 in the folder `lora` inside it.

    A resumed run goes on where it was: in stage 2 once stage 1 has left its checkpoint.
    """
    if config.recovery.name == "none":
        return [config]
    first = replace(config, recovery=RecoveryConfig())
    start = config.resume if config.resume and (Path(config.resume) / "checkpoint").is_dir() else None
    stage = StageConfig(**{**vars(config.recovery), "from_checkpoint": start or config.output_dir})
    begun = Path(start or "") / "lora"
    resume = str(begun) if start and (begun / "checkpoints").is_dir() else None
    second = replace(first, stage=stage, resume=resume, output_dir=f"{config.output_dir}/lora")
    return [second] if start else [first, second]


def execute_part(config: Config, action: ModuleType, run_dir: Path, run_id: str) -> dict:
    row = results.base_row(config.to_dict(), run_id, results.command_line(), results.environment_report())
    try:
        metrics = action.run(config)
        leave(config.results_file, run_dir, results.finished(row, metrics))
        return metrics
    except BaseException as error:
        leave_failed(config.results_file, run_dir, results.failed(row, error))
        raise


def leave(results_file: str, run_dir: Path, row: dict) -> None:
    """The row beside the run's outputs and in the shared file; of a failure also the traceback."""
    if global_rank() != 0:
        return
    if row["status"] == "failed":
        (run_dir / "error.txt").write_text(redact(traceback.format_exc()))
    results.append_row(run_dir / "row.jsonl", row)
    results.append_row(results_file, row)


def leave_failed(results_file: str, run_dir: Path, row: dict) -> None:
    """The failed row; where the disk is full, the failure itself is still what the run ends with."""
    try:
        leave(results_file, run_dir, row)
    except OSError as error:
        print(f"the row of the failure could not be written: {error}", file=sys.stderr, flush=True)


def leave_refused(node: DictConfig, run_dir: Path, error: Exception) -> None:
    """A failed row and a failed tracker run for a job of a sweep that never started.

    The config may be wrong anywhere, also where it says what the row's file and the tracker are.
    """
    if global_rank() != 0:
        return
    asked = cast(dict, OmegaConf.to_container(node, resolve=True))
    row = results.base_row(asked, run_dir.name, results.command_line(), results.environment_report())
    row, results_file = results.failed(row, error), asked.get("results_file") or RootConfig.results_file
    if (run_dir / CONFIG).exists():  # the folder of another run, which stays as it is
        results.append_row(results_file, row)
        return
    leave(results_file, run_dir, row)
    try:
        options, stage = to_dataclass(node.logger, LoggerConfig, "logger"), str(node.stage.name)
    except (ValueError, OmegaConfBaseException):
        return
    finish(build_logger(options, asked, run_dir, stage), exit_code=1)


def raise_or_exit(error: Exception, run_dir: Path, sweep: bool) -> NoReturn:
    """One line for a mistake. A single run exits here; a sweep needs the exception to know that the job failed."""
    JOBS["failed"] += 1
    line = explain(error)
    if sweep:
        print(f"error: {run_dir.name}: {line or f'{type(error).__name__}: {error}'}", file=sys.stderr, flush=True)
    elif line is not None:
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    raise error


def relative(folder: str) -> Path:
    """The run's folder as seen from the working directory, so that rows hold no path of this machine."""
    path = Path(folder)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def load_action(name: str) -> ModuleType:
    """Module `experiments.<name>` with a `run(config)`; ValueError listing the actions otherwise."""
    folder = Path(experiments.__path__[0])
    modules = [module.name for module in pkgutil.iter_modules([str(folder)]) if not module.ispkg]
    legal = [m for m in modules if re.search(r"^def run\(", (folder / f"{m}.py").read_text(), re.M)]
    if name not in legal:
        raise ValueError(f"action={name!r} is unknown; legal: {', '.join(legal)}")
    return importlib.import_module(f"experiments.{name}")


def check_processes(trainer: TrainerConfig) -> None:
    """Processes that torchrun started beyond those the trainer knows would each run everything, into one folder."""
    started, known = int(os.environ.get("WORLD_SIZE", "1")), trainer.devices * trainer.num_nodes
    if "TORCHELASTIC_RUN_ID" in os.environ and started != known:
        raise ValueError(
            f"torchrun started {started} processes, but trainer.devices={trainer.devices} x "
            f"trainer.num_nodes={trainer.num_nodes} is {known}; legal: the same number"
        )


def refuse_shared_sweep(config: Config) -> None:
    """Several devices inside a sequential sweep would re-enter the sweep on every rank."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    if config.trainer.devices * config.trainer.num_nodes > 1 and not launched:
        raise ValueError(
            f"trainer.devices={config.trainer.devices} in a sweep (-m) needs one process group per job: start each "
            "job with torchrun, use +sweep=slurm with as many tasks a node, or sweep with trainer.devices=1"
        )


def claim_folder(run_dir: Path, config: Config) -> None:
    """Write the resolved config, once: two runs never share a folder, however it was named."""
    if global_rank() != 0:
        return
    try:
        with open(run_dir / CONFIG, "x", encoding="utf-8") as file:
            try:
                file.write(json.dumps(clean(config.to_dict()), indent=2) + "\n")
                file.flush()
            except OSError:  # a folder that holds nothing must not look like a run's
                (run_dir / CONFIG).unlink()
                raise
    except FileExistsError:
        raise ValueError(
            f"{run_dir} already holds a run; choose another folder (hydra.run.dir), or go on with it in a new one "
            f"by resume={run_dir}"
        ) from None
