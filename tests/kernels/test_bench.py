"""The benchmark's own parts without a device: baselines against float64, recorded masks, what a row holds."""

import os

import numpy
import pytest
import torch
from safetensors.torch import save_file

os.environ["TRITON_INTERPRET"] = "1"

from wide_kernels import _problems, bench
from wide_kernels._problems import Problem

TOKENS, GROUP = 24, 16
SHAPES = {"gemm_mn": (64, 32), "gate_up": (64, 32), "gemm_k": (32, 64), "ffn": (64, 32)}  # N outputs, K inputs


@pytest.fixture(autouse=True)
def few_buffer_sets(monkeypatch):
    monkeypatch.setattr(_problems, "num_buffer_sets", lambda size: 2)


def problem(operator: str, group: int = GROUP) -> Problem:
    keep_mask = torch.rand(TOKENS, -(-64 // group), generator=torch.Generator().manual_seed(3)) < 0.5
    keep_mask[:, 1] = False  # a group that no token runs
    return Problem(operator, *SHAPES[operator], group, keep_mask)


@pytest.mark.parametrize("operator", SHAPES)
def test_the_naive_baseline_computes_the_operator(operator):
    case = problem(operator)
    assert case.check(case.naive()).ok
    assert not case.check(case.naive() * 1.05).ok


@pytest.mark.parametrize("operator", ("gemm_mn", "gemm_k"))
def test_the_grouped_baseline_computes_the_operator(operator):
    case = problem(operator)
    grouped = case.grouped()
    assert grouped is not None and case.check(grouped()).ok
    assert problem(operator, group=24).grouped() is None


def test_grouped_products_exist_for_single_products_alone():
    assert problem("gate_up").grouped() is None and problem("ffn").grouped() is None


@pytest.mark.parametrize("wrong", (False, True))
def test_a_row_names_clocks_and_baselines_and_shows_no_time_for_a_wrong_one(wrong, monkeypatch):
    monkeypatch.setattr(
        bench, "measure_at", lambda clocks, variants: (dict.fromkeys(variants, 0.5) | {"ours": 0.25}, 1755)
    )
    monkeypatch.setattr(bench, "measure_eager", lambda call: 3.0)
    case = problem("gemm_k")
    if wrong:
        case.naive = lambda: torch.zeros(TOKENS, 32, dtype=torch.bfloat16)
    row = bench.bench_row(case, (1e9, 1e9), baselines=True, clocks="sustained")
    assert row["speedup"] == 2 and (row["clocks"], row["sm_mhz"]) == ("sustained", 1755)
    assert row["naive_correct"] is not wrong and row["naive_ms"] == (None if wrong else 3.0)
    assert row["grouped_mm_correct"] and row["grouped_mm_ms"] == 3.0
    case.ours = lambda index: torch.zeros(TOKENS, 32, dtype=torch.bfloat16)
    red = bench.bench_row(case, (1e9, 1e9), baselines=True, clocks="short")
    assert not red["correct"] and not {"speedup", "ours_ms", "naive_ms"} & red.keys()


def test_recorded_masks_are_read_by_layer_and_by_name(tmp_path):
    layers = torch.rand(3, 7, 4) < 0.5
    save_file({"ffn": layers, "one": layers[:1].clone()}, tmp_path / "masks.safetensors")
    numpy.savez(tmp_path / "masks.npz", ffn=layers.numpy(), flat=layers[2].numpy())
    for name, keys in (("masks.safetensors", {"one": 0}), ("masks.npz", {"flat": 2})):
        found = bench.recorded_masks(tmp_path / name)
        expected = {f"ffn.{index}": index for index in range(3)} | keys
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], layers[index]) for key, index in expected.items())
    numpy.savez(tmp_path / "flat.npz", ffn=numpy.ones(4, dtype=bool))
    with pytest.raises(ValueError, match="'ffn' must be"):
        bench.recorded_masks(tmp_path / "flat.npz")
    with pytest.raises(ValueError, match=r"masks\.txt"):
        bench.recorded_masks(tmp_path / "masks.txt")


def test_recorded_masks_with_a_fitting_number_of_groups_are_repeated_or_cut(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    recorded = {"a": torch.rand(5, 4) < 0.5, "b": torch.rand(5, 3) < 0.5, "empty": torch.ones(0, 4, dtype=torch.bool)}
    found = bench.masks(12, 4, 0.5, recorded)
    assert found.keys() == {"a"} and torch.equal(found["a"], recorded["a"][torch.arange(12) % 5])
    assert torch.equal(bench.masks(2, 4, 0.5, recorded)["a"], recorded["a"][:2])
