"""The seven tasks one by one, for every row of the main results."""

import pandas as pd

from experiments.tables.cells import Table
from experiments.tables.main_results import SETTINGS, methods
from experiments.tables.paper import MODELS, NOTE, STAGES, TASK_COLUMNS, cells, with_paper_metrics


def build(rows: pd.DataFrame) -> list[Table]:
    rows = with_paper_metrics(rows)
    table = Table("per_task", "Accuracy by task", NOTE, ["model", "sparsity", "stage", "method"], TASK_COLUMNS)
    for model, percent in SETTINGS:
        for stage, stage_name in STAGES.items():
            for name, spec in methods(model, percent):
                row = cells(rows, spec.where(stage=stage), TASK_COLUMNS)
                table.add((MODELS[model], f"{percent}%", stage_name, name), row)
    return [table]
