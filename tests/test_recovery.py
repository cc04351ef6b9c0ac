"""Both stages in one run: two rows, two checkpoints, and where a killed run goes on."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_cli import composed, rows_of
from training import tiny_run_config

from experiments.job import parts, prepare
from wide.checkpoint import from_pretrained, read_config
from wide.options import RecoveryConfig, StageConfig


def two_stage_config(folder: Path, resume: str | None = None):
    config = tiny_run_config(folder, {"steps": 3})
    return replace(config, recovery=RecoveryConfig(name="lora", steps=2, lora_rank=4), resume=resume)


def test_one_run_of_both_stages_leaves_two_rows_and_two_checkpoints(cli):
    process = cli("+experiment=tiny", "stage.steps=2", "recovery=lora", "recovery.steps=2", "recovery.batch_size=2")
    assert process.returncode == 0, process.stderr
    rows = rows_of(cli).to_dict("records")
    assert [row["config"]["stage"]["name"] for row in rows] == ["calibrate", "lora"]
    (folder,) = (cli.folder / "outputs" / "tiny").iterdir()
    assert (folder / "lora" / "row.jsonl").exists()
    stage_1, stage_2 = (read_config(path / "checkpoint") for path in (folder, folder / "lora"))
    assert stage_2["base"]["fingerprint"] == stage_1["base"]["fingerprint"]
    assert hasattr(from_pretrained(folder / "lora" / "checkpoint").model, "peft_config")


def test_the_second_part_starts_from_the_first(tmp_path):
    first, second = parts(two_stage_config(tmp_path))
    assert (first.stage.name, first.recovery.name, first.output_dir) == ("calibrate", "none", str(tmp_path))
    assert second.stage == StageConfig(name="lora", steps=2, lora_rank=4, from_checkpoint=str(tmp_path))
    assert (second.output_dir, second.resume) == (f"{tmp_path}/lora", None)


@pytest.mark.parametrize(
    ("left", "stages", "resume"),
    [
        (["checkpoints"], ["calibrate", "lora"], "killed"),
        (["checkpoints", "checkpoint"], ["lora"], None),
        (["checkpoints", "checkpoint", "lora/checkpoints"], ["lora"], "killed/lora"),
    ],
    ids=["in stage 1", "between the stages", "in stage 2"],
)
def test_a_resumed_run_goes_on_where_it_was(tmp_path, left, stages, resume):
    killed = tmp_path / "killed"
    for name in left:
        (killed / name).mkdir(parents=True)
    todo = parts(two_stage_config(tmp_path / "new", resume=str(killed)))
    assert [part.stage.name for part in todo] == stages
    assert todo[0].resume == (None if resume is None else str(tmp_path / resume))
    assert todo[-1].stage.from_checkpoint == str(tmp_path / "new" if stages[0] == "calibrate" else killed)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stage=lora"], "recovery=lora follows action=pipeline with stage=calibrate"),
        (["recovery.from_checkpoint=here"], "recovery.from_checkpoint must stay null"),
        (["recovery.name=calibrate"], "recovery.name='calibrate' is unknown; legal: none, lora"),
    ],
)
def test_recovery_that_cannot_work_is_refused(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        prepare(composed("recovery=lora", *overrides), sweep=False, run_dir=tmp_path)
