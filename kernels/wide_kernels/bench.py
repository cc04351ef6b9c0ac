"""`python -m wide_kernels.bench`: operators against the dense library, a human table first, one JSON line last.

Cold cache (rotating buffers), layout included, correctness in the same run: a row whose check is red shows no
speed. Beside each: the roofline of the kept work from this card's measured matrix and copy rates, a naive
gather-compute-scatter and torch._grouped_mm (--baselines). Random masks, or recorded ones: --mask FILE.npz or
FILE.safetensors holding boolean [tokens, groups] arrays; each array with a fitting number of groups makes a row.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from ._models import MODELS, ffn_shapes, k_shapes, mn_shapes
from ._problems import OPERATORS, Problem
from .dispatch import choose
from .layout import routing_layout
from .timing import measure, measure_eager, provenance

TOKENS = (1, 2, 4, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SPARSITIES = (0.0, 0.3, 0.5, 0.7)


def shapes_of(operator: str) -> list[dict]:
    """The model shapes of one operator."""
    return {"gemm_mn": mn_shapes, "gemm_k": k_shapes, "gate_up": ffn_shapes, "ffn": ffn_shapes}[operator]()


def ceilings() -> tuple[float, float]:
    """Measured FLOP and bytes per millisecond of this card: an 8192-cube bf16 product and a 4 GB copy."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    times = measure({"product": [lambda: a @ b] * 4, "copy": [lambda: target.copy_(source)] * 2})
    return 2 * 8192**3 / times["product"], 2 * source.numel() * 4 / times["copy"]


def recorded_masks(path: Path) -> dict[str, torch.Tensor]:
    """Boolean [tokens, groups] arrays of an .npz or .safetensors file by name."""
    if path.suffix == ".npz":
        import numpy

        return {name: torch.from_numpy(array).bool() for name, array in numpy.load(path).items()}
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return {name: mask.bool() for name, mask in load_file(path).items()}
    raise ValueError(f"a mask file is .npz or .safetensors, got {path.name!r}")


def masks(
    num_tokens: int, num_groups: int, sparsity: float, recorded: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The masks of one shape: one random, or every recorded one that fits (repeated or cut to `num_tokens`)."""
    if not recorded:
        generator = torch.Generator("cuda").manual_seed(1)
        return {"random": torch.rand(num_tokens, num_groups, device="cuda", generator=generator) >= sparsity}
    fitting = {name: mask for name, mask in recorded.items() if mask.shape[1] == num_groups and len(mask)}
    return {name: mask.repeat(-(-num_tokens // len(mask)), 1)[:num_tokens].cuda() for name, mask in fitting.items()}


def bench_row(case: Problem, limits: tuple[float, float], baselines: bool) -> dict:
    """Check, then time, one problem."""
    verdict = case.check()
    layout = routing_layout(case.keep_mask, case.keep_ratio)
    x, weights = case.sets[0]
    operators = ("gate_up", "gemm_k") if case.operator == "ffn" else (case.operator,)
    plans = {name: choose(name, x, weights[0], layout, case.group_size) for name in operators}
    row = {
        "operator": case.operator, "N": case.num_outputs, "K": case.num_inputs, "G": case.group_size,
        "tokens": case.keep_mask.shape[0], "sparsity": round(1 - case.keep_ratio, 3),
        "route": "+".join(plan.route for plan in plans.values()),
        "config": [list(plan.config) for plan in plans.values()],
        "correct": verdict.ok, "error_over_dense": round(verdict.error / max(verdict.dense_error, 1e-9), 3),
        "limit_ms": round(case.roofline_ms(*limits), 5),
    }  # fmt: skip
    if not verdict.ok:
        return row | {"reason": verdict.reason}
    times = measure({"dense": case.variant(case.dense), "ours": case.variant(case.ours)})
    row |= {"dense_ms": round(times["dense"], 5), "ours_ms": round(times["ours"], 5)}
    row["speedup"] = round(times["dense"] / times["ours"], 3)
    if baselines:
        row["naive_ms"] = round(measure_eager(case.naive), 5)
        grouped = case.grouped()
        row["grouped_mm_ms"] = round(measure_eager(grouped), 5) if grouped is not None else None
    return row


def print_row(row: dict) -> None:
    """One line of the human table."""
    head = f"{row['model']:13} {row['operator']:8} {row['site']:5} G={row['G']:<4} T={row['tokens']:<6}"
    head += f" s={row['sparsity']:<5}"
    if not row["correct"]:
        print(f"{head} WRONG {row['reason']}", flush=True)
        return
    extra = "".join(f" {key[:-3]} {row[key]:.4f}" for key in ("naive_ms", "grouped_mm_ms") if row.get(key))
    print(f"{head} {row['mask']:8} {row['route']:16} dense {row['dense_ms']:.4f} ours {row['ours_ms']:.4f} "
          f"limit {row['limit_ms']:.4f} ms  x{row['speedup']:.3f}{extra}", flush=True)  # fmt: skip


def main(argv: list[str]) -> int:
    """Sweep, print, and write every row; exit status 1 when a check was red."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", nargs="+", default=list(OPERATORS), choices=OPERATORS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--groups", nargs="+", type=int, default=None, help="only these group widths")
    parser.add_argument("--mask", type=Path, default=None)
    parser.add_argument("--baselines", action="store_true")
    parser.add_argument("--skipped", choices=("zeros", "undefined"), default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(argv)
    limits = ceilings()
    recorded = recorded_masks(options.mask) if options.mask else {}
    about = provenance("python -m wide_kernels.bench " + " ".join(argv))
    about |= {"tflops": round(limits[0] / 1e9, 1), "tb_per_s": round(limits[1] / 1e9, 3)}
    rows = []
    for operator in options.ops:
        for shape in shapes_of(operator):
            if shape["model"] not in options.models or (options.groups and shape["G"] not in options.groups):
                continue
            pruned = shape["K"] if operator == "gemm_k" else shape["N"]
            for tokens in options.tokens:
                for sparsity in options.sparsity if not recorded else (0.0,):
                    for name, mask in masks(tokens, pruned // shape["G"], sparsity, recorded).items():
                        case = Problem(operator, shape["N"], shape["K"], shape["G"], mask, skipped=options.skipped)
                        row = shape | {"mask": name} | bench_row(case, limits, options.baselines)
                        rows.append(row)
                        print_row(row)
                        if options.out is not None:
                            options.out.write_text(json.dumps({"about": about, "rows": rows}))
    slow = [row["speedup"] for row in rows if "speedup" in row]
    wrong = sum(not row["correct"] for row in rows)
    summary = {
        **about,
        "rows": len(rows),
        "wrong": wrong,
        "slowest": min(slow, default=None),
        "fastest": max(slow, default=None),
    }
    print(json.dumps(summary))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
