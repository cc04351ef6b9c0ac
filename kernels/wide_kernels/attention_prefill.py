"""Routed causal attention over many tokens: an inactive (token, head group) row costs nothing and is written as zeros.

A first kernel partitions each (batch row, group)'s tokens, stably, into active and inactive ones; the second runs
tiles of active rows, those with the longest span of keys first, and zero-fills the inactive rows (`gqa_prefill`)
unless the caller says that it never reads them.
No host sync: the grid covers the worst case and a tile learns its work from the counts.
"""

import math
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ._launch import can_chain, chain_option, refuse_gradient, runs_triton
from .attention_dense import check_skipped, route_of, run_dense
from .gqa import LOG2_E, HeadGroups, check_call, reference
from .gqa_prefill import partition_kernel, prefill_kernel


@dataclass(frozen=True)
class Tile:
    """Shape of one prefill program: query rows, keys per step, warps, pipeline stages, K and V through TMA or not."""

    rows: int
    keys: int
    warps: int
    stages: int
    tma: bool


def default_tile(sizes: HeadGroups, dtype: torch.dtype) -> Tile:
    """Measured on an H200 at head size 128 (experiments/LOG.md); a tile holds at least one token's heads."""
    if dtype == torch.float32:
        tile = Tile(32, 32, 4, 1, False)
    elif sizes.head_size <= 128:
        tile = Tile(64, 64, 4, 3, True)
    else:
        tile = Tile(64, 64, 4, 2, True)
    return replace(tile, rows=max(tile.rows, triton.next_power_of_2(sizes.heads)))


def tma_ready(x: Tensor) -> bool:
    """Whether a tensor map can describe `x`: Hopper or later, unit last stride, the others multiples of 16 bytes."""
    aligned = x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 and s > 0 for s in x.stride()[:-1])
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9 and x.stride(-1) == 1 and aligned


def partition(
    keep_mask: Tensor, sizes: HeadGroups, key_start: Tensor | None, key_length: Tensor | None, chained: bool = False
) -> tuple[Tensor, Tensor]:
    """Token lists int32 [B, G, Tq] (active ascending from the front, the rest from the back) and counts [B, G]."""
    lists = (sizes.batch, sizes.num_groups)
    tokens = torch.empty(*lists, sizes.num_tokens, dtype=torch.int32, device=keep_mask.device)
    counts = torch.empty(lists, dtype=torch.int32, device=keep_mask.device)
    chunk = min(1024, max(16, triton.next_power_of_2(sizes.num_tokens)))
    partition_kernel[(sizes.batch * sizes.num_groups, triton.cdiv(sizes.num_tokens, chunk))](
        keep_mask, key_start, key_length, tokens, counts, *keep_mask.stride(), sizes.num_tokens, sizes.num_keys,
        NUM_GROUPS=sizes.num_groups, HAS_START=key_start is not None, HAS_LENGTH=key_length is not None,
        CHUNK=chunk, COUNTING=4 * chunk, CHAINED=chained, num_warps=8,
    )  # fmt: skip
    return tokens, counts


def run_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep_mask: Tensor,
    key_start: Tensor | None,
    key_length: Tensor | None,
    window: int | None,
    scale: float,
    zeros: bool = True,
    spare: int = 0,
    tile: Tile | None = None,
) -> Tensor:
    """The two kernels; see `attention_prefill` for the arguments."""
    sizes = HeadGroups.of(q, k, v, keep_mask)
    out = rows_like(q, spare)
    if out.numel() == 0:
        return out
    tile = tile or default_tile(sizes, q.dtype)
    block_d = max(16, triton.next_power_of_2(sizes.head_size))
    chained = can_chain(q)
    tokens, counts = partition(keep_mask, sizes, key_start, key_length, chained)
    use_tma = tile.tma and tma_ready(k) and tma_ready(v)
    block = [1, 1, tile.keys, block_d]
    k_desc, v_desc = (TensorDescriptor.from_tensor(x.transpose(1, 2), block) if use_tma else x for x in (k, v))
    tiles = triton.cdiv(sizes.num_tokens, tile.rows // sizes.heads) + (1 if zeros else 0)
    prefill_kernel[(tiles * sizes.num_items,)](
        q, k, v, k_desc, v_desc, out, tokens, counts, key_start, key_length, *q.stride(), *k.stride(), *v.stride(),
        *out.stride()[:2], scale * LOG2_E, sizes.num_tokens, sizes.num_keys, window or 0, sizes.num_items,
        NUM_GROUPS=sizes.num_groups, UNITS=sizes.units, HEADS=sizes.heads, HEADS_PER_KV=sizes.heads_per_kv,
        HEAD_SIZE=sizes.head_size, HAS_START=key_start is not None, HAS_LENGTH=key_length is not None,
        HAS_WINDOW=window is not None, ZEROS=zeros, USE_TMA=use_tma, CHAINED=chained,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        BLOCK_M=tile.rows, BLOCK_N=tile.keys, BLOCK_D=block_d, num_warps=tile.warps, num_stages=tile.stages,
        **chain_option(chained),
    )  # fmt: skip
    return out


def rows_like(q: Tensor, spare: int) -> Tensor:
    """An output [B, Tq, H, D] whose rows are contiguous and lie H x D + `spare` elements apart."""
    batch, num_tokens, num_heads, head_size = q.shape
    rows = torch.empty(batch, num_tokens, num_heads * head_size + spare, dtype=q.dtype, device=q.device)
    return rows[..., : num_heads * head_size].unflatten(-1, (num_heads, head_size))


@torch.library.custom_op("wide_kernels::attention_prefill", mutates_args=())
def prefill_op(
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
    spare: int,
) -> Tensor:
    if runs_triton(q) and route == "skip":
        return run_triton(q, k, v, keep_mask, key_start, key_length, window, scale, zeros, spare)
    if runs_triton(q):
        out = run_dense(q, k, v, keep_mask, scale, zeros)
    else:
        out = reference(q, k, v, keep_mask, key_start, key_length, window, scale)
    return rows_like(q, spare).copy_(out) if spare else out


@prefill_op.register_fake
def prefill_fake(q, k, v, keep_mask, key_start, key_length, window, scale, route, zeros, spare):
    return rows_like(q, spare)


def attention_prefill(
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
    spare: int = 0,
    expected_keep: float = 0.5,
    route: str | None = None,
) -> Tensor:
    """Causal attention of the active (token, head group) rows; inactive ones are exact zeros.

    Args:
        q: [B, Tq, H, D], float16, bfloat16 or float32, any strides.
        k: [B, Tk, K, D]; H is a multiple of K.
        v: [B, Tk, K, D].
        keep_mask: bool [B, Tq, G], True where the group's heads run; H / G heads each.
        key_start: int32 [B], a row's first valid key (left padding); None is 0.
        key_length: int32 [B], end of a row's valid keys, at most Tk; None is Tk. The queries are its last Tq positions.
        window: keys a query sees, itself included (sliding window); None is all.
        scale: positive softmax scale; None is 1 / sqrt(D).
        skipped: what inactive rows hold: "zeros", or "undefined" (the caller never reads them; it is free). Rows of
            padding, before `key_start`, count as inactive.
        spare: undefined elements allocated behind the heads of every token, so that the caller can extend its rows in
            place (see `masking.skipped_columns_`).
        expected_keep: the share of True the caller expects, 0..1; only steers the dispatch, for the host never reads
            the mask. Near 1 the library's dense attention is faster.
        route: "skip" or "dense" overrides the measured table. Dense needs the plain causal case: no key_start, no
            key_length, no window (the library would need a mask of Tq x Tk); other calls always skip.

    Returns:
        [B, Tq, H, D] in the dtype of `q`, contiguous but for `spare`. An active row with no key to see is zeros, and
        what the keys outside a row's span hold never matters. Float32 softmax and accumulation; deterministic.

    Raises:
        ValueError: shapes, dtypes or group size that do not fit.
        RuntimeError: a gradient is asked for.
    """
    HeadGroups.of(q, k, v, keep_mask)
    check_skipped(skipped)
    refuse_gradient("attention_prefill", q, k, v)
    check_call(q, key_start, key_length, window)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    operator = "attention_prefill" if q.shape[1] == k.shape[1] else "attention_chunk"
    route = route_of(operator, q, k, key_start, key_length, window, expected_keep, route)
    return prefill_op(q, k, v, keep_mask, key_start, key_length, window, scale, route, skipped == "zeros", spare)


def cases():
    """Head geometries, odd sizes, spans, extreme masks, strides, both routes (see `_attention_cases`)."""
    from ._attention_cases import prefill_cases

    return prefill_cases()


def bench_shapes() -> list[dict]:
    """Prompts and chunks of the benchmarked models."""
    from ._models import attention_shapes

    return attention_shapes("attention_prefill")
