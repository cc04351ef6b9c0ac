"""`python -m experiments.figures [--rows FILE ...] [--out FOLDER] [--model NAME]`: pictures of the results rows."""

import argparse
from pathlib import Path

from experiments.figures import dial_runs, layout_layers, quality
from experiments.tables.rows import DEFAULT_ROWS, load

OUT = Path(__file__).parent / "out"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.figures", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=[str(DEFAULT_ROWS)], help="results files or glob patterns")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the pictures")
    parser.add_argument("--model", default="smollm2", help="name of the model")
    options = parser.parse_args(arguments)
    rows = load(options.rows)
    options.out.mkdir(parents=True, exist_ok=True)
    for figure in (quality, layout_layers, dial_runs):
        name = figure.__name__.rsplit(".")[-1]
        figure.save(rows, options.model, options.out / f"{name}_{options.model}.png")
    print(f"pictures in {options.out}")


if __name__ == "__main__":
    main()
