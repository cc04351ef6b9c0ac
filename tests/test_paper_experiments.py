"""Every experiment of the paper, end to end on a tiny random model: both stages, the tasks, two rows, its table cells.

Only sizes are overridden: the model's name, groups, recipe and options stay the experiment's own. The tasks of
`eval=paper` are stood in for by packaged items under their names, so that nothing is downloaded. Pictures are laid out
and not rendered.
"""

import shutil
from pathlib import Path

import pytest
from conftest import ROOT
from hydra import compose, initialize_config_dir
from test_conf import EXPERIMENTS

from experiments import job
from experiments.tables.__main__ import build_all
from experiments.tables.cells import records
from experiments.tables.rows import load
from wide import base_model, families
from wide.config import register_schemas
from wide.evaluation import accuracy

PAPER = [name for name in EXPERIMENTS if name.startswith(("llama8b", "llama3b", "qwen3"))]
HEADS = {"llama8b": (32, 8), "llama3b": (24, 8), "qwen3_0_6b": (16, 8), "qwen3_1_7b": (16, 8)}
HEADS |= {"qwen3_4b": (32, 8), "qwen3_8b": (32, 8), "qwen3_14b": (40, 8)}
SMALL = [
    *("model.source=tiny", "model.dtype=float32", "model.max_length=256", "trainer=cpu", "logger=none"),
    *("data=sotu", "data.block_size=32", "data.max_train_blocks=16", "data.max_eval_blocks=4", "recovery=lora_paper"),
    *("eval.limit=1", "eval.blocks=2", "eval.new_tokens=2", "eval.batch_size=4"),
    *(f"{part}.{key}" for part in ("stage", "recovery") for key in ("steps=2", "batch_size=2", "dial_blocks=1")),
    *(f"{part}.{key}" for part in ("stage", "recovery") for key in ("val_every=0", "save_every=0", "dial_curve=false")),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One folder for all: the token cache, and stand-ins for the paper's tasks."""
    folder = tmp_path_factory.mktemp("paper")
    tasks = folder / "tasks"
    shutil.copytree(accuracy.TASKS, tasks)
    for items in tasks.glob("*.jsonl"):  # one is asked for; the harness reads them all
        items.write_text(min(items.read_text().splitlines(), key=len) + "\n")
    for name, metric in accuracy.METRICS.items():
        if not name.startswith("sotu") and metric.startswith(("acc", "word_perplexity")):
            stands_in = "sotu_words" if metric.startswith("word") else "sotu_continuation"
            text = (tasks / f"{stands_in}.yaml").read_text()
            (tasks / f"{name}.yaml").write_text(text.replace(f"task: {stands_in}", f"task: {name}"))
    return folder


@pytest.fixture
def tiny(place, monkeypatch):
    """Models of the experiment's family and head counts, 4 wide heads and 1,024 channels, so that its groups fit."""

    def config(family: str):
        model, _, type_name = family.partition(":")
        found = families.tiny_config(type_name)
        found.hidden_size, found.head_dim, found.intermediate_size = 32, 4, 1024
        found.num_attention_heads, found.num_key_value_heads = HEADS[model]
        return found

    monkeypatch.setattr(base_model, "tiny_config", config)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # lists all packages, in a second
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, **options: Path(path).write_bytes(b""))
    monkeypatch.setattr(accuracy, "TASKS", place / "tasks")
    monkeypatch.chdir(place)


@pytest.mark.parametrize("name", PAPER)
def test_experiment_runs_to_its_table_cells(name, place, tiny):
    register_schemas()
    model = max((model for model in HEADS if name.startswith(model)), key=len)
    family = "qwen3" if model.startswith("qwen3") else "llama"
    rows_file = place / f"{name}.jsonl"
    overrides = [f"+experiment={name}", f"model.family='{model}:{family}'", f"results_file={rows_file}", *SMALL]
    run_dir = place / name
    run_dir.mkdir()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        node = compose("config", overrides=overrides)
    config, action = job.prepare(node, sweep=False, run_dir=run_dir)
    job.execute(config, action, run_dir)

    rows = load(rows_file)
    assert list(dict.fromkeys(rows["stage"])) == ["calibrate", "lora"] and set(rows["status"]) == {"finished"}
    assert rows["run"].nunique() == 2  # a run that skips as much by decisions as by parameters is listed twice
    assert set(rows["recipe"]) == {"paper"} and set(rows["model"]) == {model}
    cells = [record for table in build_all(rows) for record in records(table)]
    for run in rows["run"]:
        filled = [cell for cell in cells if run in cell["run_ids"].split("; ") and cell["ours"] is not None]
        assert [cell for cell in filled if "Dense" not in cell["row"]], f"{run} fills no cell"
    assert (run_dir / "report.html").is_file() and (run_dir / "lora" / "harness_routed.json").is_file()


def test_every_experiment_is_of_the_paper_or_of_here():
    ours = ("smollm2", "ablation", "latency", "throughput", "rival", "tiny")
    assert [name for name in EXPERIMENTS if name not in PAPER and not name.startswith(ours)] == []
