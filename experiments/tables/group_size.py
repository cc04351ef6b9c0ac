"""Ablation of the group sizes: FFN channels with GQA-aligned heads, heads with 32 channels. Llama-3.1-8B, 50%."""

import pandas as pd

from experiments.tables.cells import Table
from experiments.tables.main_results import COLUMNS
from experiments.tables.paper import AVERAGE, NOTE, PERPLEXITY, STAGES, cells, with_paper_metrics
from experiments.tables.rows import Spec

GROUPS = [(4, size) for size in (16, 32, 64, 128, 256, 512)] + [(heads, 32) for heads in (1, 2, 8, 16, 32)]


def build(rows: pd.DataFrame) -> list[Table]:
    rows = with_paper_metrics(rows)
    table = Table(
        "group_size", "Group sizes, Llama-3.1-8B at 50%", NOTE, ["heads per group", "channels per group"], COLUMNS
    )
    for heads, channels in GROUPS:
        spec = Spec("llama8b", "wide", 50, attn_group=heads, ffn_group=channels)
        row = [cell for stage in STAGES for cell in cells(rows, spec.where(stage=stage), [PERPLEXITY, AVERAGE])]
        table.add((str(heads), str(channels)), row)
    return [table]
