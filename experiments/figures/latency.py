"""Bars of first-token and per-token time by path, split into parts where they are known, with the card's limit."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def save(rows: list[dict], model: str, path: Path) -> None:
    """`rows` as the action `latency` makes them; one panel for each phase, batch and length."""
    points = list(dict.fromkeys((row["phase"], row["batch"], row["tokens"]) for row in rows))
    columns = min(4, len(points))
    lines = -(-len(points) // columns)
    size = (4.2 * columns, 3.4 * lines + 0.6)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    parts: dict[str, str] = {}
    for axis, point in zip(axes.flat, points, strict=False):
        here = [row for row in rows if (row["phase"], row["batch"], row["tokens"]) == point]
        for place, row in enumerate(here):
            _bar(axis, place, row, parts)
        labels = [_label(row) for row in here]
        axis.set_xticks(range(len(here)), labels, rotation=30, ha="right", fontsize=7)
        axis.set(title=f"{point[0]}, {point[1]} x {point[2]}", ylabel="ms")
    for axis in axes.flat[len(points) :]:
        axis.set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in parts.values()]
    if handles:
        figure.legend(handles, parts, loc="outside lower center", ncols=len(handles), fontsize=7)
    figure.suptitle(f"{model}: time of the first token and of each further one")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bar(axis, place: int, row: dict, colors: dict[str, str]) -> None:
    """The time; its parts scaled to it, since the profiler's own overhead is in them."""
    parts = row.get("parts_ms") or {}
    total = sum(parts.values())
    bottom = 0.0
    for name, value in parts.items():
        color = colors.setdefault(name, f"C{len(colors)}")
        height = value / total * row["ms"]
        axis.bar(place, height, bottom=bottom, color=color)
        bottom += height
    if not parts:
        axis.bar(place, row["ms"], color="0.6")
    if row["limit_ms"]:
        axis.hlines(row["limit_ms"], place - 0.45, place + 0.45, color="k", linestyle="--")


def _label(row: dict) -> str:
    group = f", G={row['ffn_group_size']}" if "ffn_group_size" in row else ""
    return f"{row['path']}, {row['sparsity']:.0%}{group}"
