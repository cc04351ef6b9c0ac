"""Perplexity of one checkpoint along its dial, beside runs trained at their own sparsity."""

from pathlib import Path

import matplotlib
import pandas as pd

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from experiments.tables import dial


def save(rows: pd.DataFrame, model: str, path: Path) -> None:
    """`rows` of `experiments.tables.rows.load`; measured share of parameters against perplexity, seeds averaged."""
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    rows = rows[rows["model"] == model]
    ways = ((dial.dialled, "o-", f"one checkpoint trained at {dial.TRAINED}%"), (dial.dedicated, "s", "trained there"))
    for choose, style, label in ways:
        found = [choose(rows, percent) for percent in dial.PERCENTS]
        points = [(100 * f["skipped_params"].mean(), f["routed_perplexity"].mean()) for f in found if len(f)]
        if points:
            axis.plot(*zip(*sorted(points), strict=True), style, label=label)
    if axis.lines:
        axis.legend()
    axis.set(xlabel="prunable parameters skipped on held-out text, %", ylabel="perplexity", yscale="log", title=model)
    figure.savefig(path, dpi=120)
    plt.close(figure)
