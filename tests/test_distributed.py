"""Two CPU processes do what one does: losses, sparsity and routers within 1e-5 in float32, and resumptions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import distributed_worker as worker
import pytest
import torch
from conftest import OFFLINE, ROOT
from safetensors.torch import load_file

RUNS = [(strategy, case) for strategy in worker.STRATEGIES for case in worker.cases_of(strategy)]
RESUMED = [(strategy, case) for strategy in worker.STRATEGIES for case in worker.KILLED]


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Two processes of this machine; their outputs land in `folder`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | OFFLINE
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


pytestmark = pytest.mark.xdist_group("distributed")  # both processes are started once, by one worker


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> Path:
    """All cases of the worker, trained by two processes."""
    folder = tmp_path_factory.mktemp("together")
    process = torchrun(folder, str(ROOT / "tests" / "distributed_worker.py"), ".")
    assert process.returncode == 0, process.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Cases trained by this process, each once."""
    root = tmp_path_factory.mktemp("alone")

    def train(case: str) -> Path:
        if not (root / case).exists():
            worker.run(root / case, case, strategy=None)
        return root / case

    return train


def left(folder: Path, rank: int = 0) -> tuple[dict, dict[str, torch.Tensor]]:
    facts = json.loads((folder / f"rank{rank}.json").read_text())
    return facts, torch.load(folder / f"rank{rank}.pt", weights_only=True)


def assert_same_training(found: Path, expected: Path) -> None:
    facts, tensors = left(found)
    expected_facts, expected_tensors = left(expected)
    assert len(facts["history"]) == len(expected_facts["history"]) == worker.STEPS
    for row, expected_row in zip(facts["history"], expected_facts["history"], strict=True):
        assert row == pytest.approx(expected_row, abs=1e-5)
    assert tensors.keys() == expected_tensors.keys() and any("gates" in name for name in tensors)
    for name, value in tensors.items():
        torch.testing.assert_close(value, expected_tensors[name], atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize(("strategy", "case"), RUNS)
def test_f53_two_processes_train_as_one(together, alone, strategy, case):
    assert_same_training(together / strategy / case, alone(case))


@pytest.mark.parametrize(("strategy", "case"), RUNS)
def test_all_ranks_hold_the_same_trained_weights_and_the_stored_ones(together, strategy, case):
    folder = together / strategy / case
    tensors, others = left(folder)[1], left(folder, rank=1)[1]
    assert all(torch.equal(value, others[name]) for name, value in tensors.items())


@pytest.mark.parametrize(("strategy", "case"), RESUMED)
def test_killed_and_resumed_equals_straight(together, strategy, case):
    folder = together / strategy
    straight, resumed = left(folder / case), left(folder / f"{case}_resumed")
    assert not (folder / f"{case}_killed" / "rank0.json").exists()
    assert resumed[0]["history"] == straight[0]["history"] and len(straight[0]["history"]) == worker.STEPS
    assert all(torch.equal(value, straight[1][name]) for name, value in resumed[1].items())


@pytest.mark.parametrize("case", worker.KILLED)
def test_one_process_goes_on_where_a_sharded_run_was_killed(together, alone, tmp_path, case):
    worker.run(tmp_path / case, case, strategy=None, resume=together / "fsdp2" / f"{case}_killed")
    assert_same_training(tmp_path / case, alone(case))


@pytest.mark.parametrize(("strategy", "case"), RUNS)
def test_checkpoint_of_several_processes_is_that_of_one(together, alone, strategy, case):
    """Names, shapes and plain types; frozen weights in none."""

    def shape(value):
        if isinstance(value, torch.Tensor):
            return type(value), value.shape
        if isinstance(value, dict):
            return {key: shape(item) for key, item in value.items()}
        return [shape(item) for item in value] if isinstance(value, list | tuple) else type(value)

    one, several = (
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        for folder in (alone(case), together / strategy / case)
    )
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "history"):
        assert shape(one[key]) == shape(several[key])
    assert one["global_step"] == several["global_step"]


@pytest.mark.parametrize(("strategy", "share"), [("ddp", 1.0), ("fsdp2", 0.5), ("offload", 0.5)])
def test_frozen_layers_are_sharded_and_masks_stay(together, alone, strategy, share):
    whole = left(alone("calibrate"))[0]["held"]
    for rank in range(2):
        facts = left(together / strategy / "calibrate", rank)[0]
        assert facts["held"] == pytest.approx(share * whole, rel=0.01) and facts["masks"] == 4


RUN = ("+experiment=tiny", "trainer.precision=fp32", "stage.batch_size=4", "eval.new_tokens=2", "stage.save_every=2")
TWO = ("trainer.accelerator=cpu", "trainer.devices=2")


def test_command_line_under_torchrun_leaves_what_one_process_leaves(cli):
    """Both stages under FSDP2: one folder, one row, the checkpoint of a single process, evaluated."""
    lora = ("recovery=lora", "recovery.steps=2", "recovery.batch_size=4", "recovery.lora_dropout=0.0")
    process = torchrun(cli.folder, str(ROOT / "run.py"), *RUN, *lora, "trainer=fsdp2", *TWO)
    assert process.returncode == 0, process.stderr[-4000:]
    (folder,) = (cli.folder / "outputs" / "tiny").iterdir()
    single = cli(*RUN, *lora, "trainer=cpu", "hydra.run.dir=one")
    assert single.returncode == 0, single.stderr
    for found, expected in ((folder, cli.folder / "one"), (folder / "lora", cli.folder / "one" / "lora")):
        names = {path.relative_to(expected) for path in expected.rglob("*") if path.name != "run.log"}
        assert {path.relative_to(found) for path in found.rglob("*") if path.name != "run.log"} == names
        tensors, expected_tensors = (load_file(f / "checkpoint" / "routers.safetensors") for f in (found, expected))
        assert tensors.keys() == expected_tensors.keys()
        for name, value in tensors.items():
            torch.testing.assert_close(value, expected_tensors[name], atol=1e-5, rtol=0, msg=name)
        report, wanted = (json.loads((f / "report.json").read_text())["held_out"] for f in (found, expected))
        for key in ("dense_perplexity", "routed_perplexity"):
            assert report[key] == pytest.approx(wanted[key], rel=1e-5)


def test_processes_that_the_trainer_does_not_know_are_refused(tmp_path):
    process = torchrun(tmp_path, str(ROOT / "run.py"), *RUN, "trainer=cpu")
    assert process.returncode != 0 and "torchrun started 2 processes" in process.stderr
    assert not (tmp_path / "outputs" / "results.jsonl").exists()
