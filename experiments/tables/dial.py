"""The dial against runs of their own: one checkpoint trained at 50% at every sparsity, and dedicated runs."""

import pandas as pd

from experiments.tables.cells import Column, Table, figure

PERCENTS = (10, 20, 25, 30, 40, 50, 60, 70)
TRAINED = 50
COLUMNS = [
    Column("perplexity, dialled", "routed_perplexity"),
    Column("perplexity, trained there", "routed_perplexity"),
    Column("parameters skipped %, dialled", "skipped_params", scale=100, digits=1),
    Column("parameters skipped %, trained there", "skipped_params", scale=100, digits=1),
]
NOTE = (
    f"SmolLM2-135M-Instruct, the project's recipe, 3 heads and 128 channels a group. Dialled: the checkpoint trained "
    f"at {TRAINED}% of the prunable parameters, its dial fitted on training text to each share; trained there: a run "
    "asked for it. Perplexity and measured share on held-out blocks."
)


def build(rows: pd.DataFrame) -> list[Table]:
    table = Table("dial", "One checkpoint along its dial, SmolLM2-135M", NOTE, ["asked"], COLUMNS)
    for percent in PERCENTS:
        pair = (dialled(rows, percent), dedicated(rows, percent))
        table.add((f"{percent}%",), [figure(pair[index % 2], column) for index, column in enumerate(COLUMNS)])
    return [table]


def dialled(rows: pd.DataFrame, percent: int) -> pd.DataFrame:
    """What runs trained at TRAINED reported with the dial fitted to `percent`."""
    rows = _recipe(rows)
    return rows[(rows["trained_percent"] == TRAINED) & (rows["percent"] == percent) & _is_dialled(rows)]


def dedicated(rows: pd.DataFrame, percent: int) -> pd.DataFrame:
    """Runs that were trained at `percent`."""
    rows = _recipe(rows)
    return rows[(rows["trained_percent"] == percent) & ~_is_dialled(rows)]


def _recipe(rows: pd.DataFrame) -> pd.DataFrame:
    """Stage 1 of the project's recipe as it stands, which prices by parameters; of its variants the one most run."""
    wanted = {
        "model": "smollm2",
        "recipe": "wide",
        "changes": "",
        "stage": "calibrate",
        "attn_group": 3,
        "ffn_group": 128,
    }
    keep = (rows["matched"] == "cost") & (rows["status"] == "finished")
    for column, value in wanted.items():
        keep &= rows[column] == value
    found = rows[keep]
    best = found.groupby("trained_percent")["variant"].agg(lambda variants: variants.value_counts().index[0])
    return found[found["variant"] == found["trained_percent"].map(best)]


def _is_dialled(rows: pd.DataFrame) -> pd.Series:
    return rows["dialled"].eq(True) if "dialled" in rows else pd.Series(False, index=rows.index)
