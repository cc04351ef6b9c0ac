"""Every operator's cases under Triton's interpreter: NaN-poisoned buffers, float64 reference, dense yardstick."""

import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, that is at their first import

from wide_kernels._testing import check_case
from wide_kernels.check import all_cases

CASES = [(case, dtype) for case in all_cases() for dtype in case.dtypes]


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=[f"{c.name}-{d}".replace("torch.", "") for c, d in CASES])
def test_operator_is_within_twice_the_dense_calls_own_error(case, dtype):
    verdict = check_case(case, torch.device("cpu"), dtype)
    assert verdict.ok, verdict.reason
