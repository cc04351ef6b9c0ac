"""`python run.py` as a user types it: help, one literal experiment, sweeps, mistakes, folders, rows and trackers."""

import json
from pathlib import Path

import pytest
from conftest import ROOT, CommandLine
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from wandb_file import OfflineRun

from experiments import pipeline
from experiments.job import leave_refused, prepare
from experiments.mistakes import explain
from wide.config import register_schemas
from wide.results import read_rows

TINY = ("+experiment=tiny", "stage.steps=2")
OUTPUTS = {
    "config.json",
    "environment.json",
    "report.json",
    "history.json",
    "row.jsonl",
    "layout.png",
    "curves.png",
    "sample.md",
    "checkpoint/routers.safetensors",
    "checkpoint/wide_config.json",
    "checkpoint/README.md",
    "checkpoints/last.ckpt",
}
SECRET = "0123456789abcdef0123456789abcdef01234567"


def rows_of(cli: CommandLine):
    return read_rows(cli.folder / "outputs" / "results.jsonl")


def one_line_error(process) -> str:
    """Asserts that the mistake was one line on standard error, without a traceback anywhere."""
    assert process.returncode == 2, process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: ") and "Traceback" not in process.stdout
    return line


def composed(*overrides: str) -> DictConfig:
    """What Hydra hands to the job for `python run.py +experiment=tiny ...`."""
    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=["+experiment=tiny", *overrides])


def test_help_lists_the_groups(cli):
    process = cli("--help")
    assert process.returncode == 0
    for group in ("model", "method", "stage", "recovery", "data", "trainer", "logger", "eval", "experiment"):
        assert f"\n{group}: " in process.stdout


def test_cfg_job_shows_an_override_and_runs_nothing(cli):
    process = cli("+experiment=llama8b_s50", "method.sparsity=0.4", "--cfg", "job")
    assert process.returncode == 0
    assert "sparsity: 0.4" in process.stdout and "path: meta-llama/Llama-3.1-8B" in process.stdout
    assert not list(cli.folder.iterdir())


def test_literal_experiment_leaves_its_outputs_and_one_row(cli):
    process = cli("+experiment=tiny")
    assert (process.returncode, process.stderr) == (0, "")
    (run_dir,) = (cli.folder / "outputs" / "tiny").iterdir()
    written = {str(path.relative_to(run_dir)) for path in _files(run_dir) if path.stat().st_size}
    assert written >= OUTPUTS
    (row,) = rows_of(cli).to_dict("records")
    report = json.loads((run_dir / "report.json").read_text())
    assert row["status"] == "finished" and row["experiment"] == "tiny"
    assert row["routed_perplexity"] == report["held_out"]["routed_perplexity"]
    assert row["config"] == json.loads((run_dir / "config.json").read_text())
    assert row["config"]["method"]["ffn_group_size"] == 32
    assert f"{row['routed_perplexity']:.2f}" in process.stdout and str(row["config"]["output_dir"]) in process.stdout
    assert str(cli.folder) not in json.dumps(row), "a row holds no path of the machine"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["method.sparsty=0.5"], ["method.sparsty", "did you mean method.sparsity"]),
        (["method.sparsity=1.3"], ["method.sparsity=1.3", "0 to 1"]),
        (["+experiment=nope"], ["experiment=nope", "smollm2_s50"]),
        (["experiment=tiny"], ["+experiment="]),
        (["+experiment=tiny", "method.attn_group_size=3"], ["attn_group_size=3", "legal: 1, 2, 4"]),
        (["model=null"], ["a group cannot be null"]),
        (["-m", "+experiment=glob(zzz*)"], ["launched no job"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistake_ends_in_one_line(cli, arguments, parts):
    line = one_line_error(cli(*arguments))
    for part in parts:
        assert part in line
    assert not (cli.folder / "outputs" / "results.jsonl").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.attn_group_size=3"], "attn_group_size=3 .*legal: 1, 2, 4"),
        (["method.attn_group_size=8"], "attn_group_size=8 .*legal: 1, 2, 4"),
        (["method.ffn_group_size=48"], "ffn_group_size=48 .*32, 40, 80, 160"),
        (["data.block_size=1024"], "data.block_size=1024 .*2 to 512"),
        (["data=files", "data.path=not_there"], "data.path='not_there' does not exist"),
        (["eval.other_text=not_there"], "eval.other_text='not_there' does not exist"),
        (["model=local", "model.path=not_there"], "model.path='not_there' does not exist"),
        (["resume=not_there"], "resume='not_there': .*last.ckpt"),
        (["action=fly"], "action='fly' is unknown; legal: .*pipeline"),
        (["action=job"], "action='job' is unknown; legal: .*pipeline"),
        (["model.family=opt"], "'opt' is not supported; supported: llama"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_work_is_refused_before_a_weight_is_loaded(tmp_path, monkeypatch, overrides, message):
    for name in ("load_base", "load_tokenizer"):
        monkeypatch.setattr(pipeline, name, lambda *args: pytest.fail("a refusal must come first"))
    with pytest.raises(ValueError, match=message) as caught:
        prepare(composed(*overrides), sweep=False, run_dir=tmp_path)
    assert explain(caught.value) == str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_prepared_run_owns_its_folder(tmp_path):
    config, action = prepare(composed("seed=3"), sweep=False, run_dir=tmp_path)
    assert action is pipeline
    assert json.loads((tmp_path / "config.json").read_text()) == config.to_dict()
    with pytest.raises(ValueError, match=rf"{tmp_path} already holds a run.*resume={tmp_path}"):
        prepare(composed("seed=4"), sweep=False, run_dir=tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 3


def test_several_devices_are_refused_in_a_sweep_that_was_not_launched_for_them(tmp_path, monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"trainer.devices=2 in a sweep .*torchrun"):
        prepare(composed("trainer.devices=2"), sweep=True, run_dir=tmp_path)
    prepare(composed("trainer.devices=1"), sweep=True, run_dir=tmp_path)


@pytest.mark.parametrize(
    "overrides",
    (["logger.mode=loud"], ["method.sparsity=nan"], ["results_file=null"], ["stage.steps=0"], ["~method"], ["~logger"]),
    ids=" ".join,
)
def test_a_refused_job_of_a_sweep_leaves_a_row_whatever_is_wrong(tmp_path, monkeypatch, overrides):
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "0-tiny"
    run_dir.mkdir()
    node = composed(*overrides)
    with pytest.raises(ValueError) as caught:
        prepare(node, sweep=True, run_dir=run_dir)
    leave_refused(node, run_dir, caught.value)
    for path in (tmp_path / "outputs" / "results.jsonl", run_dir / "row.jsonl"):
        assert list(read_rows(path).status) == ["failed"]


def test_a_job_refused_for_its_folder_leaves_the_run_in_it_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "0-tiny"
    run_dir.mkdir()
    prepare(composed(), sweep=True, run_dir=run_dir)
    (run_dir / "row.jsonl").write_text('{"status": "finished"}\n')
    before = {path: path.read_bytes() for path in _files(run_dir)}
    with pytest.raises(ValueError, match="already holds a run") as caught:
        prepare(composed(), sweep=True, run_dir=run_dir)
    leave_refused(composed("logger=wandb"), run_dir, caught.value)
    assert {path: path.read_bytes() for path in _files(run_dir)} == before
    assert list(read_rows(tmp_path / "outputs" / "results.jsonl").status) == ["failed"]


def test_sweep_with_a_failing_job(cli):
    """Four jobs, the third impossible: four rows, four folders, four ended offline runs, a non-zero exit."""
    process = cli("-m", *TINY, "logger=wandb", "method.attn_group_size=1,2,3,4")
    assert process.returncode == 2
    assert "1 of 4 jobs failed" in process.stderr.splitlines()[-1] and "Traceback" not in process.stderr
    rows = rows_of(cli)
    assert list(rows.status) == ["finished", "finished", "failed", "finished"]
    assert rows.error[2] == "ValueError" and "attn_group_size=3" in rows.message[2]
    (sweep,) = (cli.folder / "outputs" / "sweeps").iterdir()
    folders = sorted(path for path in sweep.iterdir() if path.is_dir() and path.name != "wandb")
    assert [folder.name for folder in folders] == [f"{number}-tiny" for number in range(4)]
    runs = [OfflineRun(folder) for folder in folders]
    assert [run.exit_code for run in runs] == [0, 0, 1, 0]
    assert len({run.run.run_id for run in runs}) == 4 and {run.run.run_group for run in runs} == {"tiny"}
    assert [run.config["method"]["attn_group_size"] for run in runs] == [1, 2, 3, 4]
    assert [row["calibrate/step"] for row in runs[0].history if "calibrate/loss" in row]
    assert (folders[2] / "error.txt").read_text().startswith("Traceback")


def test_sweep_in_other_processes_counts_its_jobs(cli):
    """The parent runs none of them: it learns from their folders that one failed."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    process = cli("-m", *TINY, "+sweep=joblib", "method.attn_group_size=2,3")
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("error: 1 of 2 jobs failed") and "Traceback" not in process.stderr
    assert sorted(rows_of(cli).status) == ["failed", "finished"]
    assert len(list((cli.folder / "outputs" / "sweeps").glob("*/*/row.jsonl"))) == 2


def test_run_that_fails_midway_is_a_failed_row_and_a_failed_tracker_run(cli):
    process = cli(*TINY, "logger=wandb", "stage.learning_rate=1e30", WANDB_API_KEY=SECRET)
    assert process.returncode == 1
    assert "diverged" in process.stderr
    (row,) = rows_of(cli).to_dict("records")
    assert (row["status"], row["error"]) == ("failed", "RuntimeError") and "diverged" in row["message"]
    (run_dir,) = (cli.folder / "outputs" / "tiny").iterdir()
    assert OfflineRun(run_dir).exit_code == 1
    assert "RuntimeError" in (run_dir / "error.txt").read_text()
    for path in run_dir.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_f37_jobs_started_together_keep_their_own_folder(cli):
    """F37, with separate commands."""
    processes = [cli.start(*TINY, f"seed={seed}") for seed in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
    folders = list((cli.folder / "outputs" / "tiny").iterdir())
    assert len(folders) == 2 and sorted(rows_of(cli).seed) == [0, 1]
    for folder in folders:
        row = json.loads((folder / "row.jsonl").read_text())
        recipe = json.loads((folder / "checkpoint" / "wide_config.json").read_text())["recipe"]
        assert row["seed"] == json.loads((folder / "config.json").read_text())["seed"] == recipe["seed"]


def test_dense_runs_through_the_same_pipeline(cli):
    assert cli(*TINY, "method=dense", "logger=csv", "hydra.run.dir=here", "results_file=mine.jsonl").returncode == 0
    (row,) = read_rows(cli.folder / "mine.jsonl").to_dict("records")
    assert (cli.folder / "here" / "csv" / "metrics.csv").stat().st_size and not (
        cli.folder / "outputs" / "tiny"
    ).exists()
    assert row["routed_perplexity"] == pytest.approx(row["dense_perplexity"], rel=1e-6)
    assert row["sparsity_total"] == 0


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "run.log")
