"""report.html of a run and of a sweep, by hand-made folders, through the command line, and in headless Chromium."""

import base64
import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny import pattern, routed, tokens
from wandb_file import OfflineRun

from experiments import html_report
from experiments.figures import __main__ as figures
from experiments.figures import dial_curve
from experiments.figures.quality import with_speed
from experiments.tables.rows import DEFAULT_ROWS
from wide.base_model import tiny_tokenizer
from wide.evaluation.token_widths import token_widths

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PNG = b"\x89PNG\r\n\x1a\n"
TINY = ("+experiment=tiny", "stage.steps=2")


def browse(address: str) -> str:
    """The page after its script has run."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--enable-logging=stderr"]
    result = subprocess.run([CHROMIUM, *flags, "--dump-dom", address], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "Uncaught" not in result.stderr, result.stderr
    return result.stdout


def run_folder(folder: Path) -> Path:
    """A finished run of two layers and three tokens, one of which would end a script."""
    widths = {"tokens": ["The", "</script>", " union"], "attention_weight": 0.25}
    widths |= {"attention": [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], "ffn": [[0.5, 0.5], [0.0, 0.0], [1.0, 1.0]]}
    figure = {"metric": "acc,none", "value": 0.5, "stderr": 0.05, "num_items": 9}
    report = {"tokens": widths, "sample": {"prompt": "a < b", "dense": "x & y", "routed": "z"}}
    report["accuracy"] = {"tasks": {"sotu_cloze": {"routed": figure, "dense": figure | {"value": 0.75}}}}
    stored = {"recipe": {"experiment_name": "e<1>", "model": {"name": "m"}, "method": {"name": "wide"}}}
    stored["metrics"] = {"routed_perplexity": 43.25, "dense_perplexity": 26.5, "sparsity_total": 0.5}
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "checkpoint" / "wide_config.json").write_text(json.dumps(stored))
    (folder / "layout.png").write_bytes(PNG + b"picture")
    return folder


def test_token_widths_are_the_shares_of_groups_that_ran():
    model, ids = routed("llama"), tokens(1, 6)
    gates = pattern(model, 1, 6)
    with model.forced(**gates):
        widths = token_widths(model, tiny_tokenizer(), ids[0])
    assert len(widths["tokens"]) == 6 and "".join(widths["tokens"]) == tiny_tokenizer().decode(ids[0])
    for kind in ("attention", "ffn"):
        expected = gates[kind][:, 0].mean(-1).T  # [T, L]
        assert torch.allclose(torch.tensor(widths[kind]), expected, atol=6e-4)
    assert widths["attention_weight"] == pytest.approx(2 * 64 * 64 / (2 * 64 * 64 + 3 * 64 * 160))


def test_report_of_a_run_holds_everything_in_one_file(tmp_path):
    path = html_report.write_run(run_folder(tmp_path / "run"), "python run.py a='<b>'")
    page = path.read_text()
    assert "e&lt;1&gt;: m, wide" in page and html.escape("python run.py a='<b>'") in page
    assert "<td>43.250</td>" in page and "<td>50.0%</td>" in page and "<td>0.5 ±0.05</td><td>0.75</td>" in page
    assert base64.b64encode(PNG + b"picture").decode() in page and "<td>x &amp; y</td>" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "http" not in page.replace("http-equiv", "")
    assert page.count("</script>") == 2, "a token cannot end the script"
    colours = re.findall(r'id="token-\d" title="(\d+)% .*?hsl\(210,80%,(\d+)%\)', page)
    assert colours == [("50", "80"), ("0", "98"), ("100", "62")]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_report_in_a_browser_shows_the_layers_of_a_token(tmp_path):
    path = html_report.write_run(run_folder(tmp_path / "run"), "python run.py")
    plain = browse(path.as_uri())
    assert '<div id="layers"></div>' in plain and plain.count('class="token"') == 3
    named = browse(path.as_uri() + "#token-1")
    panel = named[named.index('<div id="layers">') : named.index("<script")]
    assert "<b>&lt;/script&gt;</b>, token 1" in panel and panel.count("<rect") == 4
    shown = browse(path.as_uri() + "#token-0")
    assert "<title>layer 1: 100%</title>" in shown and "<title>layer 2: 50%</title>" in shown


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_pointing_at_a_token_shows_its_layers(tmp_path):
    path = html_report.write_run(run_folder(tmp_path / "run"), "python run.py")
    point = 'document.getElementById("token-2").dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));'
    path.write_text(path.read_text().replace("</body>", f"<script>{point}</script></body>"))
    assert "<b> union</b>, token 2" in browse(path.as_uri())


def test_report_of_a_sweep_lists_every_job_with_its_failures(tmp_path):
    common = {"command": "python run.py -m", "run_id": "r"}
    good = common | {"status": "finished", "routed_perplexity": 40.0, "dense_perplexity": 20.0, "skipped_params": 0.5}
    bad = common | {"status": "failed", "error": "ValueError", "message": "x < y"}
    for name, row in (("10-b", bad), ("9-a", good), ("9-a/lora", good | {"routed_perplexity": 30.0})):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "row.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "9-a" / "report.html").write_text("x")
    page = html_report.write_sweep(tmp_path).read_text()
    assert page.index("9-a") < page.index("9-a/lora") < page.index("10-b")
    assert "failed: ValueError: x &lt; y" in page and 'href="9-a/report.html"' in page and "10-b/report" not in page
    circles = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', page)]
    assert [x for x, _ in circles] == [320.0, 320.0] and circles[0][1] < circles[1][1] < 300
    assert 'y1="300.0" y2="300.0" class="dense"' in page
    if CHROMIUM:
        assert browse((tmp_path / "report.html").as_uri()).count("<circle") == 2


def test_command_makes_either_report_again(tmp_path, capsys):
    folder = run_folder(tmp_path / "sweep" / "0-run")
    row = {"command": "python run.py x=1", "status": "finished", "run_id": "r"}
    (folder / "row.jsonl").write_text(json.dumps(row) + "\n")
    html_report.main([str(folder)])
    html_report.main([str(tmp_path / "sweep")])
    assert "python run.py x=1" in (folder / "report.html").read_text()
    assert 'href="0-run/report.html"' in (tmp_path / "sweep" / "report.html").read_text()
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="holds neither"):
        html_report.main([str(tmp_path / "empty")])


def test_a_run_and_its_sweep_leave_their_reports_and_log_them(cli):
    process = cli("-m", *TINY, "logger=wandb", "method.attn_group_size=1,3", "stage.dial_curve=true")
    assert process.returncode == 2, "attn_group_size=3 is refused"
    (sweep,) = (cli.folder / "outputs" / "sweeps").iterdir()
    page = (sweep / "report.html").read_text()
    assert "attn_group_size=3" in page and 'href="0-tiny/report.html"' in page and page.count("<circle") == 1
    (run,) = (path for path in sweep.iterdir() if path.name.startswith("0-"))
    report = json.loads((run / "report.json").read_text())
    assert (run / "report.html").read_text().count('class="token"') == len(report["tokens"]["tokens"]) == 64
    points = report["dial_curve"]["points"]
    assert len(points) == 17 and points[0]["sparsity_total"] < points[-1]["sparsity_total"]
    assert (run / "dial_curve.png").read_bytes().startswith(PNG)
    for folder in (run, sweep):
        assert any(row.get("report._type") == "html-file" for row in OfflineRun(folder).history)
    assert OfflineRun(sweep).run.job_type == "sweep" and OfflineRun(sweep).exit_code == 1


def test_pictures_of_the_committed_rows(tmp_path):
    figures.main(["--rows", str(DEFAULT_ROWS), "--out", str(tmp_path)])
    for name in ("quality_smollm2.png", "layout_layers_smollm2.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_speed_is_that_of_the_run_itself():
    folders = [{"output_dir": f"outputs/x/{name}"} for name in ("r1", "r1/lora")]
    quality = pd.DataFrame({"config": folders, "routed_perplexity": [40.0, 50.0]})
    common = {"masks": "learned", "phase": "decode"}
    measurements = [common | {"tokens": t, "speedup_over_engine_dense": s} for t, s in ((1024, 1.2), (8192, 1.5))]
    measurements.append({"phase": "decode", "tokens": 32768, "speedup_over_engine_dense": 1.0})
    config = {"bench": {"checkpoint": "outputs/x/r1/checkpoint"}}
    rows = pd.DataFrame([{"action": "latency", "config": config, "measurements": measurements}])
    assert with_speed(rows, quality) == [(1.5, 40.0)]


def test_dial_curve_draws_its_points(tmp_path):
    points = [{"sparsity_total": s, "skipped_params": s / 2, "routed_perplexity": 20 + s} for s in (0.5, 0.1)]
    dial_curve.save({"dense_perplexity": 20.0, "points": points}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
