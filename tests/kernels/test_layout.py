"""The set lists over several spans of tokens, against a stable sort."""

import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"

from wide_kernels.layout import SPAN, reference_groups, reference_sets, routing_layout


@pytest.mark.parametrize(("num_tokens", "set_size"), ((SPAN + 1, 5), (2 * SPAN + 700, 3)))
def test_lists_of_many_tokens_are_those_of_a_stable_sort(num_tokens, set_size):
    keep_mask = torch.rand(num_tokens, 10, generator=torch.Generator().manual_seed(1)) < 0.5
    layout = routing_layout(keep_mask)
    for found, expected in zip(layout.lists("skip", set_size), reference_sets(keep_mask, set_size), strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(layout.lists("skip"), reference_groups(keep_mask), strict=True):
        assert torch.equal(found, expected)
