"""The commands around NVIDIA's tools, with stand-ins for the tools: what they run and how their output is read."""

import json
import os
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"

from wide_kernels import sanitize
from wide_kernels._cases import MASKS
from wide_kernels._tools import cuda_tool, run_tool, tool_version
from wide_kernels.dispatch import TABLE_FILE

RULES = tuple(json.loads(TABLE_FILE.read_text())["NVIDIA H200"]["rules"])


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a shell script on PATH under a tool's name."""

    def make(name: str, script: str) -> Path:
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tool

    return make


def test_a_tool_is_taken_from_path_then_from_the_toolkit(stand_in, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    with pytest.raises(FileNotFoundError, match="CUDA_HOME"):
        cuda_tool("some-tool")
    (tmp_path / "toolkit" / "bin").mkdir(parents=True)
    (tmp_path / "toolkit" / "bin" / "some-tool").symlink_to("/bin/sh")
    assert cuda_tool("some-tool") == str(tmp_path / "toolkit" / "bin" / "some-tool")
    tool = stand_in("some-tool", "echo Copyright; echo 'Version 2025.3.1.0 (build 1)'")
    assert cuda_tool("some-tool") == str(tool)
    assert tool_version(str(tool)) == "2025.3.1.0"
    assert tool_version(str(stand_in("mute", ""))) is None


def test_a_tool_past_its_time_ends_with_its_children(stand_in):
    tool = stand_in("slow", "echo begun; sleep 60 & wait")
    assert run_tool([str(tool)], 0.5) == (None, "begun\n")
    assert run_tool(["sh", "-c", "echo $COLOUR >&2; exit 3"], 5, COLOUR="red") == (3, "red\n")


def test_sanitized_cases_cover_every_operator_and_route_and_stay_few():
    cases = sanitize.chosen_cases("", RULES)
    names = {case.name for case in cases}
    assert set(sanitize.SMALL) <= names and 30 < len(cases) < 45
    for operator in ("gemm_mn", "gate_up", "gemm_k"):
        for route in ("skip", "one_token"):
            assert any(name.startswith(f"{operator}-tile_{route}") for name in names)
    tiles = {(rule["operator"], *rule["config"][:3]) for rule in RULES if rule["route"] == "skip" and rule["config"]}
    for operator, *tile in tiles:
        assert any(name.startswith(f"{operator}-tile_skip_{'_'.join(map(str, tile))}") for name in names)


def test_match_takes_the_cases_of_check_and_refuses_a_word_that_no_case_has():
    found = {case.name for case in sanitize.chosen_cases("gemm_k-mask_", RULES)}
    assert found == {f"gemm_k-mask_{kind}" for kind in MASKS}
    with pytest.raises(ValueError, match="no_such"):
        sanitize.chosen_cases("no_such", RULES)


def test_operators_run_until_the_time_is_up_and_a_dead_one_is_named():
    cases = sanitize.chosen_cases("gate_up-few_mask_none", RULES)
    assert sanitize.run_operators(cases, "cpu", 60)["ran"] == len(cases) == 2
    assert sanitize.run_operators(cases, "cpu", -1) == {"ran": 0, "failed": [], "left": [case.name for case in cases]}
    broken = sanitize.planted_case()
    failed = sanitize.run_operators([broken], "no_such_device", 60)["failed"]
    assert len(failed) == 1 and failed[0].startswith("planted: ")


@pytest.mark.parametrize(
    ("lines", "errors", "ran"),
    [
        (['{"ran": 4, "failed": [], "left": []}', "========= ERROR SUMMARY: 0 errors"], 0, 4),
        (['{"ran": 4, "failed": [], "left": []}', "========= ERROR SUMMARY: 1 error"], 1, 4),
        (["========= Invalid __global__ read of size 16 bytes"], None, 0),
    ],
)
def test_memchecks_summary_is_read(stand_in, monkeypatch, tmp_path, lines, errors, ran):
    echo = "; ".join(f"echo '{line}'" for line in lines)
    stand_in(
        "compute-sanitizer",
        f'{echo}; echo "$@" > {tmp_path}/seen; echo $PYTORCH_NO_CUDA_MEMORY_CACHING >> {tmp_path}/seen',
    )
    row = sanitize.run_memcheck(["--match", "few"], 10)
    assert (row["errors"], row["ran"]) == (errors, ran)
    seen = (tmp_path / "seen").read_text()
    assert "--tool memcheck" in seen and "wide_kernels.sanitize --inside --match few" in seen and seen.endswith("\n1\n")
