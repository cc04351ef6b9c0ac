"""The ablation table: hand-made rows against cuts computed by hand, the control among them."""

import math

import pytest
from conftest import ROOT
from test_conf import hydra_conf  # noqa: F401
from test_tables import cell, write_rows

from experiments.tables.ablation import build
from experiments.tables.cells import Cell
from experiments.tables.rows import load

DENSE = 20.0


def measured(perplexity: float) -> dict:
    gap = {"log_perplexity_gap": math.log(perplexity / DENSE), "routed_perplexity": perplexity}
    figures = gap | {f"other_{key}": 2 * value for key, value in gap.items()}
    at = [{"price": "mean", "asked": 0.5}, {"price": "cost", "asked": 0.43}]
    return {**figures, "other_settings": [place | figures for place in at]}


def found(folder, recipe: str, column: str, *runs: tuple) -> Cell:
    tables = build(load(write_rows(folder, *runs)))
    labels = next(labels for labels in tables[0].labels if labels[0] == recipe)
    return cell(tables, "ablation", labels, f"{column}, held out, 43% of parameters")


def test_cut_and_control_cut_over_seeds(tmp_path):
    runs = [(["+experiment=ablation_paper", f"seed={s}"], measured(p)) for s, p in ((1, 80.0), (2, 70.0))]
    runs += [(["+experiment=ablation_wide"], measured(40.0)), (["+experiment=ablation_norm"], measured(90.0))]
    runs += [(["+experiment=ablation_dense_bias"], measured(16.0) | {"other_settings": []})]
    gap = (math.log(4) + math.log(3.5)) / 2
    assert found(tmp_path / "a", "paper", "gap", *runs).value == pytest.approx(gap)
    cut = found(tmp_path / "b", "wide", "cut %", *runs)
    assert cut.value == pytest.approx(100 * (1 - math.log(2) / gap)) and len(cut.commands) == 3
    control = found(tmp_path / "c", "wide", "control cut %", *runs)
    assert control.value == pytest.approx(100 * (1 - math.log(40 / 16) / gap))
    assert found(tmp_path / "d", "norm", "cut %", *runs).value < 0
    assert found(tmp_path / "e", "norm", "control cut %", *runs).text == ""


def test_what_is_missing_or_failed_says_so(tmp_path):
    runs = [(["+experiment=ablation_wide"], measured(40.0)), (["+experiment=ablation_silu"], None)]
    assert found(tmp_path / "a", "wide", "cut %", *runs).status == "missing"
    assert found(tmp_path / "b", "wide", "perplexity", *runs).value == 40.0
    assert found(tmp_path / "c", "silu", "perplexity", *runs).status == "failed"
    assert found(tmp_path / "d", "norm", "perplexity", *runs).status == "missing"


def test_every_ablation_experiment_has_its_row(tmp_path):
    (table, _) = build(load(write_rows(tmp_path, (["+experiment=ablation_paper"], measured(40.0)))))
    names = {path.stem for path in (ROOT / "conf" / "experiment").glob("ablation_*.yaml")}
    assert {f"ablation_{labels[0]}" for labels in table.labels} == names
    assert all(labels[1] for labels in table.labels)
