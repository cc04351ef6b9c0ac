"""Qwen3 of every size: what is kept of log-likelihood and generated tasks. The paper gives 14B at 50% with LoRA."""

import pandas as pd

from experiments.tables.cells import Column, Table
from experiments.tables.paper import NOTE, STAGES, cells, with_paper_metrics
from experiments.tables.rows import Spec

MODELS = {"qwen3_0_6b": 2, "qwen3_1_7b": 2, "qwen3_4b": 4, "qwen3_8b": 4, "qwen3_14b": 5}
"""Query heads over one KV head."""
COLUMNS = [
    Column("word perplexity", "word_perplexity"),
    Column("average", "accuracy_mean"),
    Column("kept of accuracy %", "percent_accuracy_retention", digits=1),
    Column("kept of generation %", "percent_generation_retention", digits=1),
    Column("parameters skipped %", "percent_skipped_params", digits=1),
]


def build(rows: pd.DataFrame) -> list[Table]:
    rows = with_paper_metrics(rows)
    table = Table("qwen3", "Qwen3, G=128", NOTE, ["model", "sparsity", "stage"], COLUMNS)
    for model, heads in MODELS.items():
        for percent in (25, 50):
            for stage, stage_name in STAGES.items():
                spec = Spec(model, "wide", percent, attn_group=heads, ffn_group=128, stage=stage)
                name = model.replace("qwen3_", "Qwen3-").replace("_", ".").upper().replace("QWEN", "Qwen")
                table.add((name, f"{percent}%", stage_name), cells(rows, spec, COLUMNS))
    return [table]
