"""Cells and tables, and their Markdown, LaTeX and CSV."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from experiments.tables.published import Published

MISSING, FAILED = "missing", "failed"


@dataclass(frozen=True)
class Cell:
    """One figure: mean over the runs of a cell, in the unit of its column."""

    value: float | None = None
    spread: float | None = None
    num_runs: int = 0
    published: Published | None = None
    status: str = "finished"
    runs: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    text: str | None = None

    @property
    def difference(self) -> float | None:
        return None if self.value is None or self.published is None else self.value - self.published.value

    @property
    def verdict(self) -> str:
        """inside or outside the band around the published value; empty without one."""
        if self.difference is None or self.published is None or self.published.band is None:
            return ""
        return "inside" if abs(self.difference) <= self.published.band else "outside"


@dataclass(frozen=True)
class Column:
    """`metric` names the figure; values are multiplied by `scale` and shown with `digits` decimals."""

    name: str
    metric: str
    scale: float = 1.0
    digits: int = 2


@dataclass
class Table:
    """Rows of `labels` (one per head) and cells, in order."""

    name: str
    title: str
    note: str
    heads: list[str]
    columns: list[Column]
    labels: list[tuple[str, ...]] = field(default_factory=list)
    cells: list[list[Cell]] = field(default_factory=list)

    def add(self, labels: tuple[str, ...], cells: list[Cell]) -> None:
        assert len(labels) == len(self.heads) and len(cells) == len(self.columns)
        self.labels.append(labels)
        self.cells.append(cells)

    @property
    def runs(self) -> dict[str, str]:
        """Run to command of every run behind the table, in the order of first use."""
        found: dict[str, str] = {}
        for row in self.cells:
            for cell in row:
                found |= {run: found.get(run, c) for run, c in zip(cell.runs, cell.commands, strict=True)}
        return found


def figure(rows: pd.DataFrame, column: Column, published: Published | None = None) -> Cell:
    """The cell for the selected rows: mean and standard deviation over seeds; missing or failed where there is none."""
    missing = Cell(status=MISSING, published=published)
    if not len(rows):
        return missing
    common: dict[str, Any] = {"published": published}
    common |= {"runs": tuple(rows["run"]), "commands": tuple(rows["command"])}
    if (rows["status"] == "failed").all():
        return Cell(status=FAILED, **common)
    if column.metric not in rows:
        return missing
    values = pd.to_numeric(rows[column.metric], errors="coerce").dropna()
    if values.empty:
        return missing
    about = rows[[key for key in ("run", "command", "seed", "finished") if key in rows]]  # of hundreds of columns
    kept = once_per_seed(about.loc[values.index])
    values = values[kept.index]
    common |= {"runs": tuple(kept["run"]), "commands": tuple(kept["command"])}
    values = values.astype(float) * column.scale
    spread = float(values.std()) if len(values) > 1 else None
    return Cell(float(values.mean()), spread, len(values), **common)


def once_per_seed(rows: pd.DataFrame) -> pd.DataFrame:
    """The last run of each seed: one measured again, with more tasks for instance, is no further sample."""
    if not {"seed", "finished"}.issubset(rows.columns):
        return rows
    return rows.sort_values("finished", kind="stable").drop_duplicates("seed", keep="last").sort_index()


def show(cell: Cell, digits: int) -> str:
    """`61.84 ±0.31 [61.48, +0.36 inside]`: ours over seeds, then published, difference and band."""
    if cell.text is not None:
        return cell.text
    if cell.value is None:
        ours = cell.status
    elif math.isfinite(cell.value):
        ours = number(cell.value, digits) + ("" if cell.spread is None else f" ±{number(cell.spread, digits)}")
    else:
        ours = str(cell.value)
    if cell.published is None:
        return ours
    paper = cell.published.show(digits)
    if cell.difference is None:
        return f"{ours} [{paper}]"
    return f"{ours} [{paper}, {number(cell.difference, digits, sign=True)} {cell.verdict}".rstrip() + "]"


def number(value: float, digits: int, sign: bool = False) -> str:
    """Fixed decimals; large values with fewer."""
    digits = 0 if abs(value) >= 1000 else digits
    return f"{value:{'+' if sign else ''}.{digits}f}"


def markdown(table: Table, with_runs: bool = True) -> str:
    """The table and, under it, the commands that its `runs` column numbers."""
    numbers = {run: index for index, run in enumerate(table.runs, 1)}
    heads = [*table.heads, *(column.name for column in table.columns), *(["runs"] if with_runs else [])]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for labels, cells in zip(table.labels, table.cells, strict=True):
        shown = [show(cell, column.digits) for cell, column in zip(cells, table.columns, strict=True)]
        used = sorted({numbers[run] for cell in cells for run in cell.runs})
        lines.append(f"| {' | '.join([*labels, *shown, *([_ranges(used)] if with_runs else [])])} |")
    body = "\n".join(lines)
    if not with_runs:
        return body
    commands = "\n".join(f"{numbers[run]}. `{command}` ({run})" for run, command in table.runs.items())
    return f"# {table.title}\n\n{table.note}\n\n{body}\n" + (f"\n## Runs\n\n{commands}\n" if commands else "")


def _ranges(numbers: list[int]) -> str:
    """1-3, 5"""
    parts: list[list[int]] = []
    for value in numbers:
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def latex(table: Table) -> str:
    """A booktabs tabular in a table environment."""
    heads = [*table.heads, *(column.name for column in table.columns)]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape(table.title)}}}",
        rf"\begin{{tabular}}{{{'l' * len(table.heads)}{'r' * len(table.columns)}}}",
        r"\toprule",
        " & ".join(map(escape, heads)) + r" \\",
        r"\midrule",
    ]
    for labels, cells in zip(table.labels, table.cells, strict=True):
        shown = [show(cell, column.digits) for cell, column in zip(cells, table.columns, strict=True)]
        lines.append(" & ".join(map(escape, [*labels, *shown])) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def escape(text: str) -> str:
    """Plain text for LaTeX."""
    special = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "×": r"$\times$", "→": r"$\to$"}
    special |= {char: rf"\{char}" for char in "&%$#_{}"}
    return "".join(special.get(char, char) for char in text)


def records(table: Table) -> list[dict]:
    """One record per cell, for CSV: where it stands, ours, published, difference, band, and the commands behind it."""
    found = []
    for labels, cells in zip(table.labels, table.cells, strict=True):
        for cell, column in zip(cells, table.columns, strict=True):
            published = cell.published
            found.append(
                {
                    "table": table.name,
                    "row": " / ".join(labels),
                    "column": column.name,
                    "status": cell.status,
                    "ours": cell.value,
                    "spread": cell.spread,
                    "runs": cell.num_runs,
                    "published": published.value if published else None,
                    "published_exactly": published.exact if published else None,
                    "difference": cell.difference,
                    "band": published.band if published else None,
                    "verdict": cell.verdict,
                    "run_ids": "; ".join(cell.runs),
                    "commands": "; ".join(cell.commands),
                }
            )
    return found
