"""Every operator's cases under Triton's interpreter: NaN-poisoned buffers, float64 reference, dense yardstick.

The interpreter is slow, so a case runs here in one dtype, neighbours in different ones; `python -m wide_kernels.check`
runs each of them in all three on a GPU.
"""

import os
from collections import Counter

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, that is at their first import

from wide_kernels._testing import check_case
from wide_kernels.check import all_cases

CASES = [(case, case.dtypes[index % len(case.dtypes)]) for index, case in enumerate(all_cases())]


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=[f"{c.name}-{d}".replace("torch.", "") for c, d in CASES])
def test_operator_is_within_twice_the_dense_calls_own_error(case, dtype):
    verdict = check_case(case, torch.device("cpu"), dtype)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("operator", ("gemm_mn", "gate_up", "gemm_k", "attention_prefill", "attention_decode"))
def test_every_operator_has_forty_cases_and_every_dtype(operator):
    dtypes = Counter(dtype for case, dtype in CASES if case.op.__name__ == operator)
    assert dtypes.total() >= 40 and len(dtypes) == 3


def test_f45_f47_the_cases_hold_what_kernels_are_usually_not_tried_on():
    """Few rows and rows beside a multiple of sixteen; narrow and odd groups; heads that are no power of two."""
    names = {case.name for case, _ in CASES}
    for operator in ("gemm_mn", "gate_up", "gemm_k"):
        rows = {f"{operator}-{count}_tokens" for count in (0, 1, 2, 15, 16, 17, 31, 33)}
        sizes = ("groups_of_24", "groups_of_100", "narrow_groups", "last_group_narrower", "odd_everything", "one_group")
        assert rows | {f"{operator}-{size}" for size in sizes} | {f"{operator}-mask_one_token_active"} <= names
    for operator in ("attention_prefill", "attention_decode"):
        heads = {f"{operator}-head_{size}" for size in (48, 80, 96, 128, 192)}
        assert heads | {f"{operator}-smollm_9_heads", f"{operator}-five_groups"} <= names
