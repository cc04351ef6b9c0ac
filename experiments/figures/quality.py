"""Perplexity against what is skipped, and against the measured speed, for every recipe of one model."""

from pathlib import Path

import matplotlib
import pandas as pd

matplotlib.use("Agg")
from matplotlib import pyplot as plt

STAGES = {"calibrate": "o", "lora": "s"}


def save(rows: pd.DataFrame, model: str, path: Path) -> None:
    """`rows` as `experiments.tables.rows.load` gives them."""
    rows = rows[(rows["model"] == model) & (rows["status"] == "finished")]
    quality = rows[(rows["action"] == "pipeline") & rows["recipe"].notna()]
    figure, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(11, 4.5), layout="constrained")
    for (recipe, stage), group in quality.groupby(["recipe", "stage"]):
        label = f"{recipe}, {stage}"
        left.scatter(group["skipped_params"], group["routed_perplexity"], s=18, marker=STAGES[stage], label=label)
        points = with_speed(rows, group)
        right.scatter([x for x, _ in points], [y for _, y in points], s=18, marker=STAGES[stage], label=label)
    if not right.collections or not any(len(points.get_offsets()) for points in right.collections):
        right.text(0.5, 0.5, "no run of these was timed yet", ha="center", transform=right.transAxes)
    if len(quality):
        dense = quality["dense_perplexity"].dropna().iloc[-1]
        for axis in (left, right):
            axis.axhline(dense, color="k", linestyle="--", linewidth=1, label="dense")
        left.legend(fontsize=7)
    left.set(xlabel="skipped share of the prunable parameters", ylabel="token perplexity", yscale="log", title=model)
    right.set(xlabel="measured decoding speed over the engine's dense path", title="learned masks, batch 1")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def with_speed(rows: pd.DataFrame, quality: pd.DataFrame) -> list[tuple[float, float]]:
    """(speed, perplexity) of runs that a latency row timed with their own learned masks, at its longest context."""
    found = []
    for run in rows[rows["action"] == "latency"].to_dict("records"):
        timed = Path(run["config"]["bench"]["checkpoint"])
        points = [m for m in run["measurements"] if m.get("masks") == "learned" and m["phase"] == "decode"]
        for row in quality.to_dict("records"):
            folder = Path(row["config"]["output_dir"])
            if points and timed in (folder, folder / "checkpoint"):
                longest = max(points, key=lambda point: point["tokens"])
                found.append((longest["speedup_over_engine_dense"], row["routed_perplexity"]))
    return found
