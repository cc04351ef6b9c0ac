"""Products whose *output* channels are pruned by token: the Q projection, gate, up, and gate+up+SiLU in one kernel.

`gemm_mn`: out[t, n] = x[t] . weight[n] (+ bias[n]) wherever token t runs the group of channel n.
`gate_up`: out[t, f] = silu(x[t] . gate[f]) * (x[t] . up[f]), likewise.
A program multiplies 128 tokens of one group (gathered by the layout's list) with a block of the group's weight rows.
Sums are float32. A skipped block holds exact zeros or, when the caller says `skipped="undefined"`, anything.
Axes: T tokens, K input channels, N output channels, G groups of `group_size` channels (the last may be narrower).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ._launch import (
    can_chain,
    chain_option,
    last_dim_contiguous,
    refuse_gradient,
    row_block_descriptor,
    row_pair_descriptor,
    runs_triton,
)
from .dispatch import Plan, choose
from .gqa import mma, narrow
from .layout import RoutingLayout
from .masking import channel_mask, mask_blocks_, silu_mul
from .one_token import launch_mn

SKIPPED = ("zeros", "undefined")


def gemm_mn(
    x: torch.Tensor, weight: torch.Tensor, layout: RoutingLayout, bias: torch.Tensor | None = None, *,
    group_size: int | None = None, skipped: str = "undefined", plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """Token-pruned linear layer: [T, K] x [N, K] -> [T, N], computed where `layout.keep_mask[T, G]` is True.

    `group_size` defaults to N / G and must be given when the last group is narrower. `bias` is [N] and is added to
    running blocks only. `skipped` says what other blocks hold: "undefined" (the caller never reads them; free) or
    "zeros". `plan` overrides the measured table (see `dispatch`). Few tokens or narrow groups run the dense product,
    which fills skipped "undefined" blocks with the unpruned values.
    Raises ValueError for shapes, dtypes or devices that do not fit, RuntimeError when a gradient would be needed.
    Source: WIDE (arXiv 2607.28418) names the operator; the gather-fused form is that of mixture-of-experts kernels.
    """
    refuse_gradient("gemm_mn", x, weight, bias)
    group_size = check_operands("gemm_mn", x, weight, layout, weight.shape[0], group_size, bias)
    check_skipped(skipped)
    plan = plan or choose("gemm_mn", x, weight, layout, group_size)
    return _gemm_mn(
        x, weight, None, bias, layout.keep_mask, layout.lists(plan.route),
        group_size, skipped == "zeros", plan.route, list(plan.config), 0,
    )  # fmt: skip


def gate_up(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, layout: RoutingLayout, *,
    group_size: int | None = None, skipped: str = "zeros", spare: int = 0, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """Token-pruned first half of a gated FFN: silu(x gate^T) * (x up^T), [T, K] -> [T, N], both weights [N, K].

    The products and the activation stay in float32 and are rounded once, at the end. `skipped` defaults to "zeros",
    which a dense down projection needs. `spare` undefined columns are allocated behind every row, so that the caller
    can extend rows in place (see `masking.skipped_columns_`). Other arguments and errors: `gemm_mn`.
    """
    refuse_gradient("gate_up", x, gate_weight, up_weight)
    group_size = check_operands("gate_up", x, gate_weight, layout, gate_weight.shape[0], group_size, None)
    if up_weight.shape != gate_weight.shape or up_weight.dtype != gate_weight.dtype or up_weight.stride(1) != 1:
        raise ValueError(
            f"gate_up: up_weight {tuple(up_weight.shape)} must be like gate_weight {tuple(gate_weight.shape)}"
        )
    check_skipped(skipped)
    plan = plan or choose("gate_up", x, gate_weight, layout, group_size)
    return _gemm_mn(
        x, gate_weight, up_weight, None, layout.keep_mask, layout.lists(plan.route), group_size, skipped == "zeros",
        plan.route, list(plan.config), spare,
    )  # fmt: skip


def check_skipped(skipped: str) -> None:
    """ValueError unless `skipped` is one of the two declared contents of a skipped block."""
    if skipped not in SKIPPED:
        raise ValueError(f"skipped must be one of {', '.join(SKIPPED)}, got {skipped!r}")


def check_operands(
    operator: str, x: torch.Tensor, weight: torch.Tensor, layout: RoutingLayout, num_channels: int,
    group_size: int | None, bias: torch.Tensor | None,
) -> int:  # fmt: skip
    """Check one call and return the group width; `num_channels` is the length of the pruned axis."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"{operator}: x [T, K] and weight [N, K] needed, got {tuple(x.shape)}, {tuple(weight.shape)}")
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise ValueError(f"{operator}: x and weight need one floating dtype, got {x.dtype} and {weight.dtype}")
    if len({x.device, weight.device, layout.keep_mask.device}) > 1:
        raise ValueError(
            f"{operator}: x, weight and layout lie on {x.device}, {weight.device}, {layout.keep_mask.device}"
        )
    if weight.stride(1) != 1:
        raise ValueError(f"{operator}: weight rows must be contiguous (strides {weight.stride()}); copy it once")
    num_tokens, num_groups = layout.keep_mask.shape
    if num_tokens != x.shape[0]:
        raise ValueError(f"{operator}: the layout has {num_tokens} tokens, x has {x.shape[0]}")
    if group_size is None and num_channels % num_groups:
        raise ValueError(f"{operator}: {num_channels} channels do not split into {num_groups} groups: give group_size")
    group_size = num_channels // num_groups if group_size is None else group_size
    if group_size < 1 or -(-num_channels // group_size) != num_groups:
        raise ValueError(f"{operator}: groups of {group_size} do not cut {num_channels} channels into {num_groups}")
    if bias is not None and (bias.shape != (weight.shape[0],) or bias.dtype != x.dtype):
        raise ValueError(f"{operator}: bias must be {x.dtype}[{weight.shape[0]}], got {bias.dtype}{tuple(bias.shape)}")
    return group_size


@torch.library.custom_op("wide_kernels::gemm_mn", mutates_args=())
def _gemm_mn(
    x: torch.Tensor, weight: torch.Tensor, up_weight: torch.Tensor | None, bias: torch.Tensor | None,
    keep_mask: torch.Tensor, lists: list[torch.Tensor], group_size: int, zeros: bool, route: str, config: list[int],
    spare: int,
) -> torch.Tensor:  # fmt: skip
    x = last_dim_contiguous(x)
    if x.shape[0] == 0 or weight.shape[0] == 0:
        return _rows(x, weight, spare)
    if route == "dense" or not runs_triton(x):
        return _dense(x, weight, up_weight, bias, keep_mask, group_size, zeros, spare)
    first, second = lists
    if route == "one_token":
        few = launch_mn(x, weight, up_weight, bias, keep_mask, first, second, group_size, config)
        return _rows(x, weight, spare).copy_(few) if spare else few
    return _launch(x, weight, up_weight, bias, first, second, group_size, zeros, config, spare)


@_gemm_mn.register_fake
def _(x, weight, up_weight, bias, keep_mask, lists, group_size, zeros, route, config, spare):
    return _rows(x, weight, spare)


def _rows(x: torch.Tensor, weight: torch.Tensor, spare: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] + spare)[:, : weight.shape[0]]


def _dense(x, weight, up_weight, bias, keep_mask, group_size, zeros, spare) -> torch.Tensor:
    if up_weight is not None:
        out = _rows(x, weight, spare) if spare else None
        return silu_mul(F.linear(x, weight), F.linear(x, up_weight), keep_mask if zeros else None, group_size, out)
    out = F.linear(x, weight, bias)
    return mask_blocks_(out, keep_mask, group_size) if zeros else out


def _launch(x, weight, up_weight, bias, counts, rows, group_size, zeros, config, spare) -> torch.Tensor:
    """config: block_m, block_n, block_k, token tiles of a band, num_warps, num_stages."""
    num_tokens, num_inputs = x.shape
    num_channels, num_groups = weight.shape[0], counts.shape[0]
    block_m, block_n, block_k, band, num_warps, num_stages = config
    if x.dtype == torch.float32:  # short chains of additions, see `mma`; no rate to lose without tensor cores
        block_k = 16
    out = _rows(x, weight, spare)
    second, swapped = weight, False
    if up_weight is None:
        descriptor = row_block_descriptor(weight, block_n, block_k)
    else:
        second = up_weight
        descriptor, swapped = row_pair_descriptor(weight, up_weight, block_n, block_k)
    tiles_m, tiles_n = triton.cdiv(num_tokens, block_m), triton.cdiv(group_size, block_n)
    band, chained = min(band, tiles_m), can_chain(x)
    _gemm_mn_kernel[(triton.cdiv(tiles_m, band) * num_groups * band * tiles_n,)](
        x, weight if descriptor is None else descriptor, second, out if bias is None else bias, out, counts, rows,
        num_tokens, num_channels, num_inputs, num_groups, group_size, band, x.stride(0), weight.stride(0),
        second.stride(0), out.stride(0), FUSED=up_weight is not None, SWAPPED=swapped, HAS_BIAS=bias is not None,
        ZEROS=zeros, BULK=descriptor is not None, EVEN_K=num_inputs % block_k == 0, CHAINED=chained, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps, num_stages=num_stages, **chain_option(chained),
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


@triton.jit(do_not_specialize=["num_tokens", "band"])
def _gemm_mn_kernel(
    x, w, w_up, bias, out, counts, rows,
    num_tokens, num_channels, num_inputs, num_groups, group_size, band, stride_x, stride_w, stride_up, stride_out,
    FUSED: tl.constexpr, SWAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, ZEROS: tl.constexpr, BULK: tl.constexpr,
    EVEN_K: tl.constexpr, CHAINED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Order: bands of token tiles, then groups, then the band's token tiles, then columns. Lists are ascending, so a
    # band is about the same tokens in every group, and its activations stay in the L2 cache while weights stream by.
    tiles_n = tl.cdiv(group_size, BLOCK_N)
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
    position = first + tl.arange(0, BLOCK_M)  # place in the group's list
    listed = position < num_tokens
    token = tl.load(rows + tl.cast(group, tl.int64) * num_tokens + position, mask=listed, other=0).to(tl.int64)
    n = column + tl.arange(0, BLOCK_N)
    channel = group * group_size + n
    inside = (n < group_size) & (channel < num_channels)
    pointers = out + token[:, None] * stride_out + channel[None, :]
    if first >= count:
        tl.store(pointers, tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty), mask=listed[:, None] & inside[None, :])
        return

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


def reference(
    x: torch.Tensor, weight: torch.Tensor, layout: RoutingLayout, bias: torch.Tensor | None = None,
    group_size: int | None = None, **_: object,
) -> torch.Tensor:  # fmt: skip
    """gemm_mn with zeros in skipped blocks, in the inputs' precision."""
    out = x @ weight.T if bias is None else x @ weight.T + bias
    return out * channel_mask(layout.keep_mask, weight.shape[0], group_size)


def gate_up_reference(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, layout: RoutingLayout,
    group_size: int | None = None, **_: object,
) -> torch.Tensor:  # fmt: skip
    """gate_up with zeros in skipped blocks, in the inputs' precision."""
    out = F.silu(x @ gate_weight.T) * (x @ up_weight.T)
    return out * channel_mask(layout.keep_mask, gate_weight.shape[0], group_size)


def cases():
    """Odd widths, extreme masks, few tokens, strided inputs, every route (see `_cases`)."""
    from ._cases import mn_cases

    return mn_cases()


def bench_shapes() -> list[dict]:
    """The Q, gate and up projections of the benchmarked models: name, N, K and the group widths."""
    from ._models import mn_shapes

    return mn_shapes()
