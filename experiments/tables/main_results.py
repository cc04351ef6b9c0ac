"""Table 1 of the paper: word perplexity and average accuracy of every method."""

import pandas as pd

from experiments.tables.cells import Column, Table
from experiments.tables.paper import (
    ATTN_GROUP,
    AVERAGE,
    MODELS,
    NAMES,
    NOTE,
    PERPLEXITY,
    STAGES,
    cells,
    with_paper_metrics,
)
from experiments.tables.published import published
from experiments.tables.rows import Spec, paper_recipe

SETTINGS = (("llama8b", 25), ("llama8b", 50), ("llama3b", 25), ("llama3b", 50))
FFN_GROUPS = (32, 64, 128)
FIGURES = (PERPLEXITY, AVERAGE)
COLUMNS = [Column(f"{column.name}, {name}", column.metric) for name in STAGES.values() for column in FIGURES]


def build(rows: pd.DataFrame) -> list[Table]:
    rows = with_paper_metrics(rows)
    table = Table("main_results", "Main results", NOTE, ["model", "sparsity", "method"], COLUMNS)
    for model, percent in SETTINGS:
        for name, spec in methods(model, percent):
            row = [cell for stage in STAGES for cell in cells(rows, spec.where(stage=stage), [PERPLEXITY, AVERAGE])]
            table.add((MODELS[model], f"{percent}%", name), row)
    return [table]


def methods(model: str, percent: int) -> list[tuple[str, Spec]]:
    """Every method of the paper with its label, WIDE at each FFN group size; without those that neither the paper nor
    this project has there.
    """
    found = []
    for method, name in NAMES.items():
        spec = Spec(model, method, 0 if method == "dense" else percent)
        if method == "wide":
            sizes = [spec.where(attn_group=ATTN_GROUP[model], ffn_group=size) for size in FFN_GROUPS]
            found += [(f"{name} G={size.ffn_group}", size) for size in sizes]
        elif paper_recipe(method) or published(spec, PERPLEXITY.metric):
            found.append((name, spec))
    return found
