"""Average accuracy over the sparsity, Llama-3.2-3B; all but 50% was read off the paper's plot."""

from typing import Any

import pandas as pd

from experiments.tables.cells import Column, Table
from experiments.tables.paper import AVERAGE, NAMES, NOTE, STAGES, cells, with_paper_metrics
from experiments.tables.rows import Spec

PERCENTS = (10, 20, 30, 40, 50, 60, 70)
COLUMNS = [Column(f"{percent}%", AVERAGE.metric, digits=1) for percent in PERCENTS]


def build(rows: pd.DataFrame) -> list[Table]:
    rows = with_paper_metrics(rows)
    table = Table("sparsity_sweep", "Sparsity sweep, Llama-3.2-3B", NOTE, ["method", "stage"], COLUMNS)
    for method in ("wide", "skipgpt", "ddp"):
        groups: dict[str, Any] = {"attn_group": 3, "ffn_group": 32} if method == "wide" else {}
        for stage, stage_name in STAGES.items():
            specs = [Spec("llama3b", method, percent, stage=stage, **groups) for percent in PERCENTS]
            table.add((NAMES[method], stage_name), [cells(rows, spec, [AVERAGE])[0] for spec in specs])
    return [table]
