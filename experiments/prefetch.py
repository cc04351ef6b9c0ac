"""`make data`: fetch what the experiments of the paper read, for clusters whose compute nodes have no network.

Fills the Hugging Face cache with the tasks of conf/eval and the calibration corpus, and with models if named:
`python -m experiments.prefetch --models meta-llama/Llama-3.1-8B`. Afterwards set HF_HUB_OFFLINE=1.
"""

import argparse
from pathlib import Path

import yaml

CONF = Path(__file__).parent.parent / "conf"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.prefetch", description=__doc__)
    parser.add_argument("--evals", nargs="*", default=["paper", "generation"], help="files of conf/eval")
    parser.add_argument("--data", nargs="*", default=["redpajama"], help="files of conf/data with source hub")
    parser.add_argument("--models", nargs="*", default=[], help="hub ids")
    options = parser.parse_args(arguments)
    for name in tasks(options.evals):
        fetch_task(name)
        print(f"task {name}", flush=True)
    for name in options.data:
        fetch_corpus(name)
        print(f"corpus {name}", flush=True)
    for name in options.models:
        fetch_model(name)
        print(f"model {name}", flush=True)


def tasks(evals: list[str]) -> list[str]:
    """The task names of these files of conf/eval, each once."""
    files = [yaml.safe_load((CONF / "eval" / f"{name}.yaml").read_text()) for name in evals]
    return list(dict.fromkeys(task for file in files for key in ("tasks", "chat_tasks") for task in file.get(key, [])))


def fetch_task(name: str) -> None:
    """Loading a task makes the harness download its data."""
    from wide.evaluation.accuracy import task_manager

    task_manager([name]).load([name])


def fetch_corpus(name: str) -> None:
    from datasets import load_dataset

    options = yaml.safe_load((CONF / "data" / f"{name}.yaml").read_text())
    load_dataset(options["path"], split=options.get("split", "train"), revision=options.get("revision"))


def fetch_model(name: str) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])


if __name__ == "__main__":
    main()
