"""What it takes for an operator to count as right, shared by the tests, the GPU check and the benchmark.

Every operator module exposes `cases() -> list[Case]` and `bench_shapes() -> list[dict]`; nothing else has to be
registered. `check_case` runs one case with every fresh buffer filled with NaN and compares with the operator's own
reference in float64. The yardstick is the error of the dense library call in the same dtype on the same inputs:
an operator may lose at most twice what the library loses. Axes: T tokens, K input and N output channels, G groups.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Inputs = dict[str, Any]
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """One input on which an operator has to be right.

    `op` is the public function. `reference` takes the same arguments and is right in float64. `dense` is the
    library call that computes the unpruned product (or SDPA): its rounding error sets the tolerance. `valid`,
    when given, returns a boolean tensor of the output's shape: False where the contract leaves the value open.
    """

    name: str
    make_inputs: Callable[[torch.Generator, torch.device, torch.dtype], Inputs]
    op: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    dense: Callable[..., torch.Tensor]
    valid: Callable[..., torch.Tensor] | None = None
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES


@dataclass(frozen=True)
class Verdict:
    """Outcome of one case: relative errors (Frobenius norm) and whether the operator stayed within the rule."""

    name: str
    dtype: str
    error: float
    dense_error: float
    ok: bool
    reason: str = ""


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Fill every buffer from torch.empty, empty_like, empty_strided and new_empty with NaN while the block runs."""
    originals: dict[tuple[Any, str], Callable[..., torch.Tensor]] = {
        (torch, "empty"): torch.empty,
        (torch, "empty_like"): torch.empty_like,
        (torch, "empty_strided"): torch.empty_strided,
        (torch.Tensor, "new_empty"): torch.Tensor.new_empty,
    }

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() and out.device.type != "meta" else out

        return poisoned

    try:
        for (owner, name), make in originals.items():
            setattr(owner, name, poison(make))
        yield
    finally:
        for (owner, name), make in originals.items():
            setattr(owner, name, make)


def to_float64(inputs: Inputs) -> Inputs:
    """The same inputs with every floating tensor widened to float64 (on the same device)."""
    return {
        key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }


def relative_error(out: torch.Tensor, expected: torch.Tensor, valid: torch.Tensor | None = None) -> float:
    """Frobenius norm of the difference over that of `expected`; inf when a compared value is not finite."""
    out, expected = out.double(), expected.double()
    if valid is not None:
        out, expected = out[valid], expected[valid]
    if out.numel() == 0:
        return 0.0
    difference = (out - expected).norm().item()
    scale = expected.norm().item()
    if difference != difference:
        return float("inf")
    return difference / scale if scale > 0 else difference


def judge(
    name: str,
    dtype: torch.dtype,
    out: torch.Tensor,
    expected: torch.Tensor,
    dense_error: float,
    valid: torch.Tensor | None = None,
) -> Verdict:
    """Compare `out` with the float64 result under the rule: at most twice the dense call's own error."""
    label = str(dtype).removeprefix("torch.")
    if out.shape != expected.shape:
        shapes = f"shape {tuple(out.shape)}, expected {tuple(expected.shape)}"
        return Verdict(name, label, float("inf"), dense_error, False, shapes)
    error = relative_error(out, expected, valid)
    floor = torch.finfo(dtype).eps / 4
    ok = error <= 2 * max(dense_error, floor)
    return Verdict(name, label, error, dense_error, ok, "" if ok else f"error {error:.3g} > 2 x {dense_error:.3g}")


def check_case(case: Case, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Verdict:
    """Run `case` once: poisoned buffers, float64 reference, dense yardstick."""
    device = torch.device(device)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    inputs = case.make_inputs(generator, device, dtype)
    wide = to_float64(inputs)
    with torch.no_grad():
        with poisoned_empty():
            out = case.op(**inputs)
        dense_error = relative_error(case.dense(**inputs), case.dense(**wide))
        expected = case.reference(**wide)
        valid = case.valid(**inputs) if case.valid is not None else None
    return judge(case.name, dtype, out, expected, dense_error, valid)


def random_keep_mask(
    generator: torch.Generator, num_tokens: int, num_groups: int, keep_ratio: float, device: torch.device | str
) -> torch.Tensor:
    """Independent coin flips, bool[T, G]; True = the group runs for the token."""
    return (torch.rand(num_tokens, num_groups, generator=generator) < keep_ratio).to(device)
