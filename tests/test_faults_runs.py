"""Runs that are killed, terminated, started twice, or that meet NaN, padding alone, a dead tracker: nothing finished
is lost, and the state they leave is whole.
"""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import ROOT, environment
from killed_runs import KILLS, STEPS
from test_checkpoint import save
from test_cli import composed, rows_of
from tiny import tokens
from training import FixedBlocks, build_module, fit, tiny_run_config, trained_tensors

from experiments.job import claim_folder, execute_part, prepare
from experiments.termination import Terminated, end_on_sigterm, finish_the_step
from experiments.train import build_plugins, build_trainer
from wide import checkpoint
from wide.checkpoint import from_pretrained
from wide.data.batches import make_batch
from wide.results import read_rows
from wide.resume import WholeCheckpoints

PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "kernels")])


def last_state(folder: Path) -> dict:
    return WholeCheckpoints().load_checkpoint(folder / "checkpoints" / "last.ckpt")


def test_runs_killed_at_ten_random_moments_leave_whole_files_and_go_on(tmp_path, python):
    variables = environment(PYTHONPATH=PATHS, TQDM_DISABLE="1")
    script = str(ROOT / "tests" / "killed_runs.py")
    done = python(script, str(tmp_path / "runs"), folder=tmp_path, environment=variables)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    steps = [kill["step"] for kill in found["kills"]]
    assert len(steps) == KILLS and any(0 < step < STEPS for step in steps)
    assert found["resumed"] == found["straight"]
    finished = sum(kill["row"] for kill in found["kills"])
    assert found["rows"] == 3 + finished, "a row for each run that ended, none for one that was killed"


@pytest.mark.parametrize("moment", range(6))
def test_a_save_killed_between_its_files_leaves_the_checkpoint_before(tmp_path, moment):
    """Dead before, or right after, each of the files and the move into place."""
    save(tmp_path / "c")
    name = ("_write_tensors", "write_json", "model_card", "_sync", "_replace", "_replace")[moment]
    real = getattr(checkpoint, name)
    child = os.fork()
    if not child:

        def die(*args, **kwargs):
            if moment == 5:
                real(*args, **kwargs)
            os._exit(9)

        setattr(checkpoint, name, die)
        save(tmp_path / "c")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    from_pretrained(tmp_path / "c")
    hidden = [path for path in tmp_path.iterdir() if path.name != "c"]
    assert all(path.name.startswith(".c-") for path in hidden) and len(hidden) <= 1


def test_sigterm_in_training_saves_the_step_and_ends_with_143(cli):
    process = cli.start("+experiment=tiny", "stage.steps=5000", "stage.log_every=1")
    for line in process.stdout:
        if line.startswith("calibrate 3/"):
            process.send_signal(signal.SIGTERM)
            break
    _, err = process.communicate(timeout=200)
    assert process.returncode == 143 and "Traceback" not in err
    (row,) = rows_of(cli).to_dict("records")
    assert (row["status"], row["error"]) == ("failed", "Terminated")
    (folder,) = (cli.folder / "outputs" / "tiny").iterdir()
    assert f"resume={folder.relative_to(cli.folder)}" in row["message"] and row["message"] in err
    state = last_state(folder)
    assert state["global_step"] == len(state["history"]) >= 3


def test_a_run_ended_by_sigterm_goes_on_as_if_nothing_had_been(tmp_path):
    stage = {"steps": 8, "batch_size": 4, "learning_rate": 0.05}
    straight_config, config = (tiny_run_config(tmp_path / name, stage) for name in ("straight", "ended"))
    straight, ended = build_module(straight_config), build_module(config)
    fit(straight_config, straight)
    step = ended.training_step

    def training_step(batch, batch_idx):
        if ended.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        step(batch, batch_idx)

    ended.training_step = training_step
    with pytest.raises(Terminated, match="go on by resume=ended") as caught, finish_the_step("ended"):
        fit(config, ended)
    assert caught.value.code == 143 and last_state(tmp_path / "ended")["global_step"] == 5
    resumed = build_module(config)
    fit(config, resumed, resume=str(tmp_path / "ended" / "checkpoints" / "last.ckpt"))
    assert resumed.history_rows() == straight.history_rows()
    for name, value in trained_tensors(straight.routed).items():
        assert torch.equal(value, trained_tensors(resumed.routed)[name])


def test_sigterm_outside_training_leaves_a_failed_row(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    config = tiny_run_config(tmp_path, {"steps": 1})
    config.results_file = str(tmp_path / "rows.jsonl")
    action = type("Action", (), {"run": staticmethod(lambda config: os.kill(os.getpid(), signal.SIGTERM))})
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_on_sigterm()
        with pytest.raises(Terminated):
            execute_part(config, action, tmp_path, "run")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(read_rows(tmp_path / "rows.jsonl").error) == ["Terminated"]


def test_a_listener_of_the_job_launcher_stays(monkeypatch):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        end_on_sigterm()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_under_slurm_lightning_does_not_requeue(monkeypatch):
    """Its requeued job would start in a new folder, from nothing."""
    assert len(build_plugins()) == 1
    for name, value in (("SLURM_NTASKS", "1"), ("SLURM_JOB_ID", "7"), ("SLURM_JOB_NAME", "wide")):
        monkeypatch.setenv(name, value)
    assert build_plugins()[1].auto_requeue is False


def test_of_runs_that_claim_one_folder_at_once_one_gets_it(tmp_path):
    (tmp_path / "run").mkdir()
    config, _ = prepare(composed(), sweep=False, run_dir=tmp_path)
    context = multiprocessing.get_context("fork")
    start, won = context.Barrier(8), context.Value("i", 0)

    def claim():
        start.wait()
        try:
            claim_folder(tmp_path / "run", config)
        except ValueError as error:
            assert "already holds a run" in str(error)
        else:
            with won.get_lock():
                won.value += 1

    processes = [context.Process(target=claim) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8 and won.value == 1


def test_nan_in_the_base_ends_the_run_at_its_first_look_and_saves_nothing(tmp_path):
    config = tiny_run_config(tmp_path, {"steps": 50, "batch_size": 2, "log_every": 3, "save_every": 10})
    module = build_module(config)
    module.routed.base.model.norm.weight.data[3] = float("nan")
    with pytest.raises(RuntimeError, match="training diverged: the loss of step 3 is not finite"):
        fit(config, module)
    assert not (tmp_path / "checkpoints").exists() or not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("value", ("nan", "inf"))
def test_weights_that_became_nan_do_not_replace_the_saved_ones(tmp_path, value):
    config = tiny_run_config(tmp_path, {"steps": 6, "batch_size": 2, "save_every": 2, "log_every": 100})
    module = build_module(config)
    step = module.training_step

    def training_step(batch, batch_idx):
        step(batch, batch_idx)
        if module.global_step == 4:  # after the loss of this step was finite
            next(module.routed.gates.parameters()).data.view(-1)[0] = float(value)

    module.training_step = training_step
    with pytest.raises(RuntimeError, match="training diverged: a trained weight is not finite"):
        fit(config, module)
    assert last_state(tmp_path)["global_step"] == 2


class Padded(FixedBlocks):
    """Batches whose every second one is padding alone."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            yield batch | {"attention_mask": torch.full_like(batch["input_ids"], (number + 1) % 2)}


def test_a_step_of_padding_alone_is_no_nan_and_the_next_ones_train(tmp_path):
    config = tiny_run_config(tmp_path, {"steps": 4, "batch_size": 2, "log_every": 1})
    module = build_module(config)
    trainer = build_trainer(config, tmp_path, None, module.name)
    trainer.fit(module, Padded(tokens(8, 16), 4, 2))
    losses = [row["cross_entropy"] for row in module.history_rows()]
    assert losses[1] == losses[3] == 0 and losses[0] > 1 and losses[2] > 1


def test_documents_of_one_token_each_leave_nothing_to_predict_and_no_nan(tmp_path):
    """With boundaries kept, every token is the first of its document."""
    ids = tokens(4, 16).numpy()
    blocks = type(
        "Blocks", (), {"__getitem__": lambda self, rows: (ids[list(rows)], ids[list(rows)] * 0 + range(16))}
    )()
    batch = make_batch(blocks, range(2), document_boundaries=True)
    assert (batch["labels"] == -100).all()
    config = tiny_run_config(tmp_path, {"steps": 1, "batch_size": 2, "log_every": 1})
    module = build_module(config)
    trainer = build_trainer(config, tmp_path, None, module.name)
    trainer.fit(module, torch.utils.data.DataLoader([batch | {"sample_positions": torch.arange(2)}], batch_size=None))
    assert module.history_rows()[0]["cross_entropy"] == 0


DEAD_TRACKER = """
import os, signal
from pathlib import Path
from wide.loggers import build_logger, finish
from wide.options import LoggerConfig
config = {"experiment_name": "e", "method": {"name": "wide"}, "model": {"name": "tiny"}}
logger = build_logger(LoggerConfig(name="wandb", mode="offline"), config, Path("run"), "calibrate")
logger.log_metrics({"calibrate/loss": 1.0}, step=0)
children = [int(c) for t in Path("/proc/self/task").iterdir() for c in (t / "children").read_text().split()]
assert children
for child in children:
    os.kill(child, signal.SIGKILL)
for step in range(1, 200):
    logger.log_metrics({"calibrate/loss": 1.0}, step=step)
finish(logger, 0)
print("went on")
"""


def test_a_tracker_process_that_is_killed_does_not_end_the_run(tmp_path, python):
    done = python("-c", DEAD_TRACKER, folder=tmp_path, environment=environment(PYTHONPATH=PATHS))
    assert done.stdout.splitlines()[-1:] == ["went on"], done.stderr
    assert done.stderr.count("the tracker no longer answers, the run goes on without it") == 1
