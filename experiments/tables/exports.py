"""Static methods as smaller transformers checkpoints: size and speed, from `experiments/results/exports`."""

import json
from typing import Any

import pandas as pd

from experiments.tables.cells import Cell, Column, Table
from experiments.tables.rows import ROOT

FOLDER = ROOT / "experiments" / "results" / "exports"
COLUMNS = [
    Column("parameters skipped %", "skipped_params", scale=100, digits=1),
    Column("MB", "megabytes", digits=1),
    Column("stock MB", "stock_megabytes", digits=1),
    Column("prefill ms", "exported_prefill_ms", digits=1),
    Column("prefill speedup", "prefill_speedup"),
    Column("ms per token", "exported_decode_ms", digits=1),
    Column("decode speedup", "decode_speedup"),
]
HEADS = ["experiment", "device", "layers", "KV heads x queries", "channels", "padded layers (attention / FFN)"]
NOTE = (
    "Exported, loaded by transformers alone, equal to the masked model to 1e-5 in float64, then timed in float32 "
    "against the stock model by the same code: prefill of 512 tokens, greedy decoding at batch 1. A padded layer holds "
    "zeros up to the widest layer and is no faster for them."
)


def build(rows: pd.DataFrame) -> list[Table]:
    table = Table("exports", "Static exports of SmolLM2-135M", NOTE, HEADS, COLUMNS)
    lines = [line for path in sorted(FOLDER.glob("*.jsonl")) for line in path.read_text().splitlines()]
    for row in map(json.loads, lines):
        shape, figures = row["shape"], row | row["skipped"]
        size, padded = f"{shape['kv_heads']} x {shape['heads_per_kv']}", shape["padded_layers"]
        labels = (row["experiment"], row["device"], str(shape["layers"]), size, str(shape["channels"]))
        about: dict[str, Any] = {
            "runs": (f"export of {row['experiment']}, {row['device']}",),
            "commands": (f"{row['run_command']}; {row['command']}",),
        }
        cells = [Cell(figures[c.metric] * c.scale, None, 1, **about) for c in COLUMNS]
        table.add((*labels, f"{padded['attention']} / {padded['ffn']}"), cells)
    if not table.cells:
        table.add(("", *[""] * 5), [Cell(status="missing")] * len(COLUMNS))
    return [table]
