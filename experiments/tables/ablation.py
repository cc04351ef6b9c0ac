"""What each option does to quality: every `conf/experiment/ablation_*` on SmolLM2-135M at 50%, from the stored rows.

The log-perplexity gap to dense is set beside that of the published recipe, at the same share of decisions and at the
same share of prunable parameters (the dial of each run fitted to both). Compensation vectors also adapt a model to
the text, so recipes that have them are measured a second time against the dense model with the same free vectors.
"""

import math

import pandas as pd

from experiments.tables.cells import Cell, Column, Table, figure
from experiments.tables.rows import ROOT

BASE, CONTROL = "paper", "dense_bias"
SETTINGS = {"mean": (50, "decisions"), "cost": (43, "parameters")}
"""What is held equal, at how many percent; 43% of the parameters is what the published recipe skips at 50%."""
TEXTS = {"": "held out", "other_": "other text"}
FIGURES = {
    "routed_perplexity": ("perplexity", 1.0, 2),
    "log_perplexity_gap": ("gap", 1.0, 3),
    "skipped_params": ("parameters skipped %", 100.0, 1),
    "cut": ("cut %", 100.0, 1),
    "control_cut": ("control cut %", 100.0, 1),
}
HEADS = ["recipe", "what it is", "seeds"]
NOTE = (
    "SmolLM2-135M-Instruct, 300 steps of 32 x 512 tokens, 3 heads and 128 channels a group, the dial fitted to 50% of "
    "the decisions and to 43% of the prunable parameters. Gap: log perplexity over the dense model's. Cut: the share "
    "of the published recipe's gap that is gone. Control cut: the same with the gap of recipes that have compensation "
    "vectors taken to the dense model with the same vectors, trained by the same recipe. The dial is fitted on the "
    "training text; at the same setting another text may skip less, which its own column shows. ± is the standard "
    "deviation over seeds."
)


def build(rows: pd.DataFrame) -> list[Table]:
    columns = [_column(key, prefix, matched) for matched in SETTINGS for prefix in TEXTS for key in FIGURES]
    whole = Table("ablation", "Ablation, SmolLM2-135M at 50%", NOTE, HEADS, columns)
    kept = [
        c for c in columns if c.metric.endswith((":routed_perplexity", ":cut")) and not c.metric.startswith("mean:o")
    ]
    kept += [c for c in columns if c.metric in ("cost:other_:skipped_params", "cost::control_cut")]
    short = Table("ablation_short", whole.title, NOTE, HEADS, kept)
    runs = {name: _runs(rows, name) for name in _recipes()}
    for name, about in _recipes().items():
        cells = {column.metric: _cell(runs, name, column) for column in columns}
        labels = (name, about, str(runs[name]["main"]["seed"].nunique()) if len(runs[name]["main"]) else "0")
        whole.add(labels, [cells[column.metric] for column in columns])
        short.add(labels, [cells[column.metric] for column in kept])
    return [whole, short]


def _column(key: str, prefix: str, matched: str) -> Column:
    name, scale, digits = FIGURES[key]
    percent, what = SETTINGS[matched]
    return Column(f"{name}, {TEXTS[prefix]}, {percent}% of {what}", f"{matched}:{prefix}:{key}", scale, digits)


def _recipes() -> dict[str, str]:
    """Name and sentence of every ablation, the published recipe first, then one repair each, then the project's own."""
    found = {}
    for path in (ROOT / "conf" / "experiment").glob("ablation_*.yaml"):
        about = path.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ")
        found[path.stem.removeprefix("ablation_")] = about
    first = {BASE: 0, CONTROL: 1}
    return dict(sorted(found.items(), key=lambda item: (first.get(item[0], 2 + item[0].startswith("wide")), item[0])))


def _runs(rows: pd.DataFrame, name: str) -> dict[str, pd.DataFrame]:
    """The rows of one recipe: `main` at the setting it was trained for, and the dialled ones of each of SETTINGS.

    Only runs that differ in nothing but the seed; of several such sets the largest.
    """
    own = rows[rows["experiment"] == f"ablation_{name}"] if "experiment" in rows else rows[:0]
    done = own[own["status"] == "finished"]
    if done.empty:
        return dict.fromkeys(("main", *SETTINGS), own)
    own = done[done["variant"] == done["variant"].value_counts().index[0]]
    dialled = own["dialled"].eq(True) if "dialled" in own else pd.Series(False, index=own.index)
    found = {"main": own[~dialled]}
    for matched, (percent, _) in SETTINGS.items():
        at = own[dialled & (own["matched"] == matched) & (own["percent"] == percent)]
        found[matched] = found["main"] if name == CONTROL else at  # the dense model has no dial
    return found


def _cell(runs: dict, name: str, column: Column) -> Cell:
    matched, prefix, key = column.metric.split(":")
    rows = runs[name][matched]
    if not key.endswith("cut"):
        return figure(rows, Column(column.name, prefix + key, column.scale, column.digits))
    gap = Column(column.name, f"{prefix}log_perplexity_gap")
    base, own, control = (figure(found, gap) for found in (runs[BASE][matched], rows, runs[CONTROL]["main"]))
    if name in (BASE, CONTROL):
        return Cell(text="", status="none")
    if key == "control_cut" and not _compensates(rows):
        return Cell(text="", status="none")
    needed = [base, own, *([control] if key == "control_cut" else [])]
    if own.value is None or any(cell.value is None for cell in needed):
        return Cell(status=own.status if own.value is None else "missing")
    ours = own.value - ((control.value or 0.0) if key == "control_cut" else 0.0)
    share = column.scale * (1 - ours / base.value) if base.value else math.nan
    traces = {run: c for cell in needed for run, c in zip(cell.runs, cell.commands, strict=True)}
    return Cell(share, None, own.num_runs, runs=tuple(traces), commands=tuple(traces.values()))


def _compensates(rows: pd.DataFrame) -> bool:
    return bool(len(rows)) and bool(rows["config"].iloc[0]["method"].get("compensation"))
