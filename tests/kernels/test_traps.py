"""Traps of kernels: offsets beyond 32 bits, tuning candidates that were never right alone, work that is not skipped.

One row, odd sizes and odd widths are among the cases of `test_cases`.
"""

import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"

from wide_kernels import attention_decode, attention_prefill, gate_up, gemm_k, gemm_mn, routing_layout
from wide_kernels._cases import ONE_TOKEN, SKIP_K, SKIP_MN, _case
from wide_kernels._testing import check_case
from wide_kernels.dispatch import Plan
from wide_kernels.tune import candidates

NUM_ROWS, WIDTH = 17, 96
STRIDE = 2**27 + 16
"""Sixteen rows of this many elements reach past 2^31; only the pages that hold values are ever touched."""


def far_apart(rows: torch.Tensor) -> torch.Tensor:
    """The rows of [M, N] as a view whose rows lie STRIDE elements apart."""
    buffer = torch.empty((len(rows) - 1) * STRIDE + rows.shape[1], dtype=rows.dtype)
    view = buffer.as_strided(rows.shape, (STRIDE, 1))
    return view.copy_(rows)


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


@pytest.mark.parametrize(
    ("operator", "plan", "num_rows"),
    [
        (gemm_mn, SKIP_MN, NUM_ROWS),
        (gate_up, SKIP_MN, NUM_ROWS),
        (gemm_k, SKIP_K, NUM_ROWS),
        (gemm_mn, Plan("dense"), NUM_ROWS),
        (gemm_k, Plan("dense"), NUM_ROWS),
    ],
)
def test_f49_rows_more_than_2_to_the_31_elements_apart(operator, plan, num_rows):
    x, weights = values(num_rows, WIDTH), [values(WIDTH, WIDTH)] * (2 if operator is gate_up else 1)
    keep_mask = torch.arange(num_rows)[:, None] % 3 != torch.arange(3)
    keep_mask[-1] = True
    expected = operator(x, *weights, routing_layout(keep_mask), skipped="zeros", plan=plan)
    found = operator(far_apart(x), *weights, routing_layout(keep_mask), skipped="zeros", plan=plan)
    keep = keep_mask.repeat_interleave(WIDTH // 3, 1) if operator is not gemm_k else torch.ones_like(found).bool()
    assert found[-1].abs().max() > 0.1 and torch.equal(found[keep], expected[keep])


@pytest.mark.parametrize("operator", (gemm_mn, gate_up, gemm_k))
def test_f49_weights_whose_rows_lie_more_than_2_to_the_31_elements_apart(operator):
    x, weight = values(1, WIDTH), values(NUM_ROWS, WIDTH)
    keep_mask = torch.ones(1, 1, dtype=torch.bool)
    rows = [weight] * (2 if operator is gate_up else 1)
    expected = operator(x, *rows, routing_layout(keep_mask), plan=ONE_TOKEN)
    found = operator(x, *[far_apart(weight)] * len(rows), routing_layout(keep_mask), plan=ONE_TOKEN)
    assert torch.equal(found, expected) and found[0, -1] != 0


@pytest.mark.parametrize("operator", (attention_prefill, attention_decode))
def test_f49_cache_rows_more_than_2_to_the_31_elements_apart(operator):
    num_queries = 1 if operator is attention_decode else 5
    q, k, v = values(1, num_queries, 4, 16), values(NUM_ROWS, 32), values(NUM_ROWS, 32) * 2
    keep_mask = torch.ones(1, num_queries, 2, dtype=torch.bool)
    near = [x.view(1, NUM_ROWS, 2, 16) for x in (k, v)]
    far = [far_apart(x).unflatten(1, (2, 16))[None] for x in (k, v)]
    assert torch.equal(operator(q, *far, keep_mask, route="skip"), operator(q, *near, keep_mask, route="skip"))


PLANS = sorted(
    {
        (operator, group_size, min(tokens, 20), plan.route, plan.config)
        for operator in ("gemm_mn", "gate_up", "gemm_k")
        for group_size in (512, 32)
        for tokens in (1, 4, 4096)
        for plan in candidates(operator, group_size, tokens)
        if plan.route == "skip" or group_size == 32  # few tokens have the same candidates at every width
    }
)


@pytest.mark.parametrize(("operator", "group_size", "num_tokens", "route", "config"), PLANS)
def test_f51_every_candidate_of_the_tuner_is_right_alone_and_twice(operator, group_size, num_tokens, route, config):
    size = (num_tokens, 64, 2, group_size, 2 * group_size)
    case = _case(operator, "candidate", size=size, plan=Plan(route, config), skipped="zeros")
    verdict = check_case(case, torch.device("cpu"), torch.bfloat16)
    assert verdict.ok, verdict.reason
    inputs = case.make_inputs(torch.Generator().manual_seed(0), torch.device("cpu"), torch.bfloat16)
    assert torch.equal(case.op(**inputs), case.op(**inputs))


def test_schedules_that_do_not_exist_are_refused():
    layout, plan = routing_layout(torch.ones(20, 2, dtype=torch.bool)), Plan("skip", (32, 32, 32, 2, 4, 2, 3))
    with pytest.raises(ValueError, match=r"schedule must be in 0\.\.2, got 3"):
        gemm_mn(values(20, 32), values(64, 32), layout, plan=plan)


def test_f57_lists_hold_the_kept_work_and_nothing_else():
    keep_mask = torch.rand(300, 6, generator=torch.Generator().manual_seed(2)) < 0.4
    layout = routing_layout(keep_mask)
    counts, rows = layout.lists("skip")
    assert counts.tolist() == keep_mask.sum(0).tolist()
    for group, count in enumerate(counts.tolist()):
        assert rows[group, :count].tolist() == keep_mask[:, group].nonzero().flatten().tolist()
    _, codes = layout.lists("skip", 3)
    assert sum(int(code).bit_count() for code in codes.flatten()) == keep_mask.sum()
    few = routing_layout(keep_mask[:3])
    active, number = few.lists("one_token")
    assert active[: int(number)].tolist() == keep_mask[:3].any(0).nonzero().flatten().tolist()
