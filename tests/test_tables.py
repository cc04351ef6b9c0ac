"""Tables: rows written by hand against the cells they must give; missing, failed, seeds, published values, traces."""

import csv
import shutil

import pandas as pd
import pytest
from conftest import ROOT
from test_conf import hydra_conf, make  # noqa: F401

from experiments.tables.__main__ import build_all, main, renew, write
from experiments.tables.cells import Cell, Column, Table, escape, figure, latex, markdown, records, show
from experiments.tables.published import TASKS, Published, band, published, values
from experiments.tables.rows import DEFAULT_ROWS, Spec, load, recipe_of, select
from wide.results import append_row, base_row, failed, finished

ENVIRONMENT = {"device": "cpu", "versions": {}, "git_revision": None}
ACCURACIES = (0.70, 0.42, 0.71, 0.64, 0.76, 0.43, 0.69)


def metrics(shift: float = 0.0) -> dict:
    figures = {f"task_{task}": value + shift for task, value in zip(TASKS, ACCURACIES, strict=True)}
    figures |= {f"dense_task_{task}": value + 0.1 for task, value in zip(TASKS, ACCURACIES, strict=True)}
    figures |= {"task_wikitext": 14.0 + shift, "dense_task_wikitext": 7.7}
    return figures | {"sparsity_attention": 0.63, "sparsity_ffn": 0.31, "skipped_params": 0.36, "sparsity_total": 0.47}


def write_rows(folder, *runs: tuple) -> str:
    """Each run: (overrides, metrics or None for a failure). The rows are what `experiments.job` would append."""
    path = folder / "rows.jsonl"
    for number, (overrides, measured) in enumerate(runs):
        config = make(*overrides).to_dict()
        row = base_row(config, f"run{number}", "python run.py " + " ".join(overrides), ENVIRONMENT)
        append_row(path, finished(row, measured) if measured else failed(row, RuntimeError("it diverged")))
    return str(path)


def cell(tables: list[Table], name: str, labels: tuple[str, ...], column: str) -> Cell:
    table = next(table for table in tables if table.name == name)
    index = [c.name for c in table.columns].index(column)
    return table.cells[table.labels.index(labels)][index]


def ids(found: Cell) -> list[str]:
    """Run ids behind a cell, without the hashes that make them unique."""
    return [run.split(",")[0] for run in found.runs]


MAIN = ("main_results", ("Llama-3.1-8B", "50%", "WIDE G=32"))


def test_a_row_becomes_its_cell_with_the_published_value_beside_it(tmp_path):
    rows = load(write_rows(tmp_path, (["+experiment=llama8b_s50", "seed=1"], metrics())))
    tables = build_all(rows)
    average = cell(tables, *MAIN, "average, calibration")
    ours = 100 * sum(ACCURACIES) / 7
    assert average.value == pytest.approx(ours) and average.published.value == 61.84
    assert average.difference == pytest.approx(ours - 61.84) and average.verdict == "inside"
    assert average.commands == ("python run.py +experiment=llama8b_s50 seed=1",)
    assert cell(tables, *MAIN, "word perplexity, calibration").value == 14.0
    assert cell(tables, *MAIN, "average, LoRA").status == "missing"
    task = cell(tables, "per_task", ("Llama-3.1-8B", "50%", "calibration", "WIDE G=32"), "arc_easy")
    assert (task.value, task.published.value) == (pytest.approx(70.0), 69.74)
    assert cell(tables, "group_size", ("4", "32"), "average, calibration").value == pytest.approx(ours)
    budget = cell(tables, "equal_budgets", ("WIDE G=32", "one", "calibration"), "prunable parameters %")
    assert (budget.value, budget.published.value) == (pytest.approx(36.0), 35.9)
    dense = cell(tables, "main_results", ("Llama-3.1-8B", "50%", "Dense"), "average, calibration")
    assert dense.value == pytest.approx(ours + 10) and dense.published.value == 71.55 and dense.verdict == "outside"
    others = [c for t in tables if t.name == "main_results" for row in t.cells for c in row if c.value is not None]
    assert len(others) == 6, "the run's two cells, and the dense model's two at each of the two sparsities"


def test_seeds_are_averaged_and_other_recipes_are_not(tmp_path):
    runs = [(["+experiment=llama8b_s50", f"seed={seed}"], metrics(shift)) for seed, shift in ((1, 0.0), (2, 0.02))]
    runs.append((["+experiment=llama8b_s50", "method.router_norm=true"], metrics(0.2)))
    runs.append((["+experiment=llama8b_s50_uniform"], metrics(0.3)))
    tables = build_all(load(write_rows(tmp_path, *runs)))
    average = cell(tables, *MAIN, "average, calibration")
    assert average.num_runs == 2 and average.value == pytest.approx(100 * sum(ACCURACIES) / 7 + 1)
    assert average.spread == pytest.approx(2 / 2**0.5) and ids(average) == ["run0", "run1"]
    uniform = cell(tables, "equal_budgets", ("WIDE G=32", "equal", "calibration"), "average")
    assert ids(uniform) == ["run3"] and uniform.published.value == 57.98


def test_missing_failed_and_repeated_runs(tmp_path):
    key = ["+experiment=llama8b_s50"]
    path = write_rows(tmp_path, (key, None))
    found = cell(build_all(load(path)), *MAIN, "average, calibration")
    assert found.status == "failed" and ids(found) == ["run0"] and show(found, 2) == "failed [61.84]"
    write_rows(tmp_path, (key, metrics()))
    assert cell(build_all(load(path)), *MAIN, "average, calibration").num_runs == 1
    write_rows(tmp_path, (key, metrics(0.01)), (key, None))
    again = cell(build_all(load(path)), *MAIN, "average, calibration")
    assert again.num_runs == 1 and again.value == pytest.approx(100 * sum(ACCURACIES) / 7 + 1), "the last finished one"
    (tmp_path / "rows.jsonl").write_text("")
    gone = cell(build_all(load(path)), *MAIN, "average, calibration")
    assert gone.status == "missing" and show(gone, 2) == "missing [61.84]"


def test_dial_settings_of_a_run_fill_the_cells_matched_by_cost(tmp_path):
    other = {"price": "cost", "asked": 0.5, "routed_perplexity": 44.0, "skipped_params": 0.5}
    measured = metrics() | {"routed_perplexity": 40.0, "dense_perplexity": 26.0, "other_settings": [other]}
    tables = build_all(load(write_rows(tmp_path, (["+experiment=smollm2_s50_paper"], measured))))
    by_mean, by_cost = (
        cell(tables, "smollm2_50", ("paper", "3 / 128", matched, "calibration", "1"), "perplexity")
        for matched in ("decisions", "parameters")
    )
    assert (by_mean.value, by_cost.value) == (40.0, 44.0) and by_mean.runs == by_cost.runs
    attention = cell(tables, "smollm2_50", ("paper", "3 / 128", "parameters", "calibration", "1"), "attention %")
    assert attention.status == "missing", "what the other setting did not measure is not taken from the main one"


def test_equal_shares_are_matched_both_ways(tmp_path):
    equal = metrics() | {"routed_perplexity": 40.0, "sparsity_total": 0.5, "skipped_params": 0.497}
    runs = [(["+experiment=rivals_smollm2_random_s50"], equal)]
    runs.append((["+experiment=rivals_smollm2_flap_s50"], equal | {"skipped_params": 0.43}))
    tables = build_all(load(write_rows(tmp_path, *runs)))
    for name, by_cost in (("random", 40.0), ("flap", None)):
        for matched, expected in (("decisions", 40.0), ("parameters", by_cost)):
            labels = (name, "3 / 128", matched, "calibration", str(int(expected is not None)))
            assert cell(tables, "smollm2_50", labels, "perplexity").value == expected


def test_a_seed_measured_again_is_no_further_sample(tmp_path):
    again = metrics() | {"routed_perplexity": 41.0, "accuracy_mean": 0.5}
    runs = [(["+experiment=smollm2_s50"], metrics() | {"routed_perplexity": 40.0})]
    path = write_rows(tmp_path, *runs, (["+experiment=smollm2_s50", "eval=grid"], again))
    tables = build_all(load(path))
    labels = ("wide", "3 / 128", "parameters", "calibration", "1")
    found = cell(tables, "smollm2_50", labels, "perplexity")
    assert (found.num_runs, found.value, ids(found)) == (1, 41.0, ["run1"])
    assert cell(tables, "smollm2_50", labels, "accuracy %").value == 50.0


def test_searches_and_longer_runs_keep_to_their_own_tables(tmp_path):
    key, ways = (
        "+experiment=rivals_smollm2_skipgpt_s50",
        {"argmax_routed_perplexity": 60.0, "sampled_sparsity_total": 0.4},
    )
    runs = [([key], metrics() | ways | {"routed_perplexity": 50.0})]
    trial = [key, "experiment_name=search_skipgpt_0", "stage.learning_rate=5e-4"]
    runs.append((trial, metrics() | {"routed_perplexity": 49.0}))
    runs.append(([key, "stage.steps=1000"], metrics() | {"routed_perplexity": 48.0}))
    tables = build_all(load(write_rows(tmp_path, *runs)))
    assert cell(tables, "smollm2_50", ("skipgpt", "", "decisions", "calibration", "1"), "perplexity").value == 50.0
    longer = cell(tables, "smollm2_50", ("skipgpt (1000 steps)", "", "decisions", "calibration", "1"), "perplexity")
    assert longer.value == 48.0
    for labels, value in (("", "300"), 50.0), (("stage.learning_rate=5e-4", "300"), 49.0), (("", "1,000"), 48.0):
        assert cell(tables, "rival_search", ("skipgpt", *labels), "perplexity").value == value
    assert cell(tables, "skipgpt_ways", ("skipgpt", "300"), "arg-max, perplexity").value == 60.0
    sampled = cell(tables, "skipgpt_ways", ("skipgpt", "300"), "sampled, as by its authors, skipped %")
    assert sampled.value == pytest.approx(40.0)


def test_recipes_are_told_by_their_options():
    assert recipe_of(vars(make("+experiment=llama8b_s50").method)) == ("paper", [])
    assert recipe_of(vars(make("+experiment=smollm2_s70").method)) == ("wide", [])
    assert recipe_of(vars(make("method=paper", "method.dial=global").method)) == ("paper", ["dial=global"])
    assert recipe_of({"name": "nobody"}) == (None, [])


def test_layout_by_layer(tmp_path):
    layout = {kind: [i / 100 for i in range(32)] for kind in ("attention", "ffn")}
    run = (
        ["+experiment=llama8b_s50_g128", "stage=lora_paper", "stage.from_checkpoint=x"],
        metrics() | {"layout": layout},
    )
    tables = build_all(load(write_rows(tmp_path, run)))
    found = cell(tables, "layout_layers", ("9",), "FFN %")
    assert (found.value, found.published.value) == (pytest.approx(8.0), 63.3)
    assert cell(tables, "layout", ("all",), "total %").value == pytest.approx(47.0)


def test_latency_rows(tmp_path):
    point = {"phase": "prefill", "batch": 1, "tokens": 16384, "model": "llama8b", "correct": True, "limit_ms": None}
    dense = point | {"path": "engine dense", "sparsity": 0.0, "ms": 500.0, "speedup_over_engine_dense": 1.0}
    ours = point | {"path": "engine", "masks": "random", "sparsity": 0.5, "ms": 300.0, "ffn_group_size": 128}
    ours |= {"attn_group_size": 4, "speedup_over_engine_dense": 5 / 3, "speedup_over_best_dense": 1.5}
    measured = {"measurements": [dense, ours]}
    tables = build_all(load(write_rows(tmp_path, (["+experiment=latency_llama8b"], measured))))
    labels = ("llama8b", "cpu", "prefill", "1", "16,384", "engine, random masks", "50%", "128", "yes")
    speedup = cell(tables, "latency", labels, "over engine dense")
    assert (speedup.value, speedup.published.value, speedup.verdict) == (pytest.approx(5 / 3), 1.61, "")
    assert show(cell(tables, "latency", labels, "limit ms"), 3) == "none"


def test_published_values_are_those_of_the_paper():
    spec = Spec("llama8b", "wide", 50, attn_group=4, ffn_group=32)
    assert published(spec, "accuracy_mean").value == 61.84 and published(spec, "word_perplexity").value == 14.15
    assert published(spec.where(stage="lora"), "hellaswag").value == 71.66
    assert published(Spec("llama8b", "dense", 0), "accuracy_mean").value == 71.55
    assert published(Spec("llama3b", "dense", 0), "word_perplexity").value == 9.77
    assert published(Spec("llama3b", "wide", 20, attn_group=3, ffn_group=32), "accuracy_mean").exact == "plot"
    assert published(Spec("llama8b", "ddp", 50), "accuracy_mean").value == 53.04
    assert published(Spec("llama8b", "wide", 33), "accuracy_mean") is None


def test_published_averages_are_the_means_of_the_published_tasks():
    """The paper's own tables agree but for rounding and the rows its appendix states otherwise."""
    known = values()
    apart = []
    for (*key, metric), (value, _) in known.items():
        tasks = [known.get((*key, task)) for task in TASKS]
        if metric == "accuracy_mean" and all(tasks):
            mean = sum(task[0] for task in tasks) / 7
            if abs(mean - value) > 0.011:
                apart.append((key[0], key[1], key[2], key[6]))
    assert set(apart) == {
        ("llama8b", 25, "tyr", "lora"),
        ("llama8b", 50, "tyr", "lora"),
        ("llama8b", 50, "shortened_taylor", "lora"),
    }


def test_bands_and_their_verdict():
    assert band("wide", "accuracy_mean", 61.84, "yes") == 2.0 and band("dense", "accuracy_mean", 71.55, "yes") == 0.5
    assert band("wide", "word_perplexity", 14.0, "yes") == pytest.approx(1.4)
    assert band("wide", "speedup_decode", 1.5, "plot") is None
    inside, outside = (Cell(value, published=Published(60.0, "yes", 2.0)) for value in (61.9, 57.9))
    assert (inside.verdict, outside.verdict) == ("inside", "outside")
    assert show(outside, 1) == "57.9 [60.0, -2.1 outside]"
    assert show(Cell(44.8e6, published=Published(4.85e7, "plot", 4.85e6)), 2) == "44800000 [~48500000, -3700000 inside]"


def example() -> Table:
    table = Table("example", "A & B", "A note.", ["who_is"], [Column("x %", "x"), Column("y", "y")])
    rows = pd.DataFrame({"run": ["a", "b"], "command": ["c 1", "c 2"], "status": "finished", "x": [1.0, 3.0]})
    table.add(("one",), [figure(rows, table.columns[0], Published(2.5, "yes", 1.0)), figure(rows, table.columns[1])])
    return table


def test_markdown_latex_and_records_of_a_table():
    table = example()
    text = markdown(table)
    assert "| one | 2.00 ±1.41 [2.50, -0.50 inside] | missing | 1-2 |" in text
    assert text.endswith("1. `c 1` (a)\n2. `c 2` (b)\n")
    tex = latex(table)
    assert r"\caption{A \& B}" in tex and r"one & 2.00 $\pm$1.41 [2.50, -0.50 inside] & missing \\" in tex
    assert r"who\_is & x \% & y \\" in tex and tex.count("{") == tex.count("}")
    assert escape("a_b~c") == r"a\_b\textasciitilde{}c"
    first, second = records(table)
    assert (first["ours"], first["published"], first["difference"], first["band"]) == (2.0, 2.5, -0.5, 1.0)
    assert (first["run_ids"], first["commands"], second["status"]) == ("a; b", "c 1; c 2", "missing")


def test_readme_is_renewed_between_its_marks_only(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- table: example -->\nold\n<!-- end of table -->\nafter\n")
    renew(path, [example()])
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- end of table -->\nafter\n")
    assert "| one |" in text and "old" not in text
    path.write_text("<!-- table: nothing -->\n<!-- end of table -->")
    with pytest.raises(ValueError, match="no table 'nothing'; legal: example"):
        renew(path, [example()])


def test_the_command_writes_every_table_and_every_cell_names_its_run(tmp_path):
    shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    main(["--out", str(tmp_path / "out"), "--readme", str(tmp_path / "README.md")])
    rows = load(DEFAULT_ROWS)
    names = {table.name for table in build_all(rows)}
    assert {"main_results", "per_task", "group_size", "equal_budgets", "sparsity_sweep", "layout"} <= names
    for name in names:
        assert (tmp_path / "out" / f"{name}.md").stat().st_size and (tmp_path / "out" / f"{name}.tex").stat().st_size
    commands = dict(zip(rows["run"], rows["command"], strict=True))
    with open(tmp_path / "out" / "cells.csv", newline="") as file:
        cells = list(csv.DictReader(file))
    measured = [c for c in cells if c["ours"] and not c["table"].startswith(("kernels", "exports"))]
    assert measured
    for found in measured:
        ids = found["run_ids"].split("; ")
        assert ids and found["commands"] == "; ".join(commands[run] for run in ids)


def test_committed_tables_are_those_of_the_committed_rows(tmp_path):
    write(build_all(load(DEFAULT_ROWS)), tmp_path)
    committed = ROOT / "experiments" / "tables" / "out"
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in committed.iterdir()}
    for path in tmp_path.iterdir():
        assert path.read_text() == (committed / path.name).read_text(), f"{path.name}: run make tables"


def test_rows_of_refused_jobs_do_not_stop_the_tables(tmp_path):
    path = tmp_path / "rows.jsonl"
    for config in ({}, {"method": {"name": "wide", "sparsity": "much"}, "model": {"name": "smollm2"}}):
        append_row(path, failed(base_row(config, "r", "python run.py", ENVIRONMENT), ValueError("no")))
    assert len(build_all(load(path))) > 5


def test_selection_prefers_what_was_trained_for_the_setting():
    common = {"model": "m", "method": "wide", "percent": 50, "recipe": "wide", "attn_group": 3, "ffn_group": 128}
    common |= {"matched": "mean", "stage": "calibrate", "status": "finished", "changes": "", "finished": "2026-01-01"}
    dialled = common | {"variant": "a", "dialled": True, "run": "dialled"}
    trained = common | {"variant": "b", "dialled": False, "run": "trained"}
    found = select(pd.DataFrame([dialled, dialled, trained]), Spec("m", "wide", 50))
    assert list(found["run"]) == ["trained"]
    assert select(pd.DataFrame([dialled, trained]), Spec("m", "wide", 25)).empty
