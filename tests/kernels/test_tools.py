"""The commands around NVIDIA's tools, with stand-ins for the tools: what they run and how their output is read."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"

from wide_kernels import profile, sanitize
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


# The shape of Nsight Compute's raw page: names, units, a line for each kernel; times in two units, an absent value.
RAW_PAGE = """\
==PROF== Connected to process 4711 (python3)
"ID","Process ID","Kernel Name","Grid Size","gpu__time_duration.sum","gpc__cycles_elapsed.avg.per_second",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","dram__bytes_read.sum","lts__t_sector_hit_rate.pct",\
"launch__registers_per_thread","launch__shared_mem_per_block",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_barrier_not_issued_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
"","","","","ns","cycle/second","%","byte","%","register/thread","byte/block","inst","inst","inst","inst","inst"
"0","4711","_next_problem_kernel","(1, 1, 1)","1,000","1980000000","0","0","0","16","1024","1","0","0","9","0"
"1","4711","_groups_kernel","(1, 32, 1)","5,120","1,980,000,000","0","131,072","80.5","40","2048","1","0","2","9","3"
"2","4711","_gemm_mn_kernel","(896, 1, 1)","391,000","1710000000","71.25","234,881,024","61","255","199680","0.5",\
"2.25","1","9","0.75"
"3","4711","_next_problem_kernel","(1, 1, 1)","1,000","1980000000","0","0","0","16","1024","1","0","0","9","0"
"4","4711","nvjet_tst_128x256","(132, 1, 1)","614,000","1500000000","n/a","","70","168","230400","0","n/a","","9",""
"""


def test_ncus_raw_page_becomes_rows_under_their_problems():
    lists, product, dense = profile.parse(RAW_PAGE, ["gate: ours", "gate: dense"])
    assert (lists["problem"], product["problem"], dense["problem"]) == ("gate: ours", "gate: ours", "gate: dense")
    assert lists["kernel"] == "_groups_kernel" and lists["ms"] == 0.00512
    assert product["ms"] == 0.391 and product["sm_mhz"] == 1710 and product["tensor_pct"] == 71.25
    assert product["dram_read_mb"] == 234.88102 and product["registers"] == 255 and product["shared_kb"] == 195
    assert list(product["stalls"].items()) == [("gmma", 2.25), ("barrier", 1.0), ("long_scoreboard", 0.75)]
    assert dense["tensor_pct"] is None and dense["dram_read_mb"] is None and dense["l2_pct"] is None
    assert dense["stalls"] == {"wait": 0.0} and dense["l2_hit_pct"] == 70
    lines = list(profile.table([lists, product, dense]))
    assert len(lines) == 4 and "gmma 2.25" in lines[2]


@pytest.mark.parametrize(
    ("unit", "text", "ms"),
    [("ns", "250,000", 0.25), ("us", "250", 0.25), ("usecond", "250", 0.25), ("ms", "0.25", 0.25)],
)
def test_counters_come_in_several_units(unit, text, ms):
    lines = ('"ID","Kernel Name","gpu__time_duration.sum"', f'"","","{unit}"', f'"1","kernel","{text}"')
    assert profile.parse("\n".join(lines), [])[0]["ms"] == ms


def test_pages_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="no table"):
        profile.parse("==ERROR== Failed to find metric", ["gate: ours"])
    with pytest.raises(ValueError, match="more problems"):
        profile.parse(RAW_PAGE, ["gate: ours"])


def test_ncu_is_asked_for_the_counters_it_knows(stand_in, tmp_path):
    answer = (
        "Device NVIDIA H200 (GH100)\\ngpu__time_duration    Counter  ns  time\\nlts__t_sector_hit_rate  Ratio  %  hits"
    )
    tool = stand_in("ncu", f"printf '{answer}\\n'")
    assert profile.known_counters(str(tool)) == ["gpu__time_duration.sum", "lts__t_sector_hit_rate.pct"]
    command = profile.ncu_command(str(tool), tmp_path / "log", ["--match", "gate"])
    assert command[command.index("--metrics") + 1] == "gpu__time_duration.sum,lts__t_sector_hit_rate.pct"
    assert command[command.index("--clock-control") + 1] == "none" and command[-2:] == ["--match", "gate"]
    assert "--metrics" not in profile.ncu_command(str(stand_in("old", "exit 1")), tmp_path / "log", [])


def test_profile_writes_rows_and_says_which_problem_has_none(stand_in, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.csv"
    page.write_text(RAW_PAGE)
    find = 'while [ "$1" != --log-file ]; do shift; done'
    stand_in(
        "ncu",
        f"""
        case "$1" in
        --version) echo 'Version 2025.3.1.0' ;;
        --query-metrics) echo 'gpu__time_duration Counter' ;;
        *) echo 'problem: gate: ours'; echo 'problem: gate: dense'; cat $EXTRA; {find}; cp {page} "$2" ;;
        esac""",
    )
    monkeypatch.setattr(profile, "provenance", lambda command: {"card": "none", "command": command})
    monkeypatch.setenv("EXTRA", "/dev/null")
    assert profile.main(["--match", "gate", "--out", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert [row["kernel"] for row in written["rows"]] == ["_groups_kernel", "_gemm_mn_kernel", "nvjet_tst_128x256"]
    assert written["about"]["ncu"] == "2025.3.1.0" and written["about"]["missing"] == []
    (tmp_path / "more").write_text("problem: down: ours\n")
    monkeypatch.setenv("EXTRA", str(tmp_path / "more"))
    assert profile.main(["--match", "gate"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["missing"] == ["down: ours"]
    with pytest.raises(SystemExit):
        profile.main(["--match", "no_such"])


def test_the_profilers_range_holds_a_marker_and_one_warm_call(monkeypatch, capsys):
    events = []

    class Marker:
        def __getitem__(self, grid):
            return lambda: events.append("marker")

    monkeypatch.setattr(profile, "_next_problem_kernel", Marker())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: events.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: events.append("stop"))
    calls = {name: partial(events.append, name) for name in ("ours", "dense")}
    monkeypatch.setattr(profile, "PROBLEMS", {"gate": (lambda size: calls if size == 3 else {}, 3)})
    profile.run_problems(["gate"])
    one = lambda name: [name, name, "start", "marker", name, "stop"]  # noqa: E731
    assert events == ["marker", *one("ours"), *one("dense")]
    assert capsys.readouterr().out.splitlines() == ["problem: gate: ours", "problem: gate: dense"]
