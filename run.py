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
def main(node: DictConfig) -> None:
    from experiments.job import run_job

    run_job(node)


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
        line = explain(error)
        if jobs()["failed"] and jobs()["started"] > 1:
            line = f"{jobs()['failed']} of {jobs()['started']} jobs failed; each left a failed row and error.txt"
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2 if explain(error) else 1
    return 0


def jobs() -> Counter[str]:
    """The tally of `experiments.job`; empty as long as no job started in this process."""
    return getattr(sys.modules.get("experiments.job"), "JOBS", Counter())


if __name__ == "__main__":
    sys.exit(cli())
