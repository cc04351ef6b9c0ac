"""Results rows: appended whole by many writers, read back past a torn line, saying what was asked and measured."""

import json
import math
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from wide import results

CONFIG = {
    "experiment_name": "e",
    "action": "pipeline",
    "model": {"name": "tiny"},
    "method": {"name": "wide", "sparsity": 0.25},
    "seed": 3,
    "output_dir": "outputs/e/1",
    "results_file": "outputs/results.jsonl",
    "logger": {"name": "csv"},
}
ENVIRONMENT = {"device": "cpu", "versions": {"torch": "2"}, "git_revision": None}


def base(**changes) -> dict:
    return results.base_row(CONFIG | changes, "run-1", "python run.py", ENVIRONMENT)


def write_rows(path: str, writer: int) -> None:
    for index in range(50):
        results.append_row(path, {"writer": writer, "index": index, "padding": "x" * 5000})


def test_rows_of_many_writers_stay_whole(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write_rows, args=(str(path), writer)) for writer in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted((row["writer"], row["index"]) for row in rows) == [(w, i) for w in range(8) for i in range(50)]


def test_a_torn_line_is_named_skipped_and_spoils_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    results.append_row(path, {"run_id": "a"})
    with open(path, "a") as file:
        file.write('{"run_id": "b", "sta')
    with pytest.warns(UserWarning, match=r"rows\.jsonl:2 is not a whole JSON row"):
        assert list(results.read_rows(path).run_id) == ["a"]
    with pytest.warns(UserWarning, match="torn row"):
        results.append_row(path, {"run_id": "c"})
    results.append_row(path, {"run_id": "d"})
    with pytest.warns(UserWarning, match=r"rows\.jsonl:2 "):
        assert list(results.read_rows(path).run_id) == ["a", "c", "d"]


def test_lines_that_are_json_but_no_row_are_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('12\n\n{"run_id": "a"}\n')
    with pytest.warns(UserWarning, match=r"rows\.jsonl:1 "):
        assert list(results.read_rows(path).run_id) == ["a"]


def test_line_separators_inside_a_text_do_not_tear_a_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"message": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert list(results.read_rows(path).message) == ["a\u2028b\x85c"]


def test_read_rows_takes_files_and_patterns_and_refuses_nothing_found(tmp_path):
    for name in ("a", "b"):
        results.append_row(tmp_path / f"{name}.jsonl", {"run_id": name})
    assert list(results.read_rows(str(tmp_path / "*.jsonl")).run_id) == ["a", "b"]
    assert list(results.read_rows([tmp_path / "b.jsonl", tmp_path / "a.jsonl"]).run_id) == ["b", "a"]
    with pytest.raises(ValueError, match="missing"):
        results.read_rows(tmp_path / "missing.jsonl")


def test_a_figure_that_is_not_finite_is_null_and_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    results.append_row(path, {"perplexity": math.inf, "gap": math.nan, "sparsity": 0.5})
    row = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row == {"perplexity": None, "gap": None, "sparsity": 0.5, "not_finite": ["gap", "perplexity"]}


def test_a_setting_that_is_not_finite_does_not_lose_the_row_of_a_refused_job(tmp_path):
    path, asked = tmp_path / "rows.jsonl", {"name": "wide", "sparsity": math.nan, "list": [1.0, math.inf]}
    row = results.failed(base(method=asked), ValueError("out of range"))
    results.append_row(path, row)
    stored = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert stored["config"]["method"] == {"name": "wide", "sparsity": None, "list": [1.0, None]}
    assert stored["not_finite"] == ["asked_sparsity", "config.method.list.1", "config.method.sparsity"]
    assert stored["status"] == "failed" and math.isnan(row["config"]["method"]["sparsity"]), "the caller's row is kept"


def test_a_row_says_what_was_asked_on_what_and_how_it_ended():
    row = results.finished(base(), {"routed_perplexity": 35.5})
    expected = {
        "schema_version": 1,
        "run_id": "run-1",
        "experiment": "e",
        "action": "pipeline",
        "model": "tiny",
        "method": "wide",
        "asked_sparsity": 0.25,
        "seed": 3,
        "command": "python run.py",
        "device": "cpu",
        "git_revision": None,
        "status": "finished",
        "routed_perplexity": 35.5,
    }
    assert {key: row[key] for key in expected} == expected
    assert row["started"] <= row["finished"]


def test_a_failed_row_has_the_class_and_the_first_line_of_the_error():
    row = results.failed(base(), RuntimeError("out of memory\nlong trace"))
    assert (row["status"], row["error"], row["message"]) == ("failed", "RuntimeError", "out of memory")


def test_config_hash_is_of_what_was_asked_only():
    same = base(output_dir="outputs/e/2", logger={"name": "none"}, results_file="other.jsonl")
    assert same["config_hash"] == base()["config_hash"]
    assert base(seed=4)["config_hash"] != base()["config_hash"]
    assert base(method={"name": "wide", "sparsity": 0.3})["config_hash"] != base()["config_hash"]


def test_environment_names_versions_and_device_but_no_home_and_no_secret(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-mine")
    report = results.environment_report()
    text = json.dumps(report)
    assert {"torch", "transformers", "lightning", "hydra-core"} <= set(report["versions"])
    assert report["device"] and report["num_cpus"] >= 1
    assert str(Path.home()) not in text and str(ROOT) not in text and "secret-of-mine" not in text


def test_git_revision_is_none_outside_a_checkout(tmp_path):
    code = (ROOT / "wide" / "results.py").read_text()
    (tmp_path / "results.py").write_text(code)
    line = "import results; print(results.git_revision())"
    out = subprocess.run([sys.executable, "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "None"
