"""The learned layout: skipped share of each kind by layer, beside the layers that the paper names (G=128, LoRA)."""

import pandas as pd

from experiments.tables.cells import Cell, Column, Table, figure
from experiments.tables.paper import NOTE, cells, with_paper_metrics
from experiments.tables.published import published
from experiments.tables.rows import Spec, paper_recipe, select

PAPER = Spec("llama8b", "wide", 50, attn_group=4, ffn_group=128, stage="lora")
TOTALS = [
    Column("total %", "percent_sparsity_total", digits=1),
    Column("attention %", "percent_sparsity_attention", digits=1),
    Column("FFN %", "percent_sparsity_ffn", digits=1),
]
KINDS = [Column("attention %", "attention", digits=1), Column("FFN %", "ffn", digits=1)]


def build(rows: pd.DataFrame) -> list[Table]:
    rows = with_paper_metrics(rows)
    totals = Table("layout", "Learned layout, Llama-3.1-8B at 50%, G=128, LoRA", NOTE, ["layers"], TOTALS)
    totals.add(("all",), cells(rows, PAPER, TOTALS))
    note = f"{NOTE} Layers are numbered from 1."
    layers = Table("layout_layers", "Learned layout by layer, Llama-3.1-8B at 50%, G=128, LoRA", note, ["layer"], KINDS)
    found = select(rows, PAPER.where(recipe=paper_recipe("wide")))
    for layer in range(1, 33):
        layers.add((str(layer),), [layer_cell(found, column, layer) for column in KINDS])
    return [totals, layers]


def layer_cell(found: pd.DataFrame, column: Column, layer: int) -> Cell:
    """Skipped share of one kind in one layer, from the rows' `layout`."""
    metric = f"layout_{column.metric}_{layer}"
    layouts = found["layout"] if "layout" in found else pd.Series([None] * len(found), index=found.index)
    kept = [x[column.metric] if isinstance(x, dict) else [] for x in layouts]
    values = [100 * shares[layer - 1] if layer <= len(shares) else None for shares in kept]
    return figure(found.assign(**{metric: values}), Column(column.name, metric), published(PAPER, metric))
