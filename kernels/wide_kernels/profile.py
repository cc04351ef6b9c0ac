"""`python -m wide_kernels.profile`: hardware counters of single kernels by Nsight Compute; a table, one JSON line last.

Each problem is warmed up, then every kernel of one call (routing layout included) is measured: cold caches, clocks
left alone. Times are those of serialized kernels, so compare shares with them, and speeds with `bench`. --match TEXT
keeps the problems whose name contains it. A counter that this version of ncu does not know is null.
"""

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton

from ._attention_problems import AttentionProblem
from ._models import MODELS
from ._problems import Problem, exact_keep_mask
from ._tools import cuda_tool, run_tool, tool_version
from .timing import provenance

SECTIONS = ("LaunchStats", "Occupancy", "SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats")
# key of a row: (factor, counters); the first counter that was measured counts, in base units times the factor
COUNTERS: dict[str, tuple[float, tuple[str, ...]]] = {
    "ms": (1e-6, ("gpu__time_duration.sum",)),
    "sm_mhz": (1e-6, ("sm__cycles_elapsed.avg.per_second", "gpc__cycles_elapsed.avg.per_second",
                      "smsp__cycles_elapsed.avg.per_second")),
    "tensor_pct": (1, ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
                       "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active")),
    "dram_read_mb": (1e-6, ("dram__bytes_read.sum", "dram__bytes_op_read.sum")),
    "dram_write_mb": (1e-6, ("dram__bytes_write.sum", "dram__bytes_op_write.sum")),
    "dram_pct": (1, ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
                     "dram__throughput.avg.pct_of_peak_sustained_elapsed")),
    "l2_hit_pct": (1, ("lts__t_sector_hit_rate.pct",)),
    "l2_pct": (1, ("lts__throughput.avg.pct_of_peak_sustained_elapsed",)),
    "occupancy_pct": (1, ("sm__warps_active.avg.pct_of_peak_sustained_active",)),
    "registers": (1, ("launch__registers_per_thread",)),
    "shared_kb": (1 / 1024, ("launch__shared_mem_per_block", "launch__shared_mem_per_block_dynamic")),
}  # fmt: skip
# reasons why warps wait; "selected" is the one that issues
STALL = re.compile(r"smsp__average_warps_issue_stalled_(?!selected|\w+_not_issued)(\w+)_per_issue_active\.ratio")
# factors to nanoseconds, cycles a second and bytes
UNITS = {"us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9, "cycle/nsecond": 1e9,
         "cycle/usecond": 1e6, "Mhz": 1e6, "MHz": 1e6, "Ghz": 1e9, "GHz": 1e9, "Kbyte": 1e3, "Mbyte": 1e6,
         "Gbyte": 1e9, "Kbyte/block": 1e3}  # fmt: skip
MARKER = "_next_problem_kernel"


@triton.jit
def _next_problem_kernel():
    """Does nothing: tells where the kernels of a problem begin."""


def _linear(operator: str, num_outputs: int, num_inputs: int, num_tokens: int) -> dict[str, Callable]:
    pruned = num_inputs if operator == "gemm_k" else num_outputs
    problem = Problem(operator, num_outputs, num_inputs, 512, exact_keep_mask(num_tokens, pruned // 512, 0.5))
    return {"ours": problem.variant(problem.ours)[0], "dense": problem.variant(problem.dense)[0]}


def _attention(operator: str, batch: int, queries: int, keys: int) -> dict[str, Callable]:
    model = MODELS["llama-3.1-8b"]
    shape = {"batch": batch, "queries": queries, "keys": keys, "H": model.num_heads, "K": model.num_kv_heads,
             "D": model.head_size}  # fmt: skip
    mask = exact_keep_mask(batch * queries, model.num_kv_heads, 0.5).view(batch, queries, model.num_kv_heads)
    problem = AttentionProblem(operator, shape, mask)
    return {"ours": problem.variant()[0]} | {name: calls[0] for name, calls in problem.dense().items()}


# Llama-3.1-8B shapes, half of the groups of a random mask skipped; name: maker and its arguments
PROBLEMS: dict[str, tuple] = {
    "gate G=512 T=4096": (_linear, "gemm_mn", 14336, 4096, 4096),
    "down G=512 T=8192": (_linear, "gemm_k", 4096, 14336, 8192),
    "o G=512 T=8192": (_linear, "gemm_k", 4096, 4096, 8192),
    "decode 16 x 2048": (_attention, "attention_decode", 16, 1, 2048),
    "decode 1 x 32768": (_attention, "attention_decode", 1, 1, 32768),
    "prefill 16384": (_attention, "attention_prefill", 1, 16384, 16384),
}


def run_problems(names: list[str]) -> None:
    """Inside the profiler: warm each call up, then open the profiler's range for one call of it."""
    _next_problem_kernel[(1,)]()
    for name in names:
        make, *sizes = PROBLEMS[name]
        for label, call in make(*sizes).items():
            call()
            call()
            torch.cuda.synchronize()
            print(f"problem: {name}: {label}", flush=True)
            torch.cuda.profiler.start()
            _next_problem_kernel[(1,)]()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def known_counters(tool: str) -> list[str]:
    """The names of COUNTERS that this ncu has on this card (it ends at an unknown one); launch data is in a section."""
    answer = subprocess.run([tool, "--query-metrics"], capture_output=True, text=True, timeout=60).stdout
    bases = {line.split()[0] for line in answer.splitlines() if "__" in line.split(" ")[0]}
    wanted = [name for _, names in COUNTERS.values() for name in names]
    return [name for name in wanted if name.split(".")[0] in bases]


def ncu_command(tool: str, log: Path, inside: list[str]) -> list[str]:
    """Nsight Compute around this module: only what lies in the profiler's range, one CSV line a kernel."""
    options = ["--profile-from-start", "off", "--clock-control", "none", "--target-processes", "application-only",
               "--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "function",
               "--log-file", str(log)]  # fmt: skip
    for section in SECTIONS:
        options += ["--section", section]
    counters = known_counters(tool)
    if counters:
        options += ["--metrics", ",".join(counters)]
    return [tool, *options, sys.executable, "-m", "wide_kernels.profile", "--inside", *inside]


def parse(text: str, labels: list[str]) -> list[dict]:
    """Rows of ncu's raw CSV page (names, units, then a line for each kernel), each under its problem's label.

    Raises ValueError when there is no table or it holds more problems than `labels`.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 2 or not lines[0].startswith('"ID"'):
        raise ValueError("ncu wrote no table")
    names, units, *kernels = csv.reader(lines)
    rows: list[dict] = []
    remaining, label = iter(labels), None
    for kernel in kernels:
        cells = dict(zip(names, zip(kernel, units, strict=False), strict=False))
        name = cells["Kernel Name"][0]
        if name.startswith(MARKER):
            label = next(remaining, None)
            if label is None:
                raise ValueError(f"ncu measured more problems than the {len(labels)} that were announced")
            continue
        rows.append({"problem": label, "kernel": name} | _counters(cells))
    return rows


def _counters(cells: dict[str, tuple[str, str]]) -> dict:
    row: dict = {}
    for key, (factor, names) in COUNTERS.items():
        found = [value for value in (_number(cells.get(name)) for name in names) if value is not None]
        row[key] = round(found[0] * factor, 5) if found else None
    stalls = {match.group(1): _number(cells[name]) for name in cells if (match := STALL.fullmatch(name))}
    known = {reason: value for reason, value in stalls.items() if value is not None}
    row["stalls"] = {reason: known[reason] for reason in sorted(known, key=lambda key: -known[key])[:3]}
    return row


def _number(cell: tuple[str, str] | None) -> float | None:
    """A cell in base units; None for a counter that is absent or "n/a"."""
    if cell is None:
        return None
    try:
        return float(cell[0].replace(",", "")) * UNITS.get(cell[1], 1)
    except ValueError:
        return None


def table(rows: list[dict]) -> Iterator[str]:
    """The rows for a reader, one line each, most important counters only."""
    columns = [key for key in COUNTERS if key != "dram_write_mb"]
    yield f"{'problem':24} {'kernel':34} " + " ".join(f"{key:>12}" for key in columns) + "  stalls"
    for row in rows:
        cells = " ".join(f"{'-' if row[key] is None else f'{row[key]:.4g}':>12}" for key in columns)
        stalls = " ".join(f"{reason} {value:.2f}" for reason, value in row["stalls"].items())
        yield f"{row['problem'] or '-':24} {row['kernel'][:34]:34} {cells}  {stalls}"


def main(argv: list[str]) -> int:
    """Profile, print and write; exit status 1 when ncu failed or a problem has no kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds until ncu is stopped")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    names = [name for name in PROBLEMS if options.match in name]
    if not names:
        parser.error(f"--match must be part of one of: {', '.join(PROBLEMS)}")
    if options.inside:
        run_problems(names)
        return 0
    tool = cuda_tool("ncu")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "kernels.csv"
        status, output = run_tool(ncu_command(tool, log, ["--match", options.match]), options.limit)
        text = log.read_text() if log.exists() else ""
    labels = re.findall(r"^problem: (.*)$", output, re.MULTILINE)
    try:
        rows = parse(text, labels)
    except ValueError as error:
        print(f"{error}\n{output[-4000:]}\n{text[-4000:]}")
        rows = []
    print("\n".join(table(rows)))
    missing = [label for label in labels if label not in {row["problem"] for row in rows}]
    about = provenance("python -m wide_kernels.profile " + " ".join(argv)) | {"method": "ncu, cold caches"}
    summary = {**about, "ncu": tool_version(tool), "status": status, "missing": missing}
    if options.out is not None:
        options.out.write_text(json.dumps({"about": summary, "rows": rows}))
    print(json.dumps(summary | {"rows": len(rows)}))
    return 0 if rows and status == 0 and not missing else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
