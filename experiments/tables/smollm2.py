"""The grid measured here on SmolLM2-135M: methods by sparsity, groups, stage, and what was held equal."""

import pandas as pd

from experiments.tables.cells import Cell, Column, Table, figure
from experiments.tables.paper import STAGES
from experiments.tables.rows import Spec, presets, select

MODEL = "smollm2"
PERCENTS = (25, 50, 70)
GROUPS = (3, 128)
"""Heads and channels per group that every method is asked for; other sizes appear where there is a row."""
ALWAYS = ("wide", "paper")
STEPS = 300
SEARCH = "search_"
"""Name of experiments that only look for a recipe (`experiments.tables.search`)."""
MATCHED = {"mean": "decisions", "cost": "parameters", "equal": "each kind"}
COLUMNS = [
    Column("perplexity", "routed_perplexity"),
    Column("other text", "other_routed_perplexity"),
    Column("accuracy %", "accuracy_mean", scale=100, digits=1),
    Column("kept %", "accuracy_retention", scale=100, digits=1),
    Column("generation %", "generation_mean", scale=100, digits=1),
    Column("decisions skipped %", "sparsity_total", scale=100, digits=1),
    Column("attention %", "sparsity_attention", scale=100, digits=1),
    Column("FFN %", "sparsity_ffn", scale=100, digits=1),
    Column("parameters skipped %", "skipped_params", scale=100, digits=1),
    Column("weight bytes skipped %", "skipped_bytes", scale=100, digits=1),
    Column("keys and values skipped %", "skipped_kv", scale=100, digits=1),
]
DENSE = {
    "routed_perplexity": "dense_perplexity",
    "other_routed_perplexity": "other_dense_perplexity",
    "accuracy_mean": "dense_accuracy_mean",
    "generation_mean": "dense_generation_mean",
}
HEADS = ["method", "heads / channels", "matched by", "stage", "seeds"]
NOTE = (
    "SmolLM2-135M-Instruct. Token perplexity on all held-out State of the Union blocks and on a text of another kind; "
    "accuracy and generation on the packaged tasks (chance: 25% and 0); kept: share of the dense accuracy. Matched by "
    "decisions: the asked share of (token, layer, group) decisions; by parameters: of the prunable parameters. ± is "
    "the standard deviation over seeds. `missing`: no row; `failed`: only failed runs."
)


def build(rows: pd.DataFrame) -> list[Table]:
    rows = rows[(rows["model"] == MODEL) & (rows["action"] == "pipeline")]
    rows = rows[~rows["experiment"].astype(str).str.startswith(SEARCH)]
    changes = [_with_steps(row) for row in rows.to_dict("records")]
    rows = rows.assign(changes=pd.Series(changes, index=rows.index, dtype=str))
    return [_table(rows, percent) for percent in PERCENTS]


def _with_steps(row: dict) -> str:
    """What departs from the recipe, the number of steps among it."""
    steps = ((row.get("config") or {}).get("stage") or {}).get("steps", STEPS)
    return ", ".join(filter(None, [row["changes"], "" if steps == STEPS else f"{steps} steps"]))


def _table(rows: pd.DataFrame, percent: int) -> Table:
    table = Table(f"smollm2_{percent}", f"SmolLM2-135M at {percent}%", NOTE, HEADS, COLUMNS)
    table.add(("dense", "", "", "", ""), [_dense(rows, column) for column in COLUMNS])
    absent = [stem for stem in _recipes() if stem not in set(rows["recipe"])]
    if absent:
        table.note += f" Recipes without any row yet: {', '.join(absent)}."
    for method, recipe, changes, groups in _settings(rows, percent):
        for stage, stage_name in STAGES.items():
            for matched, matched_name in MATCHED.items():
                spec = Spec(MODEL, method, percent, recipe, groups[0], groups[1], matched, stage)
                found = select(rows[rows["changes"] == changes], spec)
                required = matched != "equal" and not changes
                if len(found) or required:
                    name = recipe + (f" ({changes})" if changes else "")
                    size = " / ".join(str(part) for part in groups) if groups[0] else ""
                    seeds = str(found.loc[found["status"] == "finished", "seed"].nunique())
                    row = [figure(found, column) for column in COLUMNS]
                    table.add((name, size, matched_name, stage_name, seeds), row)
    return table


def _settings(rows: pd.DataFrame, percent: int) -> list[tuple]:
    """(method, recipe, changes, groups): WIDE's two recipes and every other with a row as published at any sparsity,
    then whatever else there are rows for at this one.
    """
    required = [
        (preset["name"], stem, "", GROUPS if "attn_group_size" in preset else (None, None))
        for stem, preset in _recipes().items()
        if stem in ALWAYS or stem in set(rows.loc[rows["changes"] == "", "recipe"])
    ]
    others = rows[(rows["percent"] == percent) & (rows["method"] != "dense")]
    found = [
        (row["method"], row["recipe"], row["changes"], tuple(_whole(row[key]) for key in ("attn_group", "ffn_group")))
        for row in others.to_dict("records")
    ]
    return list(dict.fromkeys([*required, *sorted(found, key=str)]))


def _recipes() -> dict[str, dict]:
    return {stem: preset for stem, preset in presets().items() if preset["name"] != "dense"}


def _whole(value: float | None) -> int | None:
    return None if value is None or pd.isna(value) else int(value)


def _dense(rows: pd.DataFrame, column: Column) -> Cell:
    """The dense model over the same text, from the last run that measured it."""
    metric = DENSE.get(column.metric)
    if metric is None:
        return Cell(text="", status="none")
    auto = rows[
        (rows["status"] == "finished") & (rows["stage"] == "calibrate") & ~rows["changes"].str.contains("float32")
    ]
    measured = auto[auto[metric].notna()] if metric in auto else auto[:0]
    return figure(measured[-1:], Column(column.name, metric, column.scale, column.digits))
