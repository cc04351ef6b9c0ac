"""Perplexity along the dial: one set of weights, every sparsity."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def save(curve: dict, path: Path) -> None:
    """`curve` is the report's `dial_curve`: dense_perplexity, and points with sparsity_total, skipped_params and
    routed_perplexity.
    """
    points = sorted(curve["points"], key=lambda point: point["sparsity_total"])
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for key, label in (("sparsity_total", "decisions"), ("skipped_params", "prunable parameters")):
        axis.plot([p[key] for p in points], [p["routed_perplexity"] for p in points], "o-", ms=3, label=label)
    axis.axhline(curve["dense_perplexity"], color="k", linestyle="--", label="dense")
    axis.set(xlabel="skipped share", ylabel="perplexity", yscale="log", title="one checkpoint along its dial")
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
