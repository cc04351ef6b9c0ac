"""`python -m wide_kernels.check`: every operator's cases compiled on this machine's GPU; one JSON line last.

--jobs N spreads the compilation over N processes; --match TEXT keeps the cases whose name contains it; --large adds
offsets past 2^31 elements (about 20 GB of memory). `sanitize` runs some of them under compute-sanitizer.
"""

import argparse
import importlib
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from ._testing import Case, Verdict, check_case


def operator_modules() -> list[str]:
    """Names of the modules beside this one that hold `cases`: a file is enough to be found."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [file.stem for file in files if "\ndef cases(" in file.read_text()]


def all_cases(match: str = "") -> list[Case]:
    """The cases of every operator whose name contains `match`."""
    modules = [importlib.import_module(f"wide_kernels.{name}") for name in operator_modules()]
    return [case for module in modules for case in module.cases() if match in case.name]


def run_share(match: str, share: int, num_shares: int) -> list[Verdict]:
    """Every `num_shares`-th case in each of its dtypes; an exception is a failed verdict."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    verdicts = []
    for case in all_cases(match)[share::num_shares]:
        for dtype in case.dtypes:
            try:
                verdicts.append(check_case(case, "cuda", dtype))
            except Exception as error:  # a case that dies is a row, not the end of the run
                label = str(dtype).removeprefix("torch.")
                verdicts.append(Verdict(case.name, label, float("inf"), 0.0, False, repr(error)[:300]))
    return verdicts


def run_large() -> list[Verdict]:
    """Activations of 151,000 tokens x 14,336 channels: more than 2^31 elements; first, middle and last rows."""
    from ._problems import Problem
    from .dispatch import Plan

    verdicts = []
    plans = {"gemm_mn": Plan("skip", (128, 128, 64, 16, 8, 3)), "gate_up": Plan("skip", (128, 128, 64, 16, 8, 3)),
             "gemm_k": Plan("skip", (128, 128, 64, 5, 16, 8, 3))}  # fmt: skip
    for operator, outputs, inputs in (("gemm_mn", 14336, 64), ("gate_up", 14336, 64), ("gemm_k", 64, 14336)):
        for plan in (plans[operator], Plan("dense")):
            keep_mask = torch.ones(151_000, 28, dtype=torch.bool, device="cuda")
            problem = Problem(operator, outputs, inputs, 512, keep_mask, plans={operator: plan})
            verdicts.append(problem.check())
            del problem
            torch.cuda.empty_cache()
    return verdicts


def main(argv: list[str]) -> int:
    """Run, print the failures, then one JSON line; exit status 1 when a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--match", default="")
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args(argv)
    if options.jobs == 1:
        verdicts = run_share(options.match, 0, 1)
    else:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            shares = [pool.submit(run_share, options.match, share, options.jobs) for share in range(options.jobs)]
            verdicts = [verdict for share in shares for verdict in share.result()]
    if options.large:
        verdicts += run_large()
    failed = [verdict for verdict in verdicts if not verdict.ok]
    for verdict in failed:
        print(f"{verdict.name} {verdict.dtype}: {verdict.reason}")
    worst = max((v.error / max(v.dense_error, 1e-9) for v in verdicts if v.ok and v.dense_error > 0), default=0.0)
    summary = {"checked": len(verdicts), "failed": len(failed), "worst_error_over_dense": round(worst, 3),
               "card": torch.cuda.get_device_name(), "torch": torch.__version__}  # fmt: skip
    print(json.dumps(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
