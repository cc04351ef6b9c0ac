"""Whole runs killed at random moments, started by fork from one process: `python killed_runs.py FOLDER`.

Prints a JSON object: the straight run's row, and for each kill what was found in its folder and what its resumption
measured.
"""

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from training import tiny_run_config

from experiments import pipeline
from experiments.job import claim_folder, execute
from wide.checkpoint import from_pretrained
from wide.options import DataConfig, EvalConfig
from wide.results import read_rows
from wide.resume import WholeCheckpoints

KILLS, STEPS = 10, 30
FIGURES = ("routed_perplexity", "dense_perplexity", "sparsity_total")


def run_config(folder: Path, resume: Path | None = None):
    stage = {"steps": STEPS, "batch_size": 2, "save_every": 1, "dial_blocks": 2, "log_every": 4}
    config = tiny_run_config(folder, stage)
    config.data = DataConfig(block_size=64, max_train_blocks=32, max_eval_blocks=4)
    config.eval = EvalConfig(blocks=4, new_tokens=2)
    config.results_file = str(folder.parent / "rows.jsonl")
    config.resume = None if resume is None else str(resume)
    return config


def start(folder: Path, resume: Path | None = None) -> int:
    """The run as a child process; its id."""
    folder.mkdir(parents=True)
    child = os.fork()
    if child:
        return child
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as silence:
        os.dup2(silence.fileno(), 1)
    config = run_config(folder, resume)
    pipeline.check(config)
    claim_folder(folder, config)
    execute(config, pipeline, folder)
    os._exit(0)


def finished(folder: Path, resume: Path | None = None) -> dict:
    """A run to its end; the figures of its row."""
    _, status = os.waitpid(start(folder, resume), 0)
    assert status == 0, f"{folder} ended with {status}"
    row = json.loads((folder / "row.jsonl").read_text())
    return {key: row[key] for key in FIGURES}


def inspect(folder: Path) -> dict:
    """What a killed run left; raises where a part of it is neither whole nor absent."""
    state, checkpoint = folder / "checkpoints" / "last.ckpt", folder / "checkpoint"
    found = {"step": -1, "checkpoint": checkpoint.exists(), "row": (folder / "row.jsonl").exists()}
    if state.exists():
        found["step"] = WholeCheckpoints().load_checkpoint(state)["global_step"]
    if checkpoint.exists():
        from_pretrained(checkpoint)
    for name in ("environment.json", "report.json", "history.json"):
        if (folder / name).exists():
            json.loads((folder / name).read_text())
    return found


def main(root: Path) -> dict:
    rank_zero_only.rank = 0
    straight = finished(root / "straight")
    begin = time.monotonic()
    assert finished(root / "again") == straight  # without building the token cache, as the killed ones
    length, moments = time.monotonic() - begin, random.Random(7)
    kills = []
    for number in range(KILLS):
        folder = root / f"killed-{number}"
        child = start(folder)
        time.sleep((number + moments.random()) / KILLS * length)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills.append(inspect(folder))
    last = max(range(KILLS), key=lambda number: (0 < kills[number]["step"] < STEPS, kills[number]["step"]))
    resumed = finished(root / "resumed", root / f"killed-{last}")
    return {"straight": straight, "kills": kills, "resumed": resumed, "rows": len(read_rows(root / "rows.jsonl"))}


if __name__ == "__main__":
    result = main(Path(sys.argv[1]))
    print(json.dumps(result))
