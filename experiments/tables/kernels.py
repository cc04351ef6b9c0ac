"""Linear kernels on the H200 against the dense library, from `experiments/results/kernels`."""

import json

import pandas as pd

from experiments.tables.cells import Cell, Column, Table
from experiments.tables.rows import ROOT

FILE = ROOT / "experiments" / "results" / "kernels" / "linear_h200.json"
COLUMNS = [
    Column("dense ms", "dense_ms", digits=3),
    Column("ours ms", "ours_ms", digits=3),
    Column("limit ms", "limit_ms", digits=3),
    Column("speedup", "speedup"),
]
HEADS = ["layer", "tokens", "G", "skipped"]


SHOWN_TOKENS = (1, 4096)
NOTE = (
    "Llama-3.1-8B shapes, random masks, cold cache, layout included, checked in the same run. The limit is the kept "
    "work at the card's measured rates; at one token it is taken at a copy rate, which reading alone exceeds."
)


def build(rows: pd.DataFrame) -> list[Table]:
    found = json.loads(FILE.read_text())
    about = found["about"]
    run, command = f"{about['card']}, torch {about['torch']}", f"cd kernels && {about['command']}"
    whole = Table("kernels", "Linear kernels", NOTE, HEADS, COLUMNS)
    short = Table("kernels_short", "Linear kernels, half of the groups skipped", NOTE, HEADS, COLUMNS)
    for row in found["rows"]:
        name = "whole FFN" if row["operator"] == "ffn" else f"{row['site']} ({row['operator']})"
        labels = (name, f"{row['tokens']:,}", str(row["G"]), f"{row['sparsity']:.0%}")
        cells = [Cell(float(row[c.metric]), None, 1, runs=(run,), commands=(command,)) for c in COLUMNS]
        if not row["correct"]:
            cells = [Cell(status="failed", runs=(run,), commands=(command,))] * len(COLUMNS)
        whole.add(labels, cells)
        if row["tokens"] in SHOWN_TOKENS and row["sparsity"] > 0.3:
            short.add(labels, cells)
    return [whole, short]
