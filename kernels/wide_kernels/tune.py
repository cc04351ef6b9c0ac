"""`python -m wide_kernels.tune`: measure this card and write its entry of the dispatch table.

For each operator, weight size and group width, at a random half mask: dense against every candidate tile, over a
ladder of token counts, layout included. A rule is written where skipping wins by MARGIN; elsewhere no rule means
dense. A rule also holds the largest keep ratio at which it is still expected to win (time in proportion to it).
Candidates are compiled first, in --jobs processes. A few minutes on an H200. Attention has one tile and is measured
by `_tune_attention`.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

import torch

from . import _tune_attention
from ._problems import Problem, exact_keep_mask
from .dispatch import TABLE_FILE, Plan
from .timing import measure, provenance

MARGIN = 1.04
NO_LIMIT = 10**9
MANY_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384)
FEW_TOKENS = (1, 2, 4, 8)
LADDERS = {"all": FEW_TOKENS + MANY_TOKENS, "few": FEW_TOKENS, "many": MANY_TOKENS}
# operator, N, K: large, middle and small weights of the models in _models
SIZES = (
    ("gemm_mn", 14336, 4096), ("gemm_mn", 4096, 4096), ("gemm_mn", 1536, 576),
    ("gate_up", 14336, 4096), ("gate_up", 1536, 576),
    ("gemm_k", 4096, 14336), ("gemm_k", 4096, 4096), ("gemm_k", 576, 1536),
)  # fmt: skip
GROUP_SIZES = (512, 256, 128, 32)


def candidates(operator: str, group_size: int, num_tokens: int) -> list[Plan]:
    """Tiles worth measuring; `gemm_k` skips only wide groups, its float32 sums cost more than narrow ones save."""
    if num_tokens <= 8:
        few = [(8, 512, 4, 1), (4, 1024, 4, 1), (16, 256, 4, 1), (8, 1024, 8, 1)]
        many = [(16, 256, 4, 1), (32, 128, 4, 3), (32, 256, 4, 2)]
        return [Plan("one_token", config) for config in (few if num_tokens == 1 else many)]
    if operator == "gemm_k":
        if group_size < 256 or num_tokens < 2048:
            return []
        sums = [(4, 16), (5, 16), (5, 32), (7, 16), (8, 16)]  # groups of a set, bits of a partial sum
        return [Plan("skip", (128, 256, 64, *pair, 8, 4)) for pair in sums]
    if group_size < 64:
        return [Plan("skip", tile) for tile in ((128, 32, 64, 16, 4, 4), (256, 32, 64, 8, 8, 3))]
    tiles: list[tuple[int, ...]]
    if operator == "gate_up":  # two weights, so a tile is twice block_n wide
        tiles = [
            (128, 128, 64, 16, 8, 3),
            (128, 128, 64, 16, 8, 4),
            (128, 128, 64, 8, 8, 4),
            (128, 128, 64, 1024, 8, 4),
        ]
        tiles += [(128, 64, 64, 16, 4, 3), (128, 128, 64, 8, 8, 4, 1), (128, 128, 64, 8, 8, 4, 2)]
        return [Plan("skip", tile) for tile in tiles]
    tiles = [
        (128, 128, 64, 16, 4, 3),
        (128, 128, 64, 16, 8, 4),
        (256, 128, 64, 8, 8, 3),
        (256, 128, 64, 8, 8, 4),
    ]
    if group_size >= 256:
        wide: list[tuple[int, ...]] = [
            (128, 256, 64, *rest) for rest in ((16, 8, 3), (16, 8, 4), (8, 8, 4), (1024, 8, 4))
        ]
        tiles = wide + tiles[:2]
        tiles += [(128, 256, 64, 8, 8, 4, 1), (128, 256, 64, 8, 8, 4, 2), (128, 256, 128, 8, 8, 2, 2)]
    tiles += [(256, 128, 64, 8, 8, 4, 1), (256, 128, 64, 8, 8, 4, 2), (128, 128, 64, 16, 4, 3, 2)]
    return [Plan("skip", tile) for tile in tiles]


def problem(operator: str, num_outputs: int, num_inputs: int, group_size: int, num_tokens: int) -> Problem:
    """A random mask with exactly half of it True, on the GPU, for one measurement."""
    pruned = num_inputs if operator == "gemm_k" else num_outputs
    keep_mask = exact_keep_mask(num_tokens, -(-pruned // group_size), 0.5, seed=num_tokens)
    return Problem(operator, num_outputs, num_inputs, group_size, keep_mask)


def compile_share(share: int, num_shares: int, shapes: list[tuple]) -> None:
    """Run every `num_shares`-th (operator, N, K, G, tokens, plan) once, which compiles it into Triton's cache."""
    for operator, num_outputs, num_inputs, group_size, num_tokens, plan in shapes[share::num_shares]:
        case = problem(operator, num_outputs, num_inputs, group_size, num_tokens)
        case.plans = {operator: plan}
        case.ours(0)
    torch.cuda.synchronize()


def sweep(
    shapes: list[tuple[str, int, int]], group_sizes: list[int], ladder: tuple[int, ...], log: Path | None
) -> list[dict]:
    """One record for each operator, size, group width and token count: every candidate's speed-up over dense."""
    records = []
    for operator, num_outputs, num_inputs in shapes:
        pruned = num_inputs if operator == "gemm_k" else num_outputs
        for group_size in (size for size in group_sizes if pruned % size == 0):
            for num_tokens in ladder:
                plans = candidates(operator, group_size, num_tokens)
                if not plans:
                    continue
                record = _record(operator, num_outputs, num_inputs, group_size, num_tokens, plans)
                records.append(record)
                print(
                    operator, num_outputs, num_inputs, f"G={group_size} T={num_tokens}", record["speedups"], flush=True
                )
                if log is not None:
                    log.write_text(json.dumps(records))
    return records


def _record(operator, num_outputs, num_inputs, group_size, num_tokens, plans) -> dict:
    case = problem(operator, num_outputs, num_inputs, group_size, num_tokens)
    right = []
    for plan in plans:
        case.plans = {operator: plan}
        if case.check().ok:
            right.append(plan)

    def with_plan(plan: Plan):
        def call(index: int) -> torch.Tensor:
            case.plans = {operator: plan}
            return case.ours(index)

        return case.variant(call)

    times = measure({"dense": case.variant(case.dense)} | {str(plan.config): with_plan(plan) for plan in right}, 7, 40)
    dense = times.pop("dense")
    best = min(right, key=lambda plan: times[str(plan.config)], default=None)
    return {
        "operator": operator, "N": num_outputs, "K": num_inputs, "G": group_size, "tokens": num_tokens,
        "dense_ms": round(dense, 5), "wrong": [plan.config for plan in plans if plan not in right],
        "speedups": {name: round(dense / time, 3) for name, time in times.items()},
        "route": best.route if best else "dense", "config": list(best.config) if best else [],
        "speedup": round(dense / times[str(best.config)], 3) if best else 0.0,
    }  # fmt: skip


def rules_of(records: list[dict]) -> list[dict]:
    """Turn measurements into rules, larger weights and wider groups first; neighbouring equal token rungs merge."""

    def family(record: dict) -> tuple:
        return record["operator"], record["N"] * record["K"], record["G"]

    rules = []
    for (operator, weight, group), rungs in groupby(sorted(records, key=family), key=family):
        ladder = sorted(rungs, key=lambda record: record["tokens"])
        for route in ("one_token", "skip"):
            steps = [record for record in ladder if record["route"] == route]
            for index, step in enumerate(steps):
                after = steps[index + 1]["tokens"] - 1 if index + 1 < len(steps) else NO_LIMIT
                rule = {
                    "operator": operator, "route": route, "min_tokens": step["tokens"],
                    "max_tokens": min(after, 8) if route == "one_token" else after, "min_group_size": group,
                    "min_weight_size": weight, "config": step["config"],
                    "max_keep": round(min(0.9, 0.5 * step["speedup"] / 1.02), 2), "speedup": step["speedup"],
                }  # fmt: skip
                if step["speedup"] < MARGIN:
                    rule |= {"route": "dense", "config": [], "max_keep": 1.0}
                rules.append(rule)
    return rules


def rule_order(rule: dict) -> tuple:
    """Larger weights, then wider groups first: the first rule that fits wins."""
    return rule["operator"], -rule["min_weight_size"], -rule["min_group_size"], rule["min_tokens"]


def main(argv: list[str]) -> int:
    """Compile, measure, write the table and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=8)
    every = ["gemm_mn", "gate_up", "gemm_k", *_tune_attention.OPERATORS]
    parser.add_argument("--operators", nargs="+", default=every, choices=every)
    parser.add_argument("--groups", nargs="+", type=int, default=list(GROUP_SIZES), choices=GROUP_SIZES)
    parser.add_argument("--min-weight", type=int, default=0, help="only weights of at least N x K; other rules stay")
    parser.add_argument("--ladder", choices=LADDERS, default="all", help="token counts to measure; other rules stay")
    parser.add_argument("--table", type=Path, default=TABLE_FILE)
    parser.add_argument("--log", type=Path, default=None, help="every measurement, JSON")
    options = parser.parse_args(argv)
    shapes = [s for s in SIZES if s[0] in options.operators and s[1] * s[2] >= options.min_weight]
    ladder = LADDERS[options.ladder]
    work = [
        (*shape, group, tokens, plan)
        for shape in shapes for group in options.groups if (shape[2] if shape[0] == "gemm_k" else shape[1]) % group == 0
        for tokens in (1, 2, 2048) if tokens <= max(ladder) and tokens >= min(min(ladder), 2048)
        for plan in candidates(shape[0], group, tokens)
    ]  # fmt: skip
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_share, range(options.jobs), [options.jobs] * options.jobs, [work] * options.jobs))
    records = sweep(shapes, options.groups, ladder, options.log)
    attention = _tune_attention.sweep([name for name in options.operators if name in _tune_attention.OPERATORS])
    if options.log is not None:
        options.log.write_text(json.dumps(records + attention))
    table = json.loads(options.table.read_text()) if options.table.exists() else {}
    card = torch.cuda.get_device_name()

    def stays(rule: dict) -> bool:
        if rule["operator"] not in options.operators:
            return True
        if rule["operator"] in _tune_attention.OPERATORS:
            return False
        measured = min(ladder) <= rule["min_tokens"] <= max(ladder) and rule["min_group_size"] in options.groups
        return not measured or rule["min_weight_size"] < options.min_weight

    kept = [rule for rule in table.get(card, {}).get("rules", []) if stays(rule)]
    rules = sorted(kept + rules_of(records) + _tune_attention.rules_of(attention), key=rule_order)
    about = provenance("python -m wide_kernels.tune --operators " + " ".join(options.operators))
    table[card] = {"about": about, "rules": rules}
    options.table.write_text(dumps(table))
    print(json.dumps({"card": card, "measured": len(records) + len(attention), "rules": len(rules)}))
    return 0


def dumps(table: dict) -> str:
    """The table with one rule a line."""
    cards = []
    for card, entry in table.items():
        head = {key: value for key, value in entry.items() if key != "rules"}
        rules = ",\n".join(f"      {json.dumps(rule)}" for rule in entry["rules"])
        about = json.dumps(head.get("about", head))
        cards.append(f'  {json.dumps(card)}: {{\n    "about": {about},\n    "rules": [\n{rules}\n    ]\n  }}')
    return "{\n" + ",\n".join(cards) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
