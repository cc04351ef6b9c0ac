"""`python -m experiments.tables [--rows FILE ...] [--out FOLDER]`: every table as Markdown, LaTeX, CSV; README's."""

import argparse
import importlib
import pkgutil
import re
from pathlib import Path

import pandas as pd

import experiments.tables
from experiments.tables.cells import Table, latex, markdown, records
from experiments.tables.rows import DEFAULT_ROWS, ROOT, load

OUT = Path(__file__).parent / "out"
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.S)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.tables", description=experiments.tables.__doc__)
    parser.add_argument("--rows", nargs="+", default=[str(DEFAULT_ROWS)], help="results files or glob patterns")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the tables")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="file whose marked tables are renewed")
    options = parser.parse_args(arguments)
    tables = build_all(load(options.rows))
    write(tables, options.out)
    renew(options.readme, tables)
    print(f"{len(tables)} tables in {options.out}")


def build_all(rows: pd.DataFrame) -> list[Table]:
    """Every table of every file here that has a `build`."""
    names = sorted(module.name for module in pkgutil.iter_modules(experiments.tables.__path__))
    modules = [importlib.import_module(f"experiments.tables.{name}") for name in names if name != "__main__"]
    return [table for module in modules if hasattr(module, "build") for table in module.build(rows)]


def write(tables: list[Table], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        (folder / f"{table.name}.md").write_text(markdown(table), encoding="utf-8")
        (folder / f"{table.name}.tex").write_text(latex(table), encoding="utf-8")
    cells = pd.DataFrame([record for table in tables for record in records(table)])
    cells.to_csv(folder / "cells.csv", index=False, lineterminator="\n")


def renew(path: Path, tables: list[Table]) -> None:
    """Replace what stands between `<!-- table: NAME -->` and `<!-- end of table -->`.

    Raises:
        ValueError: a marker names no table.
    """
    named = {table.name: table for table in tables}

    def fill(found: re.Match) -> str:
        if found[2] not in named:
            raise ValueError(f"{path}: no table {found[2]!r}; legal: {', '.join(named)}")
        return f"{found[1]}\n{markdown(named[found[2]], with_runs=False)}\n\n{found[3]}"

    text = path.read_text(encoding="utf-8")
    path.write_text(MARK.sub(fill, text), encoding="utf-8")


if __name__ == "__main__":
    main()
