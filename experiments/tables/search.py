"""What was tried for the rivals on SmolLM2: departures from a recipe, one at a time, at 50%; longer calibration."""

import pandas as pd

from experiments.grid_jobs import SEARCH, STEPS
from experiments.tables.cells import Column, Table, figure
from experiments.tables.smollm2 import MODEL
from experiments.tables.smollm2 import SEARCH as PREFIX

PERCENT = 50
COLUMNS = [
    Column("perplexity", "routed_perplexity"),
    Column("other text", "other_routed_perplexity"),
    Column("decisions skipped %", "sparsity_total", scale=100, digits=1),
    Column("parameters skipped %", "skipped_params", scale=100, digits=1),
]
HEADS = ["experiment", "departure", "steps"]
NOTE = (
    "SmolLM2-135M-Instruct at 50%, every setting as deployed by its method. The first row of each is the recipe of its "
    "experiment; WIDE's own search of the same kind is the ablation. `python -m experiments.grid --only search,long`."
)
WAYS = {"": "with the dial", "argmax_": "arg-max", "sampled_": "sampled, as by its authors"}


def build(rows: pd.DataFrame) -> list[Table]:
    rows = rows[(rows["model"] == MODEL) & (rows["action"] == "pipeline") & (rows["stage"] == "calibrate")]
    dialled = rows["dialled"].eq(True) if "dialled" in rows else False
    rows = rows[rows["percent"].eq(PERCENT) & ~pd.Series(dialled, index=rows.index, dtype=bool)]
    steps = [((row.get("config") or {}).get("stage") or {}).get("steps") for row in rows.to_dict("records")]
    rows = rows.assign(steps=pd.Series(steps, index=rows.index, dtype=object))
    return [recipes(rows), skipgpt(rows)]


def recipes(rows: pd.DataFrame) -> Table:
    table = Table("rival_search", "Recipes looked for", NOTE, HEADS, COLUMNS)
    for name, trials in SEARCH.items():
        table.add((name, "", str(STEPS)), _cells(rows, f"rivals_smollm2_{name}_s{PERCENT}", STEPS))
        for number, changes in enumerate(trials):
            table.add((name, ", ".join(changes), str(STEPS)), _cells(rows, f"{PREFIX}{name}_{number}", STEPS))
    for name in ("skipgpt", "skipgpt_matched", "ddp"):
        for steps in (1000, 3000):
            table.add((name, "", f"{steps:,}"), _cells(rows, f"rivals_smollm2_{name}_s{PERCENT}", steps))
    return table


def _cells(rows: pd.DataFrame, experiment: str, steps: int) -> list:
    found = rows[(rows["experiment"] == experiment) & (rows["steps"] == steps)]
    return [figure(found, column) for column in COLUMNS]


def skipgpt(rows: pd.DataFrame) -> Table:
    """The three ways of deciding of every SkipGPT run."""
    columns = [
        Column(f"{label}, {name}", f"{way}{metric}", scale, digits)
        for way, label in WAYS.items()
        for metric, name, scale, digits in (
            ("routed_perplexity", "perplexity", 1.0, 2),
            ("sparsity_total", "skipped %", 100.0, 1),
        )
    ]
    note = "SmolLM2-135M-Instruct, the same routers deciding in three ways, at 50%."
    table = Table("skipgpt_ways", "SkipGPT's three evaluations", note, ["experiment", "steps"], columns)
    for name in ("skipgpt", "skipgpt_matched", "skipgpt_paper"):
        for steps in (STEPS, 1000, 3000):
            found = rows[(rows["experiment"] == f"rivals_smollm2_{name}_s{PERCENT}") & (rows["steps"] == steps)]
            if len(found) or steps == STEPS:
                table.add((name, f"{steps:,}"), [figure(found, column) for column in columns])
    return table
