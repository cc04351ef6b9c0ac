"""Trackers: which mode is chosen, what an offline run holds when read back, how a failed run ends."""

from pathlib import Path

import pytest
from wandb_file import OfflineRun

from wide.loggers import build_logger, finish, wandb_mode
from wide.options import LoggerConfig

CONFIG = {"experiment_name": "e", "method": {"name": "wide", "sparsity": 0.25}, "model": {"name": "tiny"}, "seed": 3}


def offline(folder: Path, stage: str = "calibrate"):
    return build_logger(LoggerConfig(name="wandb", mode="offline", tags=["extra"]), CONFIG, folder, stage)


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_auto_is_offline_without_an_account(no_account):
    assert wandb_mode("auto") == "offline"


def test_auto_is_online_with_a_key_or_a_login(no_account, monkeypatch):
    netrc = no_account / ".netrc"
    netrc.write_text("machine other.example login user password x\n")
    netrc.chmod(0o600)
    assert wandb_mode("auto") == "offline"
    netrc.write_text("machine api.wandb.ai login user password x\n")
    assert wandb_mode("auto") == "online"
    netrc.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb_mode("auto") == "online"


def test_a_mode_asked_for_wins_over_the_environment(no_account, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("auto") == "disabled"
    assert wandb_mode("offline") == "offline"


def test_none_has_no_tracker_and_finishes(tmp_path):
    logger = build_logger(LoggerConfig(name="none"), CONFIG, tmp_path, "calibrate")
    assert logger is None
    finish(logger, 0)
    assert not list(tmp_path.iterdir())


def test_csv_keeps_every_point_under_the_run_folder(tmp_path):
    logger = build_logger(LoggerConfig(name="csv"), CONFIG, tmp_path, "calibrate")
    for step in range(3):
        logger.log_metrics({"calibrate/loss": 1.0 + step}, step=step)
    finish(logger, 0)
    lines = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()
    assert lines == ["calibrate/loss,step", "1.0,0", "2.0,1", "3.0,2"]


def test_f43_offline_run_keeps_points_whose_step_goes_back(tmp_path):
    """F43: a run that resumes from step 17 after step 25 was logged, then a second stage from step 0."""
    logger = offline(tmp_path / "first")
    steps = [*range(20, 26), *range(17, 26)]
    for step in steps:
        logger.log_metrics({"calibrate/loss": 0.1 * step}, step=step)
        logger.log_metrics({"calibrate/learning_rate": 1e-3}, step=step)
    finish(logger, 0)
    second = offline(tmp_path / "second", stage="lora")
    second.log_metrics({"lora/loss": 2.0}, step=0)
    finish(second, 0)
    run = OfflineRun(tmp_path / "first")
    points = [(row["calibrate/step"], row["calibrate/loss"]) for row in run.history if "calibrate/loss" in row]
    assert points == [(step, pytest.approx(0.1 * step)) for step in steps]
    assert run.step_axes["calibrate/*"] == "calibrate/step"
    other = OfflineRun(tmp_path / "second")
    assert [row["lora/step"] for row in other.history] == [0]
    assert other.step_axes["lora/*"] == "lora/step"


def test_offline_run_holds_config_group_and_job_type(tmp_path):
    finish(offline(tmp_path), 0)
    run = OfflineRun(tmp_path)
    assert {key: run.config[key] for key in CONFIG} == CONFIG
    assert (run.run.run_group, run.run.job_type, run.run.display_name) == ("e", "calibrate", "e-calibrate")
    assert set(run.run.tags) == {"wide", "tiny", "extra"}
    assert run.exit_code == 0


def test_a_failed_run_is_marked_and_the_next_one_is_a_run_of_its_own(tmp_path):
    first = offline(tmp_path / "a")
    finish(first, 1)
    second = offline(tmp_path / "b")
    finish(second, 0)
    a, b = OfflineRun(tmp_path / "a"), OfflineRun(tmp_path / "b")
    assert (a.exit_code, b.exit_code) == (1, 0)
    assert a.run.run_id != b.run.run_id


def test_without_a_network_auto_goes_on_offline(no_account, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    import wandb

    original = wandb.init

    def unreachable(mode, **arguments):
        if mode == "online":
            raise wandb.errors.CommError("connection refused")
        return original(mode=mode, **arguments)

    monkeypatch.setattr(wandb, "init", unreachable)
    options = LoggerConfig(name="wandb", mode="auto")
    finish(build_logger(options, CONFIG, no_account / "run", "calibrate"), 0)
    assert OfflineRun(no_account / "run").exit_code == 0
    assert "kept offline (connection refused)" in capsys.readouterr().out
    with pytest.raises(wandb.errors.CommError):
        build_logger(LoggerConfig(name="wandb", mode="online"), CONFIG, no_account / "other", "calibrate")
