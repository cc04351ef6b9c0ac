"""The SmolLM2 grid: its plan, and two of its jobs as processes on a tiny model, down to the cells of the table."""

from collections import Counter

import pytest
from test_conf import EXPERIMENTS
from transformers import LlamaConfig, LlamaForCausalLM

from experiments import grid
from experiments.grid_jobs import all_jobs
from experiments.tables.rows import load
from experiments.tables.smollm2 import build
from wide.base_model import tiny_tokenizer
from wide.results import read_rows

SMALL = [
    *("model=local", "model.path=base", "model.name=smollm2", "model.max_length=256", "trainer=cpu"),
    *("data.block_size=32", "data.max_train_blocks=16", "data.max_eval_blocks=4"),
    *("eval.blocks=2", "eval.batch_size=4", "eval.limit=1", "stage.batch_size=2", "stage.dial_blocks=1"),
]


def test_plan_names_every_job_once_and_what_matters_first():
    jobs = all_jobs()
    assert not [name for name, count in Counter(job.name for job in jobs).items() if count > 1]
    asked = {job.overrides[0].removeprefix("+experiment=") for job in jobs}
    rivals = {name for name in EXPERIMENTS if name.startswith("rivals_smollm2")}
    assert asked == rivals | {name for name in EXPERIMENTS if name.startswith("smollm2_s")}
    rivals_once = [job.steps for job in jobs if job.group == "rivals" and "seed=17" in job.overrides]
    trained = [steps > 0 for steps in rivals_once]
    assert trained == sorted(trained, reverse=True), "what needs the card for long goes first"
    assert [job.group for job in jobs if job.group in ("grid", "search")][-1] == "search"


def test_a_row_counts_as_the_job_only_where_it_measured_the_same():
    config = {"method": {"name": "flap", "sparsity": 0.5}, "stage": {"name": "calibrate"}, "seed": 1, "eval": {}}
    config["eval"] = {"tasks": ["a"], "at_cost": [0.5], "blocks": None}
    key = grid.row_key(config)
    assert grid.row_key(config | {"output_dir": "elsewhere", "trainer": {"compile": True}}) == key
    different = ({"seed": 2}, {"eval": config["eval"] | {"tasks": []}}, {"eval": config["eval"] | {"at_cost": [0.4]}})
    assert all(grid.row_key(config | change) != key for change in different)
    assert grid.row_key(config | {"method": {"name": "flap", "sparsity": 0.25}}) != key


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Two layers with SmolLM2's heads, and the working directory."""
    options = {"hidden_size": 36, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 199}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}
    LlamaForCausalLM(LlamaConfig(**options, **heads)).save_pretrained(tmp_path / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)


def test_jobs_leave_rows_are_not_run_twice_and_fill_the_table(base, capsys):
    """Shortened LLaMA keeps the first four layers and the last two, which two layers cannot."""
    arguments = ["--match", "rivals_smollm2_[fs]*[pr]_s50-17", "--jobs", "2", "--done", "nothing", "--only", "rivals"]
    assert grid.main([*arguments, *SMALL]) == 1
    shown = capsys.readouterr().out
    assert "finished: 1" in shown and "failed: 1 (rivals_smollm2_shortened_taylor_s50-17)" in shown
    rows = read_rows("outputs/grid.jsonl")
    assert sorted(rows["status"]) == ["failed", "finished"]
    found = {row["experiment"]: row for row in rows.to_dict("records")}
    measured = found["rivals_smollm2_flap_s50"]
    assert "+experiment=rivals_smollm2_flap_s50 eval=grid seed=17" in measured["command"]
    assert measured["kv"] == "removed" and "task_sotu_cloze" in measured and "other_routed_perplexity" in measured

    table = next(table for table in build(load("outputs/grid.jsonl")) if table.name == "smollm2_50")
    cells = dict(zip(table.labels, table.cells, strict=True))
    by_decisions = cells["flap", "3 / 128", "decisions", "calibration", "1"][0]
    assert by_decisions.value == pytest.approx(measured["routed_perplexity"])
    assert by_decisions.commands == (measured["command"],)
    assert cells["shortened_taylor", "", "decisions", "calibration", "0"][0].status == "failed"
    assert cells["paper", "3 / 128", "decisions", "LoRA", "0"][0].status == "missing"

    one = ["--match", "rivals_smollm2_flap_s50-17", "--only", "rivals", "--done", "nothing"]
    assert grid.main([*one, *SMALL]) == 0
    assert "there: 1" in capsys.readouterr().out
    assert grid.main([*one, "--minutes", "0.1", *SMALL, "method.blocks=4"]) == 0
    assert "no time: 1" in capsys.readouterr().out
    assert len(read_rows("outputs/grid.jsonl")) == 2


def test_unknown_group_is_refused():
    with pytest.raises(SystemExit, match="--only rival is unknown; legal: granularity, grid"):
        grid.main(["--only", "rival"])
