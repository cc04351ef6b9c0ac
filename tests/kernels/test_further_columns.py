"""Compensation as further input columns of a dense product, and rows of an activation that leave room for them."""

import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"

from wide_kernels import attention_prefill, gate_up, routing_layout
from wide_kernels._cases import DENSE, SKIP_MN
from wide_kernels.masking import skipped_columns_


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    ("num_tokens", "num_groups", "num_columns"), ((1, 1, 1), (37, 5, 8), (130, 28, 64), (3, 8, 13))
)
def test_skipped_groups_are_ones_and_all_else_zeros(num_tokens, num_groups, num_columns, dtype):
    keep_mask = torch.rand(num_tokens, num_groups, generator=torch.Generator().manual_seed(1)) < 0.5
    buffer = torch.full((num_tokens, num_columns + 7), float("nan"), dtype=dtype)
    skipped_columns_(buffer[:, 3 : 3 + num_columns], keep_mask)
    for token in range(num_tokens):
        expected = [0.0 if keep_mask[token, g] else 1.0 for g in range(num_groups)] + [0.0] * (num_columns - num_groups)
        assert buffer[token, 3 : 3 + num_columns].tolist() == expected
    assert buffer[:, :3].isnan().all() and buffer[:, 3 + num_columns :].isnan().all()


@pytest.mark.parametrize("plan", (SKIP_MN, DENSE), ids=("skip", "dense"))
def test_rows_of_gate_up_lie_as_far_apart_as_asked(plan):
    generator = torch.Generator().manual_seed(2)
    x, gate, up = (torch.randn(shape, generator=generator) for shape in ((20, 32), (48, 32), (48, 32)))
    layout = routing_layout(torch.rand(20, 3, generator=generator) < 0.5)
    found = gate_up(x, gate, up, layout, plan=plan, spare=16)
    assert found.stride() == (64, 1) and torch.equal(found, gate_up(x, gate, up, layout, plan=plan))


@pytest.mark.parametrize("route", ("skip", "dense"))
def test_rows_of_attention_lie_as_far_apart_as_asked(route):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 9, heads, 16, generator=generator) for heads in (4, 2, 2))
    keep_mask = torch.rand(2, 9, 2, generator=generator) < 0.5
    found = attention_prefill(q, k, v, keep_mask, route=route, spare=32)
    assert found.stride() == (9 * 96, 96, 16, 1)
    assert torch.equal(found, attention_prefill(q, k, v, keep_mask, route=route))
