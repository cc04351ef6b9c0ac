"""Products whose *input* channels are pruned by token: the down and O projections. Deterministic.

out[t] = sum over the groups g that token t runs of h[t, g] . weight[:, g]^T (+ bias) (+ a vector for each group that
it skips). Summing group by group would touch the output once a group; instead groups are taken in sets. Inside a set
the layout sorts the tokens by pattern in Gray-code order, a tile of neighbours multiplies the union of its groups
(rows that skip a group of the union read zeros), and each token has one partial row a set. The vectors are one more
step of a tile's product, its input the skipped pattern. A second kernel adds the sets in order. No atomics: every run
gives the same bits. Sums are float32 inside a set and across sets; between the kernels a partial row is kept in
float32 or in the output's type, as the plan says. The latter adds about as much error as the rounding of the output,
however many groups there are, since a set's part of the sum shrinks as fast as their number grows.
Axes: T tokens, K input channels, N output channels, G groups, S sets.
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
    runs_triton,
)
from .dispatch import Plan, choose
from .gemm_mn import SKIPPED, check_operands
from .gqa import mma, narrow
from .layout import RoutingLayout
from .masking import channel_mask, masked_blocks
from .mn_skip import weight_block
from .one_token import launch_k


def gemm_k(
    x: torch.Tensor, weight: torch.Tensor, layout: RoutingLayout, bias: torch.Tensor | None = None, *,
    group_size: int | None = None, skipped: str = "undefined", vectors: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """Token-pruned linear layer: [T, K] x [N, K] -> [T, N], summed over the groups with `layout.keep_mask[T, G]` True.

    `skipped` declares what x holds in skipped blocks: "undefined" (never used, NaN included) or "zeros" (as `gate_up`
    writes them; then a dense product needs no masking pass). `group_size` defaults to K / G and must be given when
    the last group is narrower. Every element of the output is written; a token with no group gets the bias or zero.
    `vectors` [G, N], contiguous, in x's dtype, are added one for each group that the token skips (compensation).
    Bit-equal from run to run. `plan` overrides the measured table (see `dispatch`).
    Raises ValueError for shapes, dtypes or devices that do not fit, RuntimeError when a gradient would be needed.
    Source: WIDE (arXiv 2607.28418) names the operator; pattern sets and ordered sums are this project's own.
    """
    refuse_gradient("gemm_k", x, weight, bias, vectors)
    group_size = check_operands("gemm_k", x, weight, layout, weight.shape[1], group_size, bias)
    if skipped not in SKIPPED:
        raise ValueError(f"skipped must be one of {', '.join(SKIPPED)}, got {skipped!r}")
    wanted = (layout.keep_mask.shape[1], weight.shape[0])
    if vectors is not None and (vectors.shape != wanted or vectors.dtype != x.dtype or not vectors.is_contiguous()):
        found = f"{vectors.dtype}{tuple(vectors.shape)} with strides {vectors.stride()}"
        raise ValueError(f"gemm_k: vectors must be contiguous {x.dtype}{wanted}, got {found}")
    plan = plan or choose("gemm_k", x, weight, layout, group_size)
    lists = layout.lists(plan.route, plan.config[3] if plan.route == "skip" else 0)
    zeros = skipped == "zeros"
    return _gemm_k(x, weight, bias, vectors, layout.keep_mask, lists, group_size, zeros, plan.route, list(plan.config))


@torch.library.custom_op("wide_kernels::gemm_k", mutates_args=())
def _gemm_k(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, vectors: torch.Tensor | None,
    keep_mask: torch.Tensor, lists: list[torch.Tensor], group_size: int, zeros: bool, route: str, config: list[int],
) -> torch.Tensor:  # fmt: skip
    x = last_dim_contiguous(x)
    if x.shape[0] == 0 or weight.shape[0] == 0:
        return x.new_empty(x.shape[0], weight.shape[0])
    if route == "dense" or not runs_triton(x):
        out = F.linear(x if zeros else masked_blocks(x, keep_mask, group_size), weight, bias)
        return add_vectors_(out, keep_mask, vectors)
    first, second = lists
    if route == "one_token":
        out = launch_k(x, weight, bias, keep_mask, first, second, group_size, config)
        return add_vectors_(out, keep_mask, vectors)
    return _launch(x, weight, bias, vectors, first, second, group_size, zeros, config)


@_gemm_k.register_fake
def _(x, weight, bias, vectors, keep_mask, lists, group_size, zeros, route, config):
    return x.new_empty(x.shape[0], weight.shape[0])


def add_vectors_(out: torch.Tensor, keep_mask: torch.Tensor, vectors: torch.Tensor | None) -> torch.Tensor:
    """out [T, N] plus the vectors [G, N] of the groups that keep_mask bool[T, G] skips, in a pass of its own."""
    if vectors is None:
        return out
    return out.addmm_(torch.logical_not(keep_mask, out=keep_mask.new_empty(keep_mask.shape, dtype=out.dtype)), vectors)


def _launch(x, weight, bias, vectors, set_rows, set_codes, group_size, zeros, config) -> torch.Tensor:
    """config: block_m, block_n, block_k, groups of a set, bits of a partial sum (16 or 32), num_warps, num_stages."""
    num_tokens, num_inputs = x.shape
    num_outputs, num_sets = weight.shape[0], set_rows.shape[0]
    block_m, block_n, block_k, set_size, bits, num_warps, num_stages = config
    if x.dtype == torch.float32:  # short chains of additions, see `mma`
        block_k = 16
    out = torch.empty(num_tokens, num_outputs, dtype=x.dtype, device=x.device)
    partial_type = torch.float32 if bits == 32 else x.dtype
    parts = torch.empty(num_sets, num_tokens, num_outputs, dtype=partial_type, device=x.device) if num_sets > 1 else out
    even = group_size % block_k == 0 and num_inputs % group_size == 0
    descriptor = row_block_descriptor(weight, block_n, block_k) if group_size % block_k == 0 else None
    chained = can_chain(x)
    _set_products_kernel[(num_sets * triton.cdiv(num_tokens, block_m) * triton.cdiv(num_outputs, block_n),)](
        x, weight if descriptor is None else descriptor, out if bias is None else bias,
        out if vectors is None else vectors, parts, set_rows, set_codes, num_tokens, num_outputs, num_inputs,
        triton.cdiv(num_inputs, group_size), x.stride(0), weight.stride(0), GROUP=group_size, SET=set_size,
        HAS_BIAS=bias is not None and num_sets == 1, HAS_VECTORS=vectors is not None, BULK=descriptor is not None,
        EVEN=even, ZEROS=zeros and even, CHAINED=chained, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=num_warps, num_stages=num_stages, **chain_option(chained),
    )  # fmt: skip
    if num_sets > 1:
        _add_sets_kernel[(triton.cdiv(out.numel(), 2048),)](
            parts, out if bias is None else bias, out, out.numel(), num_outputs, NUM_SETS=num_sets,
            HAS_BIAS=bias is not None, CHAINED=chained, BLOCK=2048, num_warps=4, **chain_option(chained),
        )  # fmt: skip
    return out


@triton.jit
def _or(a, b):
    return a | b


@triton.jit(do_not_specialize=["num_tokens"])
def _set_products_kernel(
    x, w, bias, vectors, parts, set_rows, set_codes, num_tokens, num_outputs, num_inputs, num_groups,
    stride_x, stride_w, GROUP: tl.constexpr, SET: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_VECTORS: tl.constexpr,
    BULK: tl.constexpr, EVEN: tl.constexpr, ZEROS: tl.constexpr, CHAINED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of one set's product; sets outermost, so that a set's activations and weights stay in the L2 cache."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    tiles_n = tl.cdiv(num_outputs, BLOCK_N)
    tile_n = tl.program_id(0) % tiles_n
    tile_m = (tl.program_id(0) // tiles_n) % tiles_m
    index = tl.program_id(0) // (tiles_n * tiles_m)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, 16)  # groups of the set; a matrix product takes no fewer than 16
    if HAS_VECTORS:  # weights, like `w`: read before the kernel before this one has ended
        owner = index * SET + lane
        known = (lane < SET) & (owner < num_groups)
        v_pointers = vectors + owner.to(tl.int64)[:, None] * num_outputs + n[None, :]
        v = tl.load(v_pointers, mask=known[:, None] & (n < num_outputs)[None, :], other=0.0)
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    position = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)  # place in the set's order
    listed = position < num_tokens
    place = tl.cast(index, tl.int64) * num_tokens + position
    token = tl.load(set_rows + place, mask=listed, other=0).to(tl.int64)
    code = tl.load(set_codes + place, mask=listed, other=0)
    union = tl.reduce(code, 0, _or)
    running = 0
    groups = 0  # the union's groups, four bits each
    for i in tl.static_range(SET):
        on = (union >> i) & 1
        groups |= (on * i) << (4 * running)
        running += on

    k = tl.arange(0, BLOCK_K)
    x_pointers = x + token[:, None] * stride_x + k[None, :]
    STEPS: tl.constexpr = (GROUP + BLOCK_K - 1) // BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if HAS_VECTORS:
        skips = tl.where(((code[:, None] >> lane[None, :]) & 1) == 0, 1.0, 0.0).to(v.dtype)
        acc = mma(skips, v, acc, "ieee")
    for step in range(0, running * STEPS):
        group = (groups >> (4 * (step // STEPS))) & 15
        inner = (step % STEPS) * BLOCK_K
        start = (index * SET + group) * GROUP + inner
        runs = (((code >> group) & 1) != 0)[:, None]
        if ZEROS:  # the rows that skip the group hold zeros
            a = tl.load(x_pointers + start)
            end = num_inputs
        elif EVEN:
            a = tl.load(x_pointers + start, mask=runs, other=0.0)
            end = num_inputs
        else:
            end = tl.minimum(start - inner + GROUP, num_inputs)
            a = tl.load(x_pointers + start, mask=runs & (k < end - start)[None, :], other=0.0)
        b = weight_block(w, tile_n * BLOCK_N, start, num_outputs, end, stride_w, BULK, BLOCK_N, BLOCK_K)
        acc = mma(a, b, acc, "ieee")
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)[None, :]
    row = tl.cast(index, tl.int64) * num_tokens + token
    pointers = parts + row[:, None] * num_outputs + n[None, :]
    tl.store(pointers, narrow(acc, parts.dtype.element_ty), mask=listed[:, None] & (n < num_outputs)[None, :])


@triton.jit(do_not_specialize=["size"])
def _add_sets_kernel(
    parts, bias, out, size, num_outputs, NUM_SETS: tl.constexpr, HAS_BIAS: tl.constexpr, CHAINED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t, n] = the sets' partial sums in order (+ bias[n])."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    acc = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(NUM_SETS):
        offset = tl.cast(size, tl.int64) * index
        acc += tl.load(parts + offset + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + place % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, narrow(acc, out.dtype.element_ty), mask=inside)


def reference(
    x: torch.Tensor, weight: torch.Tensor, layout: RoutingLayout, bias: torch.Tensor | None = None,
    group_size: int | None = None, vectors: torch.Tensor | None = None, **_: object,
) -> torch.Tensor:  # fmt: skip
    """gemm_k in the inputs' precision; skipped blocks of x are not used, whatever they hold."""
    out = x.masked_fill(~channel_mask(layout.keep_mask, x.shape[1], group_size), 0) @ weight.T
    out = out if bias is None else out + bias
    return out if vectors is None else out + (~layout.keep_mask).to(out.dtype) @ vectors


def cases():
    """Odd widths, extreme masks, few tokens, strided inputs, NaN in skipped blocks, every route (see `_cases`)."""
    from ._cases import k_cases

    return k_cases()


def bench_shapes() -> list[dict]:
    """The O and down projections of the benchmarked models: name, N, K and the group widths."""
    from ._models import k_shapes

    return k_shapes()
