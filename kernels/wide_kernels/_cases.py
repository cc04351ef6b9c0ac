"""The inputs every linear operator has to get right: odd sizes, extreme masks, strides, each route.

Sizes are small on purpose (the CPU interpreter runs them); the compiled check runs the same ones.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from ._testing import Case, Inputs, random_keep_mask
from .dispatch import Plan
from .gemm_k import gemm_k
from .gemm_k import reference as gemm_k_reference
from .gemm_mn import gate_up, gate_up_reference, gemm_mn
from .gemm_mn import reference as gemm_mn_reference
from .layout import routing_layout
from .masking import channel_mask

SKIP_MN = Plan("skip", (32, 32, 32, 2, 4, 2))
SKIP_K = Plan("skip", (32, 32, 32, 4, 16, 4, 2))
ONE_TOKEN = Plan("one_token", (16, 64, 4, 1))
DENSE = Plan("dense")

# name, T tokens, K or N of the free axis, group widths of the pruned axis: (groups, group size, channels)
SIZES = {
    "even": (96, 64, 4, 32, 128),
    "smollm_9_heads": (40, 576, 3, 192, 576),
    "smollm_ffn": (24, 96, 12, 128, 1536),
    "groups_of_24": (50, 40, 5, 24, 120),
    "groups_of_100": (33, 72, 3, 100, 300),
    "narrow_groups": (31, 48, 6, 8, 48),
    "last_group_narrower": (37, 56, 4, 48, 170),
    "one_group": (20, 64, 1, 80, 80),
    "seven_sets": (70, 32, 26, 16, 416),
    "odd_everything": (17, 50, 3, 34, 102),
    "head_size_96": (18, 128, 5, 96, 480),
}
MASKS = ("none", "all", "one_each", "unpicked_group", "one_token_active", "sorted")


def make_mask(kind: str, generator: torch.Generator, num_tokens: int, num_groups: int, device) -> torch.Tensor:
    """Random at 50% or one of the extremes of MASKS, bool[T, G]."""
    keep = random_keep_mask(generator, num_tokens, num_groups, 0.5, "cpu")
    if kind in ("none", "all"):
        keep[:] = kind == "all"
    elif kind == "one_each":
        keep = F.one_hot(torch.arange(num_tokens) % num_groups, num_groups).bool()
    elif kind == "unpicked_group":
        keep[:, num_groups // 2] = False
    elif kind == "one_token_active":
        keep[: max(num_tokens - 1, 0)] = False
        keep[-1:] = True
    elif kind == "sorted":
        keep = torch.arange(num_tokens)[:, None] * num_groups // max(num_tokens, 1) >= torch.arange(num_groups)
    return keep.to(device)


def _matrix(generator, rows: int, cols: int, device, dtype, strided: bool = False) -> torch.Tensor:
    """Standard normal / sqrt(cols); `strided` cuts it out of a wider buffer full of NaN."""
    values = (torch.randn(rows, cols, generator=generator) / max(cols, 1) ** 0.5).to(device, dtype)
    if not strided:
        return values
    buffer = torch.full((rows, cols + 16), float("nan"), dtype=dtype, device=device)
    buffer[:, :cols] = values
    return buffer[:, :cols]


def _inputs(
    generator, device, dtype, *, operator: str, size, tokens=None, mask="random", strided=False, transposed=False,
    bias=False, skipped=None, vectors=False, spare=0, plan=None,
) -> Inputs:  # fmt: skip
    num_tokens, free, num_groups, group_size, pruned = size
    num_tokens = num_tokens if tokens is None else tokens
    num_inputs, num_outputs = (pruned, free) if operator == "gemm_k" else (free, pruned)
    keep_mask = make_mask(mask, generator, num_tokens, num_groups, device)
    x = _matrix(generator, num_tokens, num_inputs, device, dtype, strided) * num_inputs**0.5
    if strided:
        x = torch.as_strided(
            _matrix(generator, num_tokens, num_inputs, device, dtype, True), x.shape, (num_inputs + 16, 1)
        )
    if transposed:
        x = x.T.contiguous().T
    weights = [_matrix(generator, num_outputs, num_inputs, device, dtype, strided) for _ in range(2)]
    inputs: Inputs = {"x": x, "layout": routing_layout(keep_mask), "group_size": group_size, "plan": plan}
    if operator == "gate_up":
        inputs |= {"gate_weight": weights[0], "up_weight": weights[1]}
    else:
        inputs |= {"weight": weights[0], "bias": _matrix(generator, 1, num_outputs, device, dtype)[0] if bias else None}
    if skipped is not None:
        inputs["skipped"] = skipped
    if vectors:
        inputs["vectors"] = _matrix(generator, num_groups, num_outputs, device, dtype) * num_outputs**0.5
    if spare:
        inputs["spare"] = spare
    if operator == "gemm_k":
        hole = ~channel_mask(keep_mask, num_inputs, group_size)
        inputs["x"] = x.masked_fill(hole, 0.0 if skipped == "zeros" else float("nan"))
    return inputs


def _dense(*, x, weight, bias=None, vectors=None, **_) -> torch.Tensor:
    x = x.nan_to_num()
    if vectors is not None:  # as further input channels, all of them on
        x, weight = torch.cat([x, x.new_ones(len(x), len(vectors))], 1), torch.cat([weight, vectors.T], 1)
    return F.linear(x, weight, bias)


def _dense_gate_up(*, x, gate_weight, up_weight, **_) -> torch.Tensor:
    return F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight)


def _running(*, layout, group_size, weight=None, gate_weight=None, **_) -> torch.Tensor:
    channels = (weight if weight is not None else gate_weight).shape[0]
    return channel_mask(layout.keep_mask, channels, group_size)


def _case(operator: str, name: str, **choices) -> Case:
    operators: dict[str, tuple[Callable, Callable, Callable]] = {
        "gemm_mn": (gemm_mn, gemm_mn_reference, _dense),
        "gate_up": (gate_up, gate_up_reference, _dense_gate_up),
        "gemm_k": (gemm_k, gemm_k_reference, _dense),
    }
    op, reference, dense = operators[operator]
    open_blocks = operator != "gemm_k" and choices.get("skipped") == "undefined"
    make: Callable = partial(_inputs, operator=operator, **choices)
    return Case(f"{operator}-{name}", make, op, reference, dense, _running if open_blocks else None)


def _family(operator: str, plan: Plan) -> list[Case]:
    even = SIZES["even"]
    zeros = {} if operator == "gemm_k" else {"skipped": "zeros"}
    cases = [_case(operator, name, size=size, plan=plan, **zeros) for name, size in SIZES.items()]
    cases += [_case(operator, f"mask_{kind}", size=even, mask=kind, plan=plan, **zeros) for kind in MASKS]
    cases += [
        _case(operator, f"{tokens}_tokens", size=even, tokens=tokens, plan=plan, **zeros)
        for tokens in (0, 1, 2, 15, 16, 17, 31, 33)
    ]
    cases += [
        _case(operator, "strided_nan_margin", size=SIZES["groups_of_100"], strided=True, plan=plan, **zeros),
        _case(operator, "transposed_input", size=even, transposed=True, plan=plan, **zeros),
        _case(operator, "undefined_blocks", size=SIZES["seven_sets"], skipped="undefined", plan=plan),
        _case(operator, "zeroed_blocks", size=SIZES["seven_sets"], skipped="zeros", plan=plan),
        _case(operator, "dense_route", size=SIZES["last_group_narrower"], plan=DENSE, **zeros),
        _case(operator, "dense_undefined", size=even, skipped="undefined", plan=DENSE),
        _case(operator, "chosen_route", size=even, **zeros),
    ]
    if operator != "gate_up":
        cases.append(_case(operator, "bias", size=SIZES["head_size_96"], bias=True, plan=plan, **zeros))
        cases.append(_case(operator, "bias_none_active", size=even, mask="none", bias=True, plan=plan, **zeros))
    return cases


def mn_cases() -> list[Case]:
    """Cases of gemm_mn and gate_up."""
    spare = [
        _case(
            "gate_up", f"spare_columns_{plan.route}", size=SIZES["odd_everything"], tokens=tokens, spare=13, plan=plan
        )
        for plan, tokens in ((SKIP_MN, 17), (DENSE, 17), (ONE_TOKEN, 5), (SKIP_MN, 0))
    ]
    return _family("gemm_mn", SKIP_MN) + _family("gate_up", SKIP_MN) + spare + _schedules()


def _schedules() -> list[Case]:
    """The schedules of `mn_skip`: bands of one, two and all token tiles, last tiles with few and many rows."""
    cases = []
    for schedule, band, operator in product((1, 2), (1, 2, 1024), ("gemm_mn", "gate_up")):
        plan, name = Plan("skip", (32, 32, 32, band, 4, 2, schedule)), f"schedule_{schedule}_bands_of_{band}"
        sizes = [SIZES[size] for size in ("even", "last_group_narrower", "odd_everything")]
        cases += [
            _case(operator, f"{name}_{size[0]}_tokens", size=size, plan=plan, skipped="zeros", bias=True)
            for size in sizes
        ]
        cases += [
            _case(operator, f"{name}_mask_{kind}", size=SIZES["even"], mask=kind, plan=plan, skipped=skipped)
            for kind, skipped in (("none", "zeros"), ("all", "undefined"), ("sorted", "zeros"), ("random", "undefined"))
        ]
    return cases


def k_cases() -> list[Case]:
    """Cases of gemm_k, with every set size, both kinds of partial sums, and vectors for what is skipped."""
    plans = {(n, bits): Plan("skip", (32, 32, 32, n, bits, 4, 2)) for n in range(1, 9) for bits in (16, 32)}
    sets = [
        _case("gemm_k", f"sets_of_{n}_{bits}_bit", size=SIZES["seven_sets"], tokens=70 - n, plan=plan, bias=n % 2 == 0)
        for (n, bits), plan in plans.items()
    ]
    owed = [
        _case("gemm_k", f"vectors_{name}_{plan.route}_{tokens}", size=SIZES[name], tokens=tokens, plan=plan,
              vectors=True, bias=plan is SKIP_K)
        for name in ("seven_sets", "last_group_narrower", "smollm_9_heads", "one_group")
        for plan, tokens in ((SKIP_K, 37), (DENSE, 37), (ONE_TOKEN, 1), (ONE_TOKEN, 6))
    ]  # fmt: skip
    owed += [
        _case("gemm_k", f"vectors_mask_{kind}", size=SIZES["even"], mask=kind, plan=SKIP_K, vectors=True)
        for kind in MASKS
    ]
    return _family("gemm_k", SKIP_K) + sets + owed


def one_token_cases() -> list[Case]:
    """One to eight tokens, all three operators."""
    cases = []
    for operator in ("gemm_mn", "gate_up", "gemm_k"):
        names = [name for name in SIZES if name != "even"]
        cases += [
            _case(operator, f"few_{name}_{tokens}", size=SIZES[name], tokens=tokens, plan=ONE_TOKEN)
            for name, tokens in zip(names, (1, 1, 1, 2, 3, 8, 1, 5, 1, 2), strict=True)
        ]
        cases += [
            _case(operator, f"few_mask_{mask}_{tokens}", size=SIZES["even"], tokens=tokens, mask=mask, plan=ONE_TOKEN)
            for mask in ("none", "all", "unpicked_group")
            for tokens in (1, 4)
        ]
        bias = {} if operator == "gate_up" else {"bias": True}
        cases += [
            _case(operator, f"few_strided_{tokens}", size=SIZES["groups_of_100"], tokens=tokens, strided=True,
                  plan=ONE_TOKEN, **bias)
            for tokens in (1, 7)
        ]  # fmt: skip
    return cases
