"""End-to-end latency of the engine. The paper's speedups are from an RTX 5090: shown beside ours, not judged."""

from typing import Any

import pandas as pd

from experiments.tables.cells import Cell, Column, Table
from experiments.tables.published import published
from experiments.tables.rows import Spec

COLUMNS = [
    Column("ms", "ms", digits=3),
    Column("limit ms", "limit_ms", digits=3),
    Column("over engine dense", "speedup_over_engine_dense"),
    Column("over best dense path", "speedup_over_best_dense"),
    Column("GB", "memory_gb", digits=1),
]
SHORT_COLUMNS = [COLUMNS[0], COLUMNS[1], Column("speedup", "speedup_over_best_dense")]
SHORT_HEADS = ["model", "phase", "batch", "tokens", "path", "skipped", "G"]
HEADS = ["model", "card", "phase", "batch", "tokens", "path", "sparsity", "G", "correct"]
NOTE = (
    "Median of the repeats. The limit is what the card's measured rates allow for the kept work; `correct` says "
    "whether the correctness gate was green in the same run. In brackets the paper's speedup at 16,384 tokens on an "
    "RTX 5090, read off its plot."
)
PAPER_TOKENS = 16384


def build(rows: pd.DataFrame) -> list[Table]:
    table = Table("latency", "Latency, end to end", NOTE, HEADS, COLUMNS)
    short = Table("latency_short", "Latency, end to end, half of the groups skipped", NOTE, SHORT_HEADS, SHORT_COLUMNS)
    timed = rows[rows["action"] == "latency"]
    for run in timed.to_dict("records"):
        if run["status"] == "failed":
            cell = Cell(status="failed", runs=(run["run"],), commands=(run["command"],))
            table.add((str(run["model"]), str(run["device"]), *[""] * 6, "no"), [cell] * len(COLUMNS))
            continue
        for row in run["measurements"]:
            name = labels(row, run)
            table.add(name, [cell_of(row, run, column) for column in COLUMNS])
            if row["sparsity"] in (0.0, 0.5) and row["correct"]:
                short.add((name[0], *name[2:8]), [cell_of(row, run, column) for column in SHORT_COLUMNS])
    for empty in (table, short):
        if not empty.cells:
            empty.add(("llama8b", *[""] * (len(empty.heads) - 1)), [Cell(status="missing")] * len(empty.columns))
    return [table, short]


def labels(row: dict, run: dict) -> tuple[str, ...]:
    masks = f", {row['masks']} masks" if row.get("masks") else ""
    sparsity, group = f"{row['sparsity']:.0%}", row.get("ffn_group_size")
    size = (str(row["batch"]), f"{row['tokens']:,}")
    correct = "yes" if row.get("correct") else "no"
    return (row["model"], run["device"], row["phase"], *size, row["path"] + masks, sparsity, str(group or ""), correct)


def cell_of(row: dict, run: dict, column: Column) -> Cell:
    value, paper = row.get(column.metric), None
    if column.metric == "speedup_over_engine_dense" and row["tokens"] == PAPER_TOKENS and row["batch"] == 1:
        groups: dict[str, Any] = {"attn_group": row.get("attn_group_size"), "ffn_group": row.get("ffn_group_size")}
        spec = Spec(row["model"], "wide", round(100 * row["sparsity"]), stage="random masks", **groups)
        paper = published(spec, f"speedup_{row['phase']}")
    if value is None:
        return Cell(status="none", published=paper)
    return Cell(float(value), None, 1, paper, runs=(run["run"],), commands=(run["command"],))
