"""The engine's own Triton kernels, in the interpreter; and the sorting of kernels into parts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from wide.engine.parts import PARTS, sort_kernels


def test_triton_path_equals_the_reference_path():
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")])
    run = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "engine_interpreted.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and run.stdout.strip().endswith("equal"), run.stdout + run.stderr


def spaced(names: str) -> list[tuple[str, float, float]]:
    """Kernels of 3 microseconds, one apart."""
    return [(name, 4.0 * i, 4.0 * i + 3) for i, name in enumerate(names.split())]


DENSE = """embedding
    add_norm_kernel gemm rotate_kernel cudnn_sdpa_fprop gemm add_norm_kernel gemm sweep gemm
    add_norm_kernel gemm rotate_kernel flash_fwd gemm add_norm_kernel gemm sweep gemm
    add_norm_kernel gemm"""
ROUTED = """embedding
    add_norm_kernel gemm decide_kernel _groups_kernel gemm_mn_kernel rotate_kernel partition_kernel prefill_kernel gemm
    add_norm_kernel gemm decide_kernel gate_up gemm addmm
    add_norm_kernel gemm"""
TOKEN = """embedding
    route_token_kernel mn rotate_kernel split_kernel merge_kernel k route_token_kernel mn k
    add_norm_kernel gemm"""


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        (DENSE, {"norm": 5, "projections": 4, "attention": 2, "ffn": 6, "head": 1, "rest": 3}),
        (ROUTED, {"norm": 3, "routing": 6, "projections": 2, "attention": 1, "ffn": 3, "head": 1, "rest": 2}),
        (TOKEN, {"norm": 1, "routing": 2, "projections": 2, "attention": 2, "ffn": 2, "head": 1, "rest": 2}),
    ],
    ids=("dense", "routed", "one token"),
)
def test_kernels_are_sorted_into_parts(kernels, expected):
    times = sort_kernels(spaced(kernels))
    count = len(kernels.split())
    assert set(times) == set(PARTS)
    assert times.pop("launch") * 1e3 == pytest.approx(count - 1)
    assert {name: round(value * 1e3 / 3) for name, value in times.items() if value} == expected


def test_overlapping_kernels_are_counted_once():
    times = sort_kernels([("add_norm_kernel", 0, 10), ("gemm", 5, 12)])
    assert sum(times.values()) * 1e3 == pytest.approx(12) and times["launch"] == 0
