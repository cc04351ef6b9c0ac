"""Entry point: `python run.py +experiment=llama8b_s50`, any `key=value`, `-m` for sweeps. See README.

Hydra composes the config; every mistake in it ends in one line on standard error. Heavy imports happen inside the
job, so that `--help` and tab completion answer at once.
"""

import os
import sys

import hydra
from omegaconf import DictConfig

from wide.config import register_schemas

register_schemas()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(node: DictConfig) -> None:
    from experiments.job import run_job

    run_job(node)


def cli() -> int:
    """Exit status: 0, or 2 for a mistake of the user's; a failed run ends in its traceback and 1."""
    from experiments.mistakes import check_sweep, explain

    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        main()
        job = sys.modules.get("experiments.job")
        check_sweep(sys.argv[1:], job.NUM_STARTED if job else 0)
    except Exception as error:
        line = explain(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(cli())
