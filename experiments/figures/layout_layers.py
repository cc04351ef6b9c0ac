"""The learned layout over the depth: skipped share of each kind, layer by layer, mean over seeds."""

from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def save(rows: pd.DataFrame, model: str, path: Path) -> None:
    """`rows` as `experiments.tables.rows.load` gives them; one line a recipe and sparsity of `model`."""
    layouts = rows["layout"] if "layout" in rows else pd.Series(None, index=rows.index)
    found = rows[(rows["model"] == model) & layouts.map(lambda layout: isinstance(layout, dict))]
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(11, 4), layout="constrained")
    for name, group in found.groupby(["recipe", "percent", "stage"]):
        for axis, kind in zip(axes, ("attention", "ffn"), strict=True):
            skipped = np.mean([layout[kind] for layout in group["layout"]], axis=0)
            axis.plot(range(1, len(skipped) + 1), skipped, ".-", label=f"{name[0]}, {name[1]:.0f}%, {name[2]}")
    for axis, kind in zip(axes, ("attention", "FFN"), strict=True):
        axis.set(xlabel="layer", ylabel="skipped share", ylim=(0, 1), title=f"{model}: {kind}")
    if len(found):
        axes[0].legend(fontsize=7)
    else:
        axes[0].text(0.5, 0.5, "no row holds a layout yet", ha="center", transform=axes[0].transAxes)
    figure.savefig(path, dpi=120)
    plt.close(figure)
