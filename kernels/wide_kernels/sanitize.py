"""`python -m wide_kernels.sanitize`: operators under compute-sanitizer's memcheck; one JSON line last.

A few of the cases of `check` (each operator and route, odd sizes, extreme masks) and every tile of this card's
dispatch table, in bfloat16. They first run in --jobs processes without the tool, which compiles them and checks their
values; then once more under memcheck, where every allocation is its own and padded, so that an access past its end
is seen. --match TEXT takes every case of `check` whose name contains it instead. No case starts after --limit seconds.
--plant runs a kernel with a fault in its place, which shows that the tool sees one.
"""

import argparse
import json
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
import triton.language as tl

from ._cases import _case
from ._testing import Case, Inputs, check_case
from ._tools import cuda_tool, run_tool, tool_version
from .check import all_cases
from .dispatch import Plan, card_rules
from .timing import provenance

SMALL = (
    "gemm_mn-odd_everything", "gemm_mn-schedule_2_bands_of_2_37_tokens", "gemm_mn-mask_none",
    "gemm_mn-strided_nan_margin", "gemm_mn-dense_route", "gate_up-last_group_narrower",
    "gate_up-schedule_1_bands_of_1_17_tokens", "gate_up-few_odd_everything_1", "gemm_k-odd_everything",
    "gemm_k-mask_one_token_active", "gemm_k-sets_of_3_32_bit", "gemm_k-dense_undefined",
    "attention_prefill-smollm_9_heads", "attention_prefill-mask_one_each", "attention_prefill-left_padding",
    "attention_prefill-window_chunk_padding", "attention_prefill-dense_strided", "attention_decode-five_groups",
    "attention_decode-an_empty_row", "attention_decode-mask_none", "attention_decode-window_20",
    "attention_decode-dense_route",
)  # fmt: skip
# T tokens, the free axis, groups, group size, channels: rows, columns and the last group end inside a tile
MN_SIZE, K_SIZE = (150, 192, 2, 300, 584), (150, 264, 9, 64, 576)
FEW_TOKENS = 3
BAND = 3  # place of the band in a "skip" config of gemm_mn and gate_up; it only orders the tiles


def tile_cases(rules: tuple[dict, ...]) -> list[Case]:
    """One case for each operator, route and tile of the linear operators among `rules` (of `dispatch`)."""
    made: dict[str, Case] = {}
    for rule in rules:
        operator, route, config = rule["operator"], rule["route"], tuple(rule["config"])
        if route == "dense" or not config:
            continue
        tile = config if operator == "gemm_k" or route == "one_token" else config[:BAND] + config[BAND + 1 :]
        name = f"tile_{route}_{'_'.join(map(str, tile))}"
        tokens = FEW_TOKENS if route == "one_token" else None
        size = K_SIZE if operator == "gemm_k" else MN_SIZE
        case = _case(operator, name, size=size, tokens=tokens, plan=Plan(route, config), skipped="zeros")
        made.setdefault(case.name, case)
    return list(made.values())


def chosen_cases(match: str, rules: tuple[dict, ...]) -> list[Case]:
    """SMALL and the tiles, or every case whose name contains `match`. Raises ValueError when there is none."""
    tiles = tile_cases(rules)
    if not match:
        return [case for case in all_cases() if case.name in SMALL] + tiles
    cases = all_cases(match) + [case for case in tiles if match in case.name]
    if not cases:
        raise ValueError(f"no case has {match!r} in its name")
    return cases


@triton.jit
def _overrun_kernel(x, out, size, BLOCK: tl.constexpr):
    place = size + tl.arange(0, BLOCK)
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + place))


def planted_case() -> Case:
    """A read of eight elements past the end of a buffer: what memcheck has to find."""

    def overrun(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(8, dtype=x.dtype, device=x.device)
        _overrun_kernel[(1,)](x, out, x.numel(), BLOCK=8)
        return out

    def inputs(generator, device, dtype) -> Inputs:
        return {"x": torch.randn(64, generator=generator).to(device, dtype)}

    return Case("planted", inputs, overrun, overrun, overrun)


def run_plain(match: str, share: int, num_shares: int) -> list[str]:
    """Every `num_shares`-th case without the tool: compiled into Triton's cache; what was wrong."""
    wrong = []
    for case in chosen_cases(match, card_rules())[share::num_shares]:
        try:
            verdict = check_case(case, "cuda", torch.bfloat16)
            if not verdict.ok:
                wrong.append(f"{case.name}: {verdict.reason}")
        except Exception as error:  # a case that dies is a finding, not the end of the run
            wrong.append(f"{case.name}: {error!r}"[:300])
    return wrong


def run_operators(cases: list[Case], device: str, limit_s: float) -> dict:
    """Each case's operator once, until `limit_s` seconds have passed: names that ran, that raised, that were left."""
    started, ran, failed = time.monotonic(), [], []
    for case in cases:
        if time.monotonic() - started > limit_s:
            break
        try:
            inputs = case.make_inputs(torch.Generator().manual_seed(0), torch.device(device), torch.bfloat16)
            with torch.no_grad():
                case.op(**inputs)
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{case.name}: {error!r}"[:300])
        ran.append(case.name)
    return {"ran": len(ran), "failed": failed, "left": [case.name for case in cases[len(ran) :]]}


def memcheck_command(tool: str, inside: list[str]) -> list[str]:
    """compute-sanitizer around this module; only accesses are judged, and a faulty kernel ends alone."""
    options = ["--tool", "memcheck", "--padding", "256", "--report-api-errors", "no", "--launch-timeout", "0",
               "--destroy-on-device-error", "kernel", "--target-processes", "application-only"]  # fmt: skip
    return [tool, *options, sys.executable, "-m", "wide_kernels.sanitize", *inside]


def num_errors(output: str) -> int | None:
    """The number in memcheck's summary line, None when the run did not get there."""
    found = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    return int(found[-1]) if found else None


def run_memcheck(inside: list[str], limit_s: float) -> dict:
    """The chosen cases under memcheck: `run_operators`' report and the number of errors (None: it did not finish)."""
    command = memcheck_command(cuda_tool("compute-sanitizer"), ["--inside", *inside])
    _, output = run_tool(command, limit_s + 60, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    report = [line for line in output.splitlines() if line.startswith('{"ran"')]
    found = {"errors": num_errors(output)} | (json.loads(report[-1]) if report else {"ran": 0})
    if found["errors"] != 0 or not report:
        print(output[-8000:])
    return found


def main(argv: list[str]) -> int:
    """Run, write the row and print it; exit status 1 on errors, wrong values or when nothing was checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=80.0, help="seconds under memcheck")
    parser.add_argument("--plant", action="store_true", help="only a kernel that reads past its end: must be found")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.inside:
        cases = [planted_case()] if options.plant else chosen_cases(options.match, card_rules())
        print(json.dumps(run_operators(cases, "cuda", options.limit)))
        return 0
    started, wrong = time.monotonic(), []
    if not options.plant:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            shares = [pool.submit(run_plain, options.match, share, options.jobs) for share in range(options.jobs)]
            wrong = [line for share in shares for line in share.result()]
    inside = ["--match", options.match, "--limit", str(options.limit)] + ["--plant"] * options.plant
    row = {"tool": "memcheck", "wrong": wrong} | run_memcheck(inside, options.limit)
    row["seconds"] = round(time.monotonic() - started, 1)
    about = provenance("python -m wide_kernels.sanitize " + " ".join(argv))
    row |= about | {"method": "memcheck", "sanitizer": tool_version(cuda_tool("compute-sanitizer"))}
    if options.out is not None:
        options.out.write_text(json.dumps(row) + "\n")
    print(json.dumps(row))
    return 0 if row["ran"] and row["errors"] == 0 and not wrong and not row["failed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
