"""Loss and sparsity over the optimiser steps of one stage."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def save(history: list[dict[str, float]], stage: str, path: Path) -> None:
    """`history` has one row per step: cross_entropy, sparsity_*, sparsity, target."""
    steps = [row["step"] for row in history]
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
    top.plot(steps, [row["cross_entropy"] for row in history], label="cross-entropy")
    top.set(ylabel="nats per token", title=stage)
    top.legend()
    for key in ("sparsity_attention", "sparsity_ffn", "sparsity"):
        bottom.plot(steps, [row[key] for row in history], label=key.removeprefix("sparsity_"))
    bottom.plot(steps, [row["target"] for row in history], "k--", label="target")
    bottom.set(xlabel="optimiser step", ylabel="sampled sparsity")
    bottom.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
