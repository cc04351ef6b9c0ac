"""Published values (arXiv 2607.28418v1) and the bands in which a measurement counts as a reproduction of one.

`published.csv` holds every table of the paper; `exact` says "yes", "plot" (read off a plot) or "derived" (computed from
published figures). Shares are in percent.
"""

import csv
import functools
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "published.csv"
TASKS = ("arc_easy", "arc_challenge", "boolq", "winogrande", "piqa", "openbookqa", "hellaswag")


@dataclass(frozen=True)
class Published:
    """`band`: how far from it still counts as reproduced; None where the comparison is of different things."""

    value: float
    exact: str
    band: float | None

    def show(self, digits: int) -> str:
        return ("~" if self.exact == "plot" else "") + f"{self.value:.{0 if abs(self.value) >= 1000 else digits}f}"


@functools.cache
def values() -> dict[tuple, tuple[float, str]]:
    """(model, percent, method, attn_group, ffn_group, budget, stage, metric) -> value, exactness."""
    found = {}
    with open(FILE, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            groups = tuple(int(row[key]) if row[key] else None for key in ("attn_group", "ffn_group"))
            key = (row["model"], int(row["percent"]), row["method"], *groups, row["budget"], row["stage"])
            found[*key, row["metric"]] = (float(row["value"]), row["exact"])
    return found


def published(spec, metric: str) -> Published | None:
    """The paper's value for a `Spec`, if it gives one. Rivals have no group sizes there."""
    groups = (spec.attn_group, spec.ffn_group) if spec.method == "wide" else (None, None)
    key = (spec.model, spec.percent or 0, spec.method, *groups, spec.matched, spec.stage, metric)
    if key not in values():
        return None
    value, exact = values()[key]
    return Published(value, exact, band(spec.method, metric, value, exact))


def band(method: str, metric: str, value: float, exact: str) -> float | None:
    """Half-width. The paper states no spread, and its own non-monotone cells are points apart, so: 2 points of the mean
    (0.5 of a dense one), 3 of one task, 10% of a perplexity (2% of a dense one), 3 points of a sparsity, 1 point more
    where the value was read off a plot. None for speed: another card.
    """
    dense = method == "dense"
    more = 1.0 if exact == "plot" else 0.0
    if metric.startswith("speedup"):
        return None
    if metric.endswith("perplexity"):
        return (0.02 if dense else 0.1) * value
    if metric == "accuracy_mean":
        return (0.5 if dense else 2.0) + more
    return (1.0 if dense else 3.0) + more
