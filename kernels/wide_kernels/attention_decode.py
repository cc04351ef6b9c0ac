"""Routed attention of one token over a cache: an inactive head group does not read its KV heads.

A fixed grid splits the keys of the active items evenly, on the device and with no host sync; a second kernel merges
each item's partial results in a fixed order and writes the inactive rows as zeros (`gqa_decode`; split and merge
after FlashDecoding).
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ._launch import can_chain, chain_option, refuse_gradient, runs_triton
from .attention_dense import check_skipped, route_of, run_dense
from .gqa import LOG2_E, HeadGroups, check_call, reference
from .gqa_decode import merge_kernel, split_kernel


@dataclass(frozen=True)
class Split:
    """Shape of the split: keys per step, warps, pipeline stages, programs per multiprocessor."""

    keys: int
    warps: int
    stages: int
    programs: int


def default_split(sizes: HeadGroups, dtype: torch.dtype) -> Split:
    """Hand-picked: about 100 KB of keys and values in flight on a multiprocessor."""
    if dtype == torch.float32:
        return Split(32, 4, 2, 2)
    return Split(64, 4, 3 if sizes.head_size <= 128 else 2, 2)


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 3 under the interpreter, so that small inputs are split too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def run_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep_mask: Tensor,
    key_start: Tensor | None,
    key_length: Tensor | None,
    window: int | None,
    scale: float,
    split: Split | None = None,
) -> Tensor:
    """The two kernels; see `attention_decode` for the arguments."""
    sizes = HeadGroups.of(q, k, v, keep_mask)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    split = split or default_split(sizes, q.dtype)
    programs = max(split.programs * num_processors(q.device), sizes.num_items)
    parts = torch.empty(programs, sizes.heads, sizes.head_size, dtype=torch.float32, device=q.device)
    stats = torch.empty(programs, 2, sizes.heads, dtype=torch.float32, device=q.device)
    chained = can_chain(q)
    shape = {
        "NUM_GROUPS": sizes.num_groups,
        "UNITS": sizes.units,
        "HEADS": sizes.heads,
        "HEAD_SIZE": sizes.head_size,
        "ITEMS": triton.next_power_of_2(sizes.num_items),
        "BLOCK_N": split.keys,
        "BLOCK_D": max(16, triton.next_power_of_2(sizes.head_size)),
        "CHAINED": chained,
    }
    rows = (keep_mask, key_start, key_length)
    mask_strides = (keep_mask.stride(0), keep_mask.stride(2))
    limits = (sizes.num_keys, window, sizes.num_items, programs)
    split_kernel[(programs,)](
        q, k, v, *rows, parts, stats, *(q.stride(axis) for axis in (0, 2, 3)), *k.stride(), *v.stride(), *mask_strides,
        scale * LOG2_E, *limits, HEADS_PER_KV=sizes.heads_per_kv,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        BLOCK_M=max(16, triton.next_power_of_2(sizes.heads)), num_warps=split.warps, num_stages=split.stages, **shape,
        **chain_option(chained),
    )  # fmt: skip
    merged = min(128, max(16, triton.next_power_of_2(2 * programs // sizes.num_items)))
    columns = min(32, shape["BLOCK_D"])  # narrow, so that one long item is merged by many programs
    grid = (sizes.num_items, sizes.heads, shape["BLOCK_D"] // columns)
    merge_kernel[grid](
        *rows, parts, stats, out, *mask_strides, scale * LOG2_E, *limits, SPLITS=merged, num_warps=4,
        **(shape | {"BLOCK_D": columns}),
        **chain_option(chained),
    )  # fmt: skip
    return out


@torch.library.custom_op("wide_kernels::attention_decode", mutates_args=())
def decode_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep_mask: Tensor,
    key_start: Tensor | None,
    key_length: Tensor | None,
    window: int | None,
    scale: float,
    route: str,
    zeros: bool,
) -> Tensor:
    if not runs_triton(q):
        return reference(q, k, v, keep_mask, key_start, key_length, window, scale)
    if route == "dense":
        return run_dense(q, k, v, keep_mask, scale, zeros)
    return run_triton(q, k, v, keep_mask, key_start, key_length, window, scale)


@decode_op.register_fake
def decode_fake(q, k, v, keep_mask, key_start, key_length, window, scale, route, zeros):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep_mask: Tensor,
    key_start: Tensor | None = None,
    key_length: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    *,
    skipped: str = "zeros",
    expected_keep: float = 0.5,
    route: str | None = None,
) -> Tensor:
    """Attention of one token a row over a static cache; only active head groups read their KV heads.

    Args:
        q: [B, 1, H, D], float16, bfloat16 or float32, any strides.
        k: [B, Tk, K, D] cache, any strides; H is a multiple of K.
        v: [B, Tk, K, D].
        keep_mask: bool [B, 1, G], True where the group's heads run; H / G heads each.
        key_start: int32 [B], a row's first valid key (left padding); None is 0.
        key_length: int32 [B], keys in the cache with the current token's own, at most Tk; None is Tk.
        window: keys the token sees, itself included (sliding window); None is all.
        scale: positive softmax scale; None is 1 / sqrt(D).
        skipped, expected_keep, route: as in `attention_prefill`.

    Returns:
        [B, 1, H, D] contiguous, in the dtype of `q`; inactive groups and rows without keys are exact zeros, and what
        the cache holds outside a row's span never matters. Float32 softmax and accumulation; deterministic.

    Raises:
        ValueError: shapes, dtypes or group size that do not fit, or more than one token a row.
        RuntimeError: a gradient is asked for.
    """
    HeadGroups.of(q, k, v, keep_mask)
    check_skipped(skipped)
    refuse_gradient("attention_decode", q, k, v)
    check_call(q, key_start, key_length, window)
    if q.shape[1] != 1:
        raise ValueError(f"attention_decode takes one token a row, got {q.shape[1]}; use attention_prefill")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    route = route_of("attention_decode", q, k, key_start, key_length, window, expected_keep, route)
    return decode_op(q, k, v, keep_mask, key_start, key_length, window, scale, route, skipped == "zeros")


def cases():
    """Head geometries, odd sizes, spans, extreme masks, strides, both routes (see `_attention_cases`)."""
    from ._attention_cases import decode_cases

    return decode_cases()


def bench_shapes() -> list[dict]:
    """Caches of the benchmarked models."""
    from ._models import attention_shapes

    return attention_shapes("attention_decode")
