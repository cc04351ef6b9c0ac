"""One budget for both kinds, or the same forced on attention and FFN, and what is skipped. Llama-3.1-8B, 50%."""

import pandas as pd

from experiments.tables.cells import Column, Table
from experiments.tables.paper import AVERAGE, NAMES, NOTE, PERPLEXITY, STAGES, cells, with_paper_metrics
from experiments.tables.rows import Spec

COLUMNS = [
    Column("attention %", "percent_sparsity_attention", digits=1),
    Column("FFN %", "percent_sparsity_ffn", digits=1),
    Column("prunable parameters %", "percent_skipped_params", digits=1),
    PERPLEXITY,
    AVERAGE,
]
BUDGETS = {"mean": "one", "equal": "equal"}


def build(rows: pd.DataFrame) -> list[Table]:
    rows = with_paper_metrics(rows)
    heads = ["method", "budget", "stage"]
    table = Table("equal_budgets", "Equal budgets, Llama-3.1-8B at 50%", NOTE, heads, COLUMNS)
    specs = [Spec("llama8b", "ddp", 50), Spec("llama8b", "skipgpt", 50)]
    specs += [Spec("llama8b", "wide", 50, attn_group=4, ffn_group=size) for size in (32, 128)]
    for spec in specs:
        for stage, stage_name in STAGES.items():
            for budget, budget_name in BUDGETS.items():
                if spec.method == "ddp" and budget == "equal":
                    continue
                name = NAMES[spec.method] + (f" G={spec.ffn_group}" if spec.ffn_group else "")
                row = cells(rows, spec.where(stage=stage, matched=budget), COLUMNS)
                table.add((name, budget_name, stage_name), row)
    return [table]
