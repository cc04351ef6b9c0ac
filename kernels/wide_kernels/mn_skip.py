"""The "skip" route of `gemm_mn` and `gate_up`: a program multiplies a tile of one group's tokens by its weight rows.

Three schedules of the tiles. 0: one program for every tile that a full group would have; those past a group's count
end at once. 1: the same, but a last tile with at most half of its rows multiplies half a tile: lists of a random half
mask are about a multiple of the tile long, so every other group has a last tile with next to nothing in it, and with
one tile at a time on a multiprocessor those decide whether another round of tiles is needed. 2: also, the tiles that
hold tokens come first, so that no program that ends at once stands between them.
Axes: T tokens, K input channels, N output channels, G groups.
"""

import torch
import triton
import triton.language as tl

from ._launch import can_chain, chain_option, row_block_descriptor, row_pair_descriptor
from .gqa import mma, narrow

NUM_SCHEDULES = 3


def launch_skip(
    x: torch.Tensor, weight: torch.Tensor, up_weight: torch.Tensor | None, bias: torch.Tensor | None,
    counts: torch.Tensor, rows: torch.Tensor, group_size: int, zeros: bool, config: list[int], out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Fill `out` [T, N], whose rows may be strided; arguments as `gemm_mn` has checked them.

    config: block_m, block_n, block_k, token tiles of a band, num_warps, num_stages and, optionally, the schedule.
    """
    num_tokens, num_inputs = x.shape
    num_channels, num_groups = weight.shape[0], counts.shape[0]
    block_m, block_n, block_k, band, num_warps, num_stages, *rest = config
    schedule = rest[0] if rest else 0
    if schedule not in range(NUM_SCHEDULES):
        raise ValueError(f"schedule must be in 0..{NUM_SCHEDULES - 1}, got {schedule}")
    if x.dtype == torch.float32:  # short chains of additions, see `mma`; no rate to lose without tensor cores
        block_k = 16
    second, swapped = weight, False
    if up_weight is None:
        descriptor = row_block_descriptor(weight, block_n, block_k)
    else:
        second = up_weight
        descriptor, swapped = row_pair_descriptor(weight, up_weight, block_n, block_k)
    tiles_m, tiles_n = triton.cdiv(num_tokens, block_m), triton.cdiv(group_size, block_n)
    band, chained = min(band, tiles_m), can_chain(x)
    num_bands = triton.cdiv(tiles_m, band)
    _gemm_mn_kernel[(num_bands * num_groups * band * tiles_n,)](
        x, weight if descriptor is None else descriptor, second, out if bias is None else bias, out, counts, rows,
        num_tokens, num_channels, num_inputs, num_groups, group_size, band, x.stride(0), weight.stride(0),
        second.stride(0), out.stride(0), FUSED=up_weight is not None, SWAPPED=swapped, HAS_BIAS=bias is not None,
        ZEROS=zeros, BULK=descriptor is not None, EVEN_K=num_inputs % block_k == 0, CHAINED=chained,
        HALF_LAST=schedule > 0, RUNS=triton.next_power_of_2(num_bands * num_groups) if schedule == 2 else 0,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps, num_stages=num_stages,
        **chain_option(chained),
    )  # fmt: skip
    return out


@triton.jit
def weight_block(
    w, row, col, num_rows, num_cols, stride, BULK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """[BLOCK_K, BLOCK_N] of the weight, transposed; zeros outside of it."""
    if BULK:
        return w.load([row, col]).T
    else:
        n = row + tl.arange(0, BLOCK_N)
        k = col + tl.arange(0, BLOCK_K)
        pointers = w + n.to(tl.int64)[None, :] * stride + k[:, None]
        return tl.load(pointers, mask=(n < num_rows)[None, :] & (k < num_cols)[:, None], other=0.0)


@triton.jit
def _pair_block(
    w, w_up, row, col, num_rows, num_cols, stride, stride_up, BULK: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K, 2 * BLOCK_N]: the same block of two weights side by side, so that one instruction takes both."""
    if BULK:
        return w.load([0, row, col]).reshape(2 * BLOCK_N, BLOCK_K).T
    else:
        both = tl.arange(0, 2 * BLOCK_N)
        n = row + both % BLOCK_N
        k = col + tl.arange(0, BLOCK_K)
        first = w + n.to(tl.int64)[None, :] * stride + k[:, None]
        second = w_up + n.to(tl.int64)[None, :] * stride_up + k[:, None]
        pointers = tl.where((both < BLOCK_N)[None, :], first, second)
        return tl.load(pointers, mask=(n < num_rows)[None, :] & (k < num_cols)[:, None], other=0.0)


@triton.jit
def _listed_first(counts, num_tokens, num_groups, band, tiles_n, BLOCK_M: tl.constexpr, RUNS: tl.constexpr):
    """Group, first place in its list and column tile of this program when tiles that hold tokens come first.

    A run is one group's tiles of one band. Programs are dealt to the runs' filled tiles, then to their empty ones;
    the last value is False past both.
    """
    run = tl.arange(0, RUNS)
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    num_runs = tl.cdiv(tiles_m, band) * num_groups
    lowest = (run // num_groups) * band
    tiles = tl.where(run < num_runs, tl.minimum(tiles_m - lowest, band), 0)
    count = tl.load(counts + run % num_groups, mask=run < num_runs, other=0)
    filled = tl.minimum(tl.maximum(tl.cdiv(count, BLOCK_M) - lowest, 0), tiles)
    num_filled = tl.sum(filled) * tiles_n
    on = tl.program_id(0) < num_filled
    here = tl.where(on, filled, tiles - filled) * tiles_n
    place = tl.where(on, tl.program_id(0), tl.program_id(0) - num_filled)
    ends = tl.cumsum(here, 0)
    chosen = tl.minimum(tl.sum((ends <= place).to(tl.int32)), num_runs - 1)
    mine = run == chosen
    place -= tl.sum(tl.where(mine, ends - here, 0))
    skipped = tl.where(on, 0, tl.sum(tl.where(mine, filled, 0)))
    first = ((chosen // num_groups) * band + skipped + place // tiles_n) * BLOCK_M
    return chosen % num_groups, first, place % tiles_n, tl.program_id(0) < tl.sum(tiles) * tiles_n


@triton.jit
def _place(
    out, row_list, first, group, column, num_tokens, num_channels, group_size, stride_out, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Where a tile lies: places in the group's list, tokens and channels there, what of both exists, and pointers."""
    position = first + tl.arange(0, BLOCK_M)
    listed = position < num_tokens
    token = tl.load(row_list + position, mask=listed, other=0).to(tl.int64)
    n = column + tl.arange(0, BLOCK_N)
    channel = group * group_size + n
    inside = (n < group_size) & (channel < num_channels)
    return position, listed, token, channel, inside, out + token[:, None] * stride_out + channel[None, :]


@triton.jit
def _product(
    x, w, w_up, bias, out, row_list, first, count, group, column,
    num_tokens, num_channels, num_inputs, group_size, stride_x, stride_w, stride_up, stride_out,
    FUSED: tl.constexpr, SWAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, ZEROS: tl.constexpr, BULK: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile: BLOCK_M tokens of the group's list from `first` on, BLOCK_N channels from `column` on."""
    position, listed, token, channel, inside, pointers = _place(
        out, row_list, first, group, column, num_tokens, num_channels, group_size, stride_out, BLOCK_M, BLOCK_N
    )
    row = group * group_size + column
    k = tl.arange(0, BLOCK_K)
    x_pointers = x + token[:, None] * stride_x + k[None, :]
    WIDTH: tl.constexpr = 2 * BLOCK_N if FUSED else BLOCK_N
    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_pointers + start)
        else:
            a = tl.load(x_pointers + start, mask=(k < num_inputs - start)[None, :], other=0.0)
        if FUSED:
            b = _pair_block(w, w_up, row, start, num_channels, num_inputs, stride_w, stride_up, BULK, BLOCK_N, BLOCK_K)
        else:
            b = weight_block(w, row, start, num_channels, num_inputs, stride_w, BULK, BLOCK_N, BLOCK_K)
        acc = mma(a, b, acc, "ieee")
    if FUSED:
        lower, upper = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        gate = upper if SWAPPED else lower
        up = lower if SWAPPED else upper
        result = gate / (1.0 + tl.exp(-gate)) * up
    else:
        result = acc
    if HAS_BIAS:
        result += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    runs = position < count
    if ZEROS:
        result = tl.where(runs[:, None], result, 0.0)
        runs = listed
    tl.store(pointers, narrow(result, out.dtype.element_ty), mask=runs[:, None] & inside[None, :])


@triton.jit
def _zeros(
    out, row_list, first, group, column, num_tokens, num_channels, group_size, stride_out, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Zeros in one tile of tokens that skip the group."""
    _, listed, _, _, inside, pointers = _place(
        out, row_list, first, group, column, num_tokens, num_channels, group_size, stride_out, BLOCK_M, BLOCK_N
    )
    tl.store(pointers, tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty), mask=listed[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_tokens", "band"])
def _gemm_mn_kernel(
    x, w, w_up, bias, out, counts, rows,
    num_tokens, num_channels, num_inputs, num_groups, group_size, band, stride_x, stride_w, stride_up, stride_out,
    FUSED: tl.constexpr, SWAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, ZEROS: tl.constexpr, BULK: tl.constexpr,
    EVEN_K: tl.constexpr, CHAINED: tl.constexpr, HALF_LAST: tl.constexpr, RUNS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Order: bands of token tiles, then groups, then the band's token tiles, then columns. Lists are ascending, so a
    # band is about the same tokens in every group, and its activations stay in the L2 cache while weights stream by.
    tiles_n = tl.cdiv(group_size, BLOCK_N)
    if RUNS > 0:
        if CHAINED:
            tl.extra.cuda.gdc_wait()
        group, first, tile, exists = _listed_first(counts, num_tokens, num_groups, band, tiles_n, BLOCK_M, RUNS)
        column = tile * BLOCK_N
        if not exists:
            return
    else:
        per_group = tiles_n * band
        group = (tl.program_id(0) // per_group) % num_groups
        tile = tl.program_id(0) % per_group
        first = ((tl.program_id(0) // (per_group * num_groups)) * band + tile // tiles_n) * BLOCK_M
        column = (tile % tiles_n) * BLOCK_N  # within the group
        if first >= num_tokens:
            return
        if CHAINED:
            tl.extra.cuda.gdc_wait()
    count = tl.load(counts + group)
    if first >= count and not ZEROS:
        return
    row_list = rows + tl.cast(group, tl.int64) * num_tokens
    if first >= count:
        _zeros(out, row_list, first, group, column, num_tokens, num_channels, group_size, stride_out, BLOCK_M, BLOCK_N)
        return
    if HALF_LAST and count - first <= BLOCK_M // 2:
        _product(
            x, w, w_up, bias, out, row_list, first, count, group, column, num_tokens, num_channels, num_inputs,
            group_size, stride_x, stride_w, stride_up, stride_out, FUSED, SWAPPED, HAS_BIAS, ZEROS, BULK, EVEN_K,
            BLOCK_M // 2, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if ZEROS:
            _zeros(
                out, row_list, first + BLOCK_M // 2, group, column, num_tokens, num_channels, group_size, stride_out,
                BLOCK_M // 2, BLOCK_N,
            )  # fmt: skip
        return
    _product(
        x, w, w_up, bias, out, row_list, first, count, group, column, num_tokens, num_channels, num_inputs, group_size,
        stride_x, stride_w, stride_up, stride_out, FUSED, SWAPPED, HAS_BIAS, ZEROS, BULK, EVEN_K, BLOCK_M, BLOCK_N,
        BLOCK_K,
    )  # fmt: skip
