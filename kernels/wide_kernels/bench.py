"""`python -m wide_kernels.bench`: operators against the dense library, a human table first, one JSON line last.

Cold cache (rotating buffers), layout included, correctness in the same run: a row whose check is red shows no
speed. Beside each: the roofline of the kept work from this card's measured matrix rate and read rate, and, with
--baselines, a naive gather-compute-scatter and torch._grouped_mm in the same run. Attention rows name the faster
library backend. Random masks hold exactly the asked share; or recorded ones: --masks FILE.npz or FILE.safetensors
with boolean [tokens, groups] or [layers, tokens, groups] arrays; each with a fitting number of groups makes a row.
--sweep is every model, token count, group width and sparsity (hours); without it the shapes of --models and so on.
--clocks sustained times on a busy card, at the clock that its power limit allows a long run, and takes the limits
there too; each row holds the clock.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch

from . import _attention_problems
from ._attention_problems import AttentionProblem
from ._models import MODELS, attention_shapes, ffn_shapes, k_shapes, mn_shapes
from ._problems import OPERATORS, Problem, exact_keep_mask
from .dispatch import choose
from .layout import routing_layout
from .timing import CLOCKS, Variant, measure_at, measure_eager, provenance

TOKENS = (1, 2, 4, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SPARSITIES = (0.0, 0.3, 0.5, 0.7)


def shapes_of(operator: str) -> list[dict]:
    """The model shapes of one operator."""
    return {"gemm_mn": mn_shapes, "gemm_k": k_shapes, "gate_up": ffn_shapes, "ffn": ffn_shapes}[operator]()


def ceilings(clocks: str) -> tuple[float, float]:
    """Measured FLOP and bytes per millisecond of this card: an 8192-cube bf16 product and a cold one-row product.

    The one-row product reads its weight and writes next to nothing, as one token does; a copy is slower.
    """
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weights = [torch.randn(28672, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    products: Variant = [partial(torch.nn.functional.linear, a[:1], weight) for weight in weights]
    times = measure_at(clocks, {"product": [lambda: a @ b] * 4})[0] | measure_at(clocks, {"read": products})[0]
    return 2 * 8192**3 / times["product"], 2 * weights[0].numel() / times["read"]


def recorded_masks(path: Path) -> dict[str, torch.Tensor]:
    """Boolean [tokens, groups] masks of an .npz or .safetensors file by name, one for each layer of a 3-d array."""
    if path.suffix == ".npz":
        import numpy

        arrays = {name: torch.from_numpy(array) for name, array in numpy.load(path).items()}
    elif path.suffix == ".safetensors":
        from safetensors.torch import load_file

        arrays = load_file(path)
    else:
        raise ValueError(f"a mask file is .npz or .safetensors, got {path.name!r}")
    masks: dict[str, torch.Tensor] = {}
    for name, array in arrays.items():
        if array.dim() not in (2, 3):
            raise ValueError(f"mask {name!r} must be [tokens, groups] or [layers, tokens, groups], got {array.shape}")
        layers = array.bool() if array.dim() == 3 else array.bool()[None]
        masks |= {f"{name}.{index}" if len(layers) > 1 else name: mask for index, mask in enumerate(layers)}
    return masks


def masks(
    num_tokens: int, num_groups: int, sparsity: float, recorded: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The masks of one shape: one random, or every recorded one that fits (repeated or cut to `num_tokens`)."""
    if not recorded:
        return {"random": exact_keep_mask(num_tokens, num_groups, 1 - sparsity)}
    fitting = {name: mask for name, mask in recorded.items() if mask.shape[1] == num_groups and len(mask)}
    return {name: mask.repeat(-(-num_tokens // len(mask)), 1)[:num_tokens].cuda() for name, mask in fitting.items()}


def bench_row(case: Problem, limits: tuple[float, float], baselines: bool, clocks: str) -> dict:
    """Check, then time, one problem."""
    verdict = case.check()
    layout = routing_layout(case.keep_mask, case.keep_ratio)
    x, weights = case.sets[0]
    operators = ("gate_up", "gemm_k") if case.operator == "ffn" else (case.operator,)
    plans = {name: choose(name, x, weights[0], layout, case.group_size) for name in operators}
    row = {
        "operator": case.operator, "N": case.num_outputs, "K": case.num_inputs, "G": case.group_size,
        "tokens": case.keep_mask.shape[0], "sparsity": round(1 - case.keep_ratio, 4),
        "union": round(case.keep_mask.any(0).float().mean().item(), 4),
        "route": "+".join(plan.route for plan in plans.values()),
        "config": [list(plan.config) for plan in plans.values()],
        "correct": verdict.ok, "error_over_dense": round(verdict.error / max(verdict.dense_error, 1e-9), 3),
        "limit_ms": round(case.roofline_ms(*limits), 5),
    }  # fmt: skip
    if not verdict.ok:
        return row | {"reason": verdict.reason}
    times, clock = measure_at(clocks, {"dense": case.variant(case.dense), "ours": case.variant(case.ours)})
    row |= {"dense_ms": round(times["dense"], 5), "ours_ms": round(times["ours"], 5)}
    row |= {"clocks": clocks, "sm_mhz": clock}
    row["speedup"] = round(times["dense"] / times["ours"], 3)
    return row | baseline_times(case) if baselines else row


def baseline_times(case: Problem) -> dict:
    """Milliseconds of the naive loop and of torch._grouped_mm; None where there is none, or where it is wrong."""
    row: dict = {}
    for name, call in (("naive", case.naive), ("grouped_mm", case.grouped())):
        right = None if call is None else case.check(call()).ok
        time = measure_eager(call) if call is not None and right else None
        row |= {f"{name}_ms": time if time is None else round(time, 5), f"{name}_correct": right}
    return row


def print_row(row: dict) -> None:
    """One line of the human table."""
    if "queries" in row:
        size = f"B={row['batch']:<3} Tq={row['queries']:<6} Tk={row['keys']:<6}"
    else:
        size = f"{row['site']:5} G={row['G']:<4} T={row['tokens']:<6}"
    head = f"{row['model']:13} {row['operator']:17} {size} s={row['sparsity']:<6}"
    if not row["correct"]:
        print(f"{head} WRONG {row['reason']}", flush=True)
        return
    way = row.get("backend", row.get("route"))
    extra = "".join(f" {key[:-3]} {row[key]:.4f}" for key in ("naive_ms", "grouped_mm_ms") if row.get(key))
    print(f"{head} {row['mask']:8} {way:16} dense {row['dense_ms']:.4f} ours {row['ours_ms']:.4f} "
          f"limit {row['limit_ms']:.4f} ms  x{row['speedup']:.3f} at {row['sm_mhz'] or '-'} MHz{extra}",
          flush=True)  # fmt: skip


def linear_rows(operator: str, options, limits: tuple[float, float], recorded: dict) -> Iterator[dict]:
    """Every chosen shape, token count, sparsity and mask of one linear operator or whole FFN."""
    for shape in shapes_of(operator):
        if shape["model"] not in options.models or (options.groups and shape["G"] not in options.groups):
            continue
        pruned = shape["K"] if operator == "gemm_k" else shape["N"]
        for tokens, sparsity in product(options.tokens, (0.0,) if recorded else options.sparsity):
            for name, mask in masks(tokens, pruned // shape["G"], sparsity, recorded).items():
                case = Problem(operator, shape["N"], shape["K"], shape["G"], mask, skipped=options.skipped)
                yield shape | {"mask": name} | bench_row(case, limits, options.baselines, options.clocks)


def attention_rows(operator: str, options, limits: tuple[float, float], recorded: dict) -> Iterator[dict]:
    """Every chosen shape, sparsity and mask of one attention operator."""
    for shape in attention_shapes(operator):
        if shape["model"] not in options.models:
            continue
        for sparsity in (0.0,) if recorded else options.sparsity:
            rows = shape["batch"] * shape["queries"]
            for name, mask in masks(rows, shape["K"], sparsity, recorded).items():
                mask = mask.view(shape["batch"], shape["queries"], shape["K"])
                case = AttentionProblem(operator, shape, mask, options.skipped or "zeros")
                yield shape | {"mask": name} | case.row(limits, options.clocks)


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    every = OPERATORS + _attention_problems.OPERATORS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list(every), choices=every)
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b"], choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 1024, 4096, 8192])
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.0, 0.5])
    parser.add_argument("--groups", nargs="+", type=int, default=None, help="only these group widths")
    parser.add_argument("--sweep", action="store_true", help="all models, 1..16k tokens, 0/30/50/70%%, all widths")
    parser.add_argument("--masks", type=Path, default=None)
    parser.add_argument("--baselines", action="store_true")
    parser.add_argument("--clocks", choices=CLOCKS, default="short", help="of a short or of a long run")
    parser.add_argument("--skipped", choices=("zeros", "undefined"), default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(argv)
    if options.sweep:
        options.models, options.tokens, options.sparsity = list(MODELS), list(TOKENS), list(SPARSITIES)
    return options


def main(argv: list[str]) -> int:
    """Measure, print, and write every row; exit status 1 when a check was red."""
    options = arguments(argv)
    recorded = recorded_masks(options.masks) if options.masks else {}
    limits = ceilings(options.clocks)
    about: dict[str, str | float] = dict(provenance("python -m wide_kernels.bench " + " ".join(argv)))
    about |= {"tflops": round(limits[0] / 1e9, 1), "tb_per_s": round(limits[1] / 1e9, 3),
              "clocks": options.clocks}  # fmt: skip
    rows = []
    for operator in options.ops:
        make = attention_rows if operator in _attention_problems.OPERATORS else linear_rows
        for row in make(operator, options, limits, recorded):
            rows.append(row)
            print_row(row)
            if options.out is not None:
                options.out.write_text(json.dumps({"about": about, "rows": rows}))
    speeds = [row["speedup"] for row in rows if "speedup" in row]
    wrong = sum(not row["correct"] for row in rows)
    extremes = {"slowest": min(speeds, default=None), "fastest": max(speeds, default=None)}
    print(json.dumps({**about, "rows": len(rows), "wrong": wrong, **extremes}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
