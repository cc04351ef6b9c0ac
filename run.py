"""Entry point: `python run.py +experiment=llama8b_s50`, any `key=value`, `-m` for sweeps. See README.

Hydra composes the config; every mistake in it ends in one line on standard error. Heavy imports happen inside the
job, so that `--help` and tab completion answer at once.
"""

import os
import sys
from collections import Counter

import hydra
from omegaconf import DictConfig

from wide.config import register_schemas

register_schemas()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(node: DictConfig) -> float | None:
    from experiments.job import run_job

    return run_job(node)


def cli() -> int:
    """Exit status: 0; 2 for a mistake of the user's; 1 for a run that failed, after its traceback."""
    from experiments.mistakes import check_sweep, explain

    os.environ["HYDRA_FULL_ERROR"] = "1"
    if not sys.stdout.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the libraries too: they fill a log with carriage returns
    try:
        main()
        check_sweep(sys.argv[1:], jobs())
    except Exception as error:
        if lost_jobs():
            print(lost_jobs(), file=sys.stderr)
        elif explain(error) is None:
            raise
        else:
            print(f"error: {explain(error)}", file=sys.stderr)
        return 2 if explain(error) else 1
    finally:
        if reports := sys.modules.get("experiments.sweep_report"):
            reports.mirror()
    if lost_jobs():  # of a search that tolerates some
        print(lost_jobs(), file=sys.stderr)
    return int(bool(lost_jobs()))


def jobs() -> Counter[str]:
    """The tally of `experiments.job`, or of the sweep's folder where other processes ran the jobs."""
    here: Counter[str] = getattr(sys.modules.get("experiments.job"), "JOBS", Counter())
    reports = sys.modules.get("experiments.sweep_report")
    elsewhere: Counter[str] = Counter() if reports is None else reports.tally()
    return here or elsewhere


def lost_jobs() -> str | None:
    """The line a sweep with failed jobs ends in."""
    count = jobs()
    if not count["failed"] or count["started"] < 2:
        return None
    return f"error: {count['failed']} of {count['started']} jobs failed; each left a failed row and error.txt"


if __name__ == "__main__":
    sys.exit(cli())
