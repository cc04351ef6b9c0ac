"""Heat map of the learned layout: on-rate of every group, layer by layer, attention beside FFN."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def save(routing: dict, path: Path) -> None:
    """`routing` is the routing report; 1 = every held-out token ran the group."""
    kinds = list(routing["groups"])
    rates = [routing["groups"][kind]["on_rate"] for kind in kinds]
    widths = [max(2.5, min(8.0, 0.35 * len(rate[0]))) for rate in rates]
    height = max(3.0, 0.18 * len(rates[0]) + 1.2)
    figure, axes = plt.subplots(
        1, len(kinds), figsize=(sum(widths) + 2, height), width_ratios=widths, layout="constrained"
    )
    for axis, kind, rate in zip(axes, kinds, rates, strict=True):
        image = axis.imshow(rate, vmin=0, vmax=1, aspect="auto", cmap="viridis", interpolation="nearest")
        axis.set(title=f"{kind}: {routing['sparsity'][kind]:.1%} skipped", xlabel="group", ylabel="layer")
    figure.colorbar(image, ax=axes, label="share of tokens that run the group")
    figure.savefig(path, dpi=120)
    plt.close(figure)
