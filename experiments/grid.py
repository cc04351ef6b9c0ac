"""The whole SmolLM2 grid as parallel processes: `python -m experiments.grid --jobs 4 --minutes 25 --only rivals,grid`.

Jobs are those of `experiments.grid_jobs`, in its order. One whose rows are there already is skipped, one that would not
end in time is not started, and what still runs when the time is over is stopped. `--list` only says what is left.
Further arguments are overrides for every job, such as trainer.compile=true.
"""

import argparse
import fnmatch
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hydra import compose, initialize_config_dir

from experiments.grid_jobs import Job, all_jobs
from experiments.job import parts
from experiments.make_text import DEFAULT as OTHER_TEXT
from experiments.make_text import main as make_text
from experiments.tables.rows import DEFAULT_ROWS, ROOT, variant
from wide import methods
from wide.config import build, register_schemas
from wide.results import read_rows

START, STEP = 100.0, 0.06
"""Seconds a job takes beside training, and those of a compiled step of 32 x 512 tokens (H200) times the card's jobs."""
MEASURED = ("tasks", "other_text", "at_mean", "at_cost")
"""Options of `eval` that a row must agree in to count as the job's."""
GRACE = 20.0
"""Seconds between asking a process to end and ending it."""


@dataclass
class Running:
    job: Job
    process: subprocess.Popen
    log: TextIO
    slot: int
    started: float


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 when a job failed."""
    options = parse(arguments)
    every = all_jobs()
    groups = sorted({job.group for job in every})
    if unknown := set(options.only) - set(groups):
        raise SystemExit(f"error: --only {','.join(sorted(unknown))} is unknown; legal: {', '.join(groups)}")
    chosen = [
        j for j in every if (not options.only or j.group in options.only) and fnmatch.fnmatch(j.name, options.match)
    ]
    register_schemas()
    grid = Grid(options, chosen)
    if options.list:
        left = [job for job in chosen if not grid.is_done(job)]
        for job in left:
            print(f"{job.group:12} {job.steps:5} python run.py {' '.join([*job.overrides, *options.overrides])}")
        print(f"{len(left)} of {len(chosen)} jobs are left, {sum(job.steps for job in left):,} steps of training")
        return 0
    if not Path(OTHER_TEXT).is_file():
        make_text()
    return grid.run()


def listed(text: str) -> list[str]:
    return text.split(",")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.grid", description=__doc__)
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=600, help="time for all of them")
    parser.add_argument("--only", type=listed, default=[], help="groups of jobs, by commas; all if left out")
    parser.add_argument("--match", default="*", help="pattern of job names, such as '*_s50*-17*'")
    parser.add_argument("--rows", default="outputs/grid.jsonl", help="file that rows are appended to")
    parser.add_argument(
        "--done", type=listed, default=[str(DEFAULT_ROWS)], help="files whose finished rows count as done"
    )
    parser.add_argument("--devices", type=listed, default=[], help="GPUs to share the jobs out to, as 0,1")
    parser.add_argument("--logs", type=Path, default=Path("outputs/grid_logs"), help="folder of the jobs' output")
    parser.add_argument("--list", action="store_true", help="say what is left and stop")
    parser.add_argument("overrides", nargs="*", help="overrides for every job")
    options = parser.parse_intermixed_args(arguments)
    if options.jobs < 1 or options.minutes <= 0:
        raise SystemExit("error: --jobs and --minutes must be above 0")
    return options


class Grid:
    """Keeps `options.jobs` processes busy until the jobs, or the time, are used up."""

    def __init__(self, options: argparse.Namespace, jobs: list[Job]):
        self.options, self.waiting = options, list(jobs)
        self.running: list[Running] = []
        self.ends = time.monotonic() + 60 * options.minutes
        self.outcomes: dict[str, list[str]] = {"there": [], "finished": [], "failed": [], "stopped": [], "no time": []}
        self.done = done_keys([*options.done, options.rows])

    def is_done(self, job: Job) -> bool:
        """Whether every stage of the job has a finished row."""
        return job_keys(job, self.options.overrides) <= self.done

    def run(self) -> int:
        self.options.logs.mkdir(parents=True, exist_ok=True)
        try:
            while self.waiting or self.running:
                while self.waiting and len(self.running) < self.options.jobs:
                    self.start_next()
                self.collect()
                if self.running and time.monotonic() > self.ends:
                    self.stop()
                time.sleep(0.2)
        finally:
            self.stop()
        for outcome, names in self.outcomes.items():
            print(
                f"{outcome}: {len(names)}"
                + (f" ({', '.join(names)})" if outcome in ("failed", "stopped") and names else "")
            )
        return int(bool(self.outcomes["failed"]))

    def start_next(self) -> None:
        job = self.waiting.pop(0)
        if time.monotonic() + expected_seconds(job, self.options.jobs) > self.ends:
            self.outcomes["no time"].append(job.name)
            return
        if self.is_done(job):
            self.outcomes["there"].append(job.name)
            return
        slot = min(set(range(self.options.jobs)) - {running.slot for running in self.running})
        log = (self.options.logs / f"{job.name}.log").open("w", encoding="utf-8")
        command = [sys.executable, str(ROOT / "run.py"), *job.overrides, "logger=none"]
        command += [f"results_file={self.options.rows}", *self.options.overrides]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=self.environment(slot))
        self.running.append(Running(job, process, log, slot, time.monotonic()))

    def environment(self, slot: int) -> dict[str, str]:
        threads = max(1, (os.cpu_count() or 1) // self.options.jobs)
        found = {"OMP_NUM_THREADS": str(threads)} | os.environ
        devices = self.options.devices
        return found | ({"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} if devices else {})

    def collect(self) -> None:
        for running in [running for running in self.running if running.process.poll() is not None]:
            self.note(running, "failed" if running.process.returncode else "finished")

    def note(self, running: Running, outcome: str) -> None:
        self.running.remove(running)
        running.log.close()
        self.outcomes[outcome].append(running.job.name)
        print(f"{outcome} {running.job.name} after {time.monotonic() - running.started:.0f} s", flush=True)

    def stop(self) -> None:
        """End what still runs; the rows of its finished stages stay."""
        for running in self.running:
            running.process.terminate()
        until = time.monotonic() + GRACE
        for running in list(self.running):
            try:
                running.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
            self.note(running, "stopped")


def expected_seconds(job: Job, num_jobs: int) -> float:
    return START + STEP * job.steps * num_jobs


def job_keys(job: Job, overrides: list[str]) -> set[tuple]:
    """Keys of the rows that the job leaves, one for each stage."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        node = compose("config", overrides=[*job.overrides, *overrides])
    config = build(node, methods.load(node.method.name).Config, "outputs/x")
    return {row_key(part.to_dict()) for part in parts(config)}


def row_key(config: dict) -> tuple:
    """Equal for rows that measured the same thing of the same training, seed included."""
    measured = tuple(str(config.get("eval", {}).get(key) or "") for key in MEASURED)
    return (variant(config), config.get("seed"), *measured)


def done_keys(patterns: list[str]) -> set[tuple]:
    """Keys of all finished rows; files that are not there yet count as empty."""
    rows = [row for path in patterns for row in (read_rows(path).to_dict("records") if _exists(path) else [])]
    return {row_key(row["config"]) for row in rows if row["status"] == "finished"}


def _exists(pattern: str) -> bool:
    path = Path(pattern)
    return path.is_file() or any(path.parent.glob(path.name))


if __name__ == "__main__":
    sys.exit(main())
