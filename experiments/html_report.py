"""`report.html` of a run or of a sweep: one file with its tables, pictures, script and style in it.

`python -m experiments.html_report FOLDER` makes it again. A run's report shows a held-out text whose tokens are
coloured by the width they ran at; pointing at one (or opening `report.html#token-12`) shows its layers. Every run
writes its own, `experiments.sweep_report` that of a sweep.
"""

import argparse
import base64
import json
import os
from html import escape
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
PICTURES = ("layout.png", "curves.png", "dial_curve.png")
FIGURES = (
    ("dense_perplexity", "dense perplexity", "{:.3f}"),
    ("routed_perplexity", "routed perplexity", "{:.3f}"),
    ("sparsity_total", "decisions skipped", "{:.1%}"),
    ("sparsity_attention", "of attention", "{:.1%}"),
    ("sparsity_ffn", "of the FFN", "{:.1%}"),
    ("skipped_params", "prunable parameters skipped", "{:.1%}"),
    ("skipped_flops", "FLOPs skipped", "{:.1%}"),
    ("skipped_bytes", "weight bytes of a one-token decode skipped", "{:.1%}"),
    ("skipped_kv", "keys and values skipped", "{:.1%}"),
    ("accuracy_mean", "accuracy, mean of the tasks", "{:.1%}"),
    ("accuracy_retention", "accuracy over dense", "{:.1%}"),
)


def write_run(folder: Path, command: str) -> Path:
    """The report of a finished run, from what lies in its folder."""
    report = json.loads((folder / "report.json").read_text())
    stored = json.loads((folder / "checkpoint" / "wide_config.json").read_text())
    recipe, metrics = stored["recipe"], stored["metrics"]
    title = f"{recipe['experiment_name']}: {recipe['model']['name']}, {recipe['method']['name']}"
    parts = [
        f"<h1>{escape(title)}</h1><p><code>{escape(command)}</code></p>",
        table(("figure", "value"), figures(metrics)),
        tasks(report),
        text(report),
        *(picture(folder / name) for name in PICTURES if (folder / name).is_file()),
        sample(report),
        f"<details><summary>config</summary><pre>{escape(json.dumps(recipe, indent=2))}</pre></details>",
    ]
    return write(folder / "report.html", title, parts, report.get("tokens"))


def write_sweep(folder: Path) -> Path:
    """The report of a sweep: its jobs, failed ones among them, and quality against what is skipped."""
    paths = sorted(folder.rglob("row.jsonl"), key=lambda path: (_number(path, folder), len(path.parts), str(path)))
    found = [(path.parent, json.loads(line)) for path in paths for line in path.read_text().splitlines()]
    heads = ("job", "status", *(name for _, name, _ in FIGURES), "command")
    lines = []
    for run, row in found:
        name, page = run.relative_to(folder).as_posix(), run / "report.html"
        link = f'<a href="{escape(name)}/report.html">{escape(name)}</a>' if page.is_file() else escape(name)
        status = row["status"] if row["status"] == "finished" else f"failed: {row['error']}: {row['message']}"
        values = (_format(row.get(key), form) for key, _, form in FIGURES)
        lines.append((Raw(link), status, *values, Raw(f"<code>{escape(row['command'])}</code>")))
    parts = [f"<h1>{escape(folder.name)}</h1>", table(heads, lines), scatter([row for _, row in found])]
    return write(folder / "report.html", folder.name, parts, None)


def _number(path: Path, folder: Path) -> int:
    """A sweep's folders begin with the number of the job."""
    first = path.relative_to(folder).parts[0].split("-")[0]
    return int(first) if first.isdigit() else 0


class Raw(str):
    """Markup that is not escaped again."""


def write(path: Path, title: str, parts: list[str], tokens: dict | None) -> Path:
    style, script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    data = json.dumps(tokens).replace("</", "<\\/")  # a token may read </script>
    page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<style>{style}</style></head><body>
{"".join(parts)}
<script id="widths" type="application/json">{data}</script>
<script>{script}</script>
</body></html>
"""
    staging = path.with_name(f".{path.name}-{os.getpid()}")  # jobs of one sweep may write at the same time
    staging.write_text(page, encoding="utf-8")
    return staging.replace(path)


def table(heads: tuple[str, ...], rows: list[tuple]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    lines = ("".join(f"<td>{v if isinstance(v, Raw) else escape(str(v))}</td>" for v in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def figures(metrics: dict) -> list[tuple[str, str]]:
    return [(name, _format(metrics[key], form)) for key, name, form in FIGURES if metrics.get(key) is not None]


def _format(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def tasks(report: dict) -> str:
    """Every task, routed beside dense, with the harness's standard error."""
    if "accuracy" not in report:
        return ""
    rows = []
    for name, modes in report["accuracy"]["tasks"].items():
        error = modes["routed"]["stderr"]
        shown = f"{modes['routed']['value']:.4g}" + ("" if error is None else f" ±{error:.2g}")
        row = (name, modes["routed"]["metric"], shown, f"{modes['dense']['value']:.4g}", modes["routed"]["num_items"])
        rows.append(row)
    return "<h2>Tasks</h2>" + table(("task", "metric", "routed", "dense", "items"), rows)


def text(report: dict) -> str:
    """The held-out text; darker ran wider."""
    if "tokens" not in report:
        return ""
    tokens, weight = report["tokens"], report["tokens"]["attention_weight"]
    spans = []
    for index, token in enumerate(tokens["tokens"]):
        attention, ffn = (sum(tokens[kind][index]) / len(tokens[kind][index]) for kind in ("attention", "ffn"))
        width = weight * attention + (1 - weight) * ffn
        tip = f"{width:.0%} of the parameters (attention {attention:.0%}, FFN {ffn:.0%})"
        style = f"background:hsl(210,80%,{98 - 36 * width:.0f}%)"
        spans.append(f'<span class="token" id="token-{index}" title="{tip}" style="{style}">{escape(token)}</span>')
    return (
        "<h2>Width of every token</h2><p>Darker tokens ran more of the prunable parameters; point at one for its "
        f'layers.</p><div id="text">{"".join(spans)}</div><div id="layers"></div>'
    )


def picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{escape(path.stem)}" src="data:image/png;base64,{data}"></figure>'


def sample(report: dict) -> str:
    if "sample" not in report:
        return ""
    parts = report["sample"]
    rows = [(name, parts[name]) for name in ("prompt", "dense", "routed")]
    return "<h2>Sample</h2>" + table(("", "text"), rows)


def scatter(rows: list[dict]) -> str:
    """Perplexity over skipped parameters, as SVG."""
    points = [row for row in rows if row.get("routed_perplexity") and row.get("skipped_params") is not None]
    if not points:
        return ""
    values = [row["routed_perplexity"] for row in points] + [row["dense_perplexity"] for row in points]
    low, high = min(values), max(values) * 1.02 + 1e-9
    dots = "".join(_dot(row, low, high) for row in points)
    shares = (0, 0.25, 0.5, 0.75, 1)
    labels = "".join(
        f'<text x="{_across(share):.0f}" y="318" text-anchor="middle">{share:.0%}</text>' for share in shares
    )
    dense = _height(points[-1]["dense_perplexity"], low, high)
    return (
        '<h2>Perplexity over skipped parameters</h2><svg viewBox="0 0 640 340" width="640" height="340">'
        f'<line x1="60" x2="580" y1="{dense:.1f}" y2="{dense:.1f}" class="dense"/>{dots}{labels}'
        f'<text x="4" y="24">{high:.1f}</text><text x="4" y="304">{low:.1f}</text></svg>'
    )


def _dot(row: dict, low: float, high: float) -> str:
    name = f"{row['run_id']}: {row['routed_perplexity']:.2f} at {row['skipped_params']:.1%}"
    x, y = _across(row["skipped_params"]), _height(row["routed_perplexity"], low, high)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(name)}</title></circle>'


def _across(share: float) -> float:
    return 60 + 520 * share


def _height(value: float, low: float, high: float) -> float:
    return 300 - 280 * (value - low) / (high - low)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.html_report", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of a run or of a sweep")
    folder = parser.parse_args(arguments).folder
    if (folder / "report.json").is_file():
        print(write_run(folder, json.loads((folder / "row.jsonl").read_text().splitlines()[-1])["command"]))
    elif list(folder.rglob("row.jsonl")):
        print(write_sweep(folder))
    else:
        raise SystemExit(f"error: {folder} holds neither report.json nor the folders of runs")


if __name__ == "__main__":
    main()
