"""Measured rules of the attention operators: when routed rows beat the library's attention followed by zeros.

Time is taken as linear in the share of rows that run, from measurements at half and at all of them; a rule holds up
to the share where the dense route is reached. Launched by `wide_kernels.tune`.
"""

from ._attention_problems import AttentionProblem
from ._models import MODELS
from ._problems import exact_keep_mask
from .timing import measure

OPERATORS = ("attention_prefill", "attention_chunk", "attention_decode")
MODELS_TUNED = ("llama-3.1-8b", "smollm2-135m")
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 16384)
CHUNKS = ((128, 4096), (512, 4096), (1024, 8192), (2048, 16384))
CACHES = ((1, 256), (1, 1024), (1, 2048), (1, 4096), (1, 16384), (1, 32768), (16, 2048), (16, 16384))  # batch, keys
NO_LIMIT = 10**9
LOSS = 1.02  # a route may be this much slower than expected before it is not taken


def shapes(operator: str, model: str) -> list[tuple[int, dict]]:
    """(count of queries, or of cached keys over the batch; sizes) in ascending order of the count."""
    m = MODELS[model]
    heads = {"H": m.num_heads, "K": m.num_kv_heads, "D": m.head_size}
    if operator == "attention_prefill":
        return [(n, heads | {"batch": 1, "queries": n, "keys": n}) for n in PROMPTS]
    if operator == "attention_chunk":
        return [(n, heads | {"batch": 1, "queries": n, "keys": keys}) for n, keys in CHUNKS]
    return [(batch * n, heads | {"batch": batch, "queries": 1, "keys": n}) for batch, n in CACHES]


def record(operator: str, model: str, count: int, shape: dict) -> dict:
    """Milliseconds of the dense route at half, of the routed one at half and at all rows; wrong results raise."""
    call = "attention_decode" if operator == "attention_decode" else "attention_prefill"
    times = {}
    for keep in (0.5, 1.0):
        rows = shape["batch"] * shape["queries"]
        mask = exact_keep_mask(rows, shape["K"], keep).view(shape["batch"], shape["queries"], shape["K"])
        problems = {route: AttentionProblem(call, shape, mask, route=route) for route in ("skip", "dense")}
        for problem in problems.values():
            verdict = problem.check()
            if not verdict.ok:
                raise RuntimeError(f"{operator} {model} {count}: {verdict.reason}")
        for route, time in measure({name: problem.variant() for name, problem in problems.items()}, 7, 40).items():
            times[f"{route}_{keep}"] = time
    width = shape["H"] * shape["D"]
    return {"operator": operator, "model": model, "count": count, "width": width, "head_size": shape["D"]} | times


def largest_keep(row: dict) -> float:
    """The share of running rows up to which the routed way is expected to be no slower than the dense one."""
    half, whole, dense = row["skip_0.5"], row["skip_1.0"], min(row["dense_0.5"], row["dense_1.0"])
    if whole <= dense * LOSS:
        return 1.0
    slope = max(2 * (whole - half), 1e-9)
    return round(max(0.0, min(1.0, 0.5 + (dense / LOSS - half) / slope)), 2)


def rules_of(records: list[dict]) -> list[dict]:
    """A rule for each measured count, up to the next one; of equal counts the one that skips less far decides."""
    rules = []
    for row in records:
        alike = [r for r in records if _family(r) == _family(row)]
        same = [r for r in alike if r["count"] == row["count"]]
        if row is not same[0]:
            continue
        later = [r["count"] for r in alike if r["count"] > row["count"]]
        keep = min(largest_keep(r) for r in same)
        rules.append({
            "operator": row["operator"], "route": "skip" if keep else "dense", "min_tokens": row["count"],
            "max_tokens": min(later, default=NO_LIMIT + 1) - 1, "min_group_size": row["head_size"],
            "min_weight_size": row["width"], "config": [], "max_keep": keep or 1.0,
            "speedup": min(round(r["dense_0.5"] / r["skip_0.5"], 3) for r in same),
        })  # fmt: skip
    return rules


def _family(row: dict) -> tuple:
    return row["operator"], row["model"]


def sweep(operators: list[str]) -> list[dict]:
    """All records of the chosen attention operators."""
    records = []
    for operator in operators:
        for model in MODELS_TUNED:
            for count, shape in shapes(operator, model):
                records.append(record(operator, model, count, shape))
                print({key: round(v, 5) if isinstance(v, float) else v for key, v in records[-1].items()}, flush=True)
    return records
