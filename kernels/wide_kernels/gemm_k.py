"""Products whose *input* channels are pruned by token: the down and O projections. Deterministic, float32 sums.

out[t] = sum over the groups g that token t runs of h[t, g] . weight[:, g]^T (+ bias). Summing group by group would
touch the float32 output once a group; instead groups are taken in sets. Inside a set the layout sorts the tokens by
pattern in Gray-code order, a tile of neighbours multiplies the union of its groups (rows that skip a group of the
union read zeros), and each token has one row a set. Sets add up in order: a tile waits until the previous set
has finished its columns, so there are no racing atomics and every run gives the same bits.
Programs start in the order of their index, so whatever a tile waits for is running or done.
Axes: T tokens, K input channels, N output channels, G groups, S sets.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ._launch import last_dim_contiguous, refuse_gradient, row_block_descriptor, runs_triton
from .dispatch import Plan, choose
from .gemm_mn import SKIPPED, channel_mask, check_operands, weight_block
from .gqa import mma, narrow
from .layout import RoutingLayout
from .masking import masked_blocks
from .one_token import launch_k


def gemm_k(
    x: torch.Tensor, weight: torch.Tensor, layout: RoutingLayout, bias: torch.Tensor | None = None, *,
    group_size: int | None = None, skipped: str = "undefined", plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """Token-pruned linear layer: [T, K] x [N, K] -> [T, N], summed over the groups with `layout.keep_mask[T, G]` True.

    `skipped` declares what x holds in skipped blocks: "undefined" (never used, NaN included) or "zeros" (as `gate_up`
    writes them; then a dense product needs no masking pass). `group_size` defaults to K / G and must be given when
    the last group is narrower. Every element of the output is written; a token with no group gets the bias or zero.
    Bit-equal from run to run. `plan` overrides the measured table (see `dispatch`).
    Raises ValueError for shapes, dtypes or devices that do not fit, RuntimeError when a gradient would be needed.
    Source: WIDE (arXiv 2607.28418) names the operator; pattern sets and ordered sums are this project's own.
    """
    refuse_gradient("gemm_k", x, weight, bias)
    group_size = check_operands("gemm_k", x, weight, layout, weight.shape[1], group_size, bias)
    if skipped not in SKIPPED:
        raise ValueError(f"skipped must be one of {', '.join(SKIPPED)}, got {skipped!r}")
    plan = plan or choose("gemm_k", x, weight, layout, group_size)
    lists, zeros = layout.lists(plan.route), skipped == "zeros"
    mask, sets = layout.keep_mask, layout.set_size
    return _gemm_k(x, weight, bias, mask, lists, sets, group_size, zeros, plan.route, list(plan.config))


@torch.library.custom_op("wide_kernels::gemm_k", mutates_args=())
def _gemm_k(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, keep_mask: torch.Tensor,
    lists: list[torch.Tensor], set_size: int, group_size: int, zeros: bool, route: str, config: list[int],
) -> torch.Tensor:  # fmt: skip
    x = last_dim_contiguous(x)
    if x.shape[0] == 0 or weight.shape[0] == 0:
        return x.new_empty(x.shape[0], weight.shape[0])
    if route == "dense" or not runs_triton(x):
        return F.linear(x if zeros else masked_blocks(x, keep_mask, group_size), weight, bias)
    if route == "one_token":
        return launch_k(x, weight, bias, keep_mask, lists[4], lists[5], group_size, config)
    return _launch(x, weight, bias, lists[2], lists[3], set_size, group_size, config)


@_gemm_k.register_fake
def _(x, weight, bias, keep_mask, lists, set_size, group_size, zeros, route, config):
    return x.new_empty(x.shape[0], weight.shape[0])


def _launch(x, weight, bias, set_rows, set_codes, set_size, group_size, config) -> torch.Tensor:
    num_tokens, num_inputs = x.shape
    num_outputs, num_sets = weight.shape[0], set_rows.shape[0]
    block_m, block_n, block_k, chunk, num_warps, num_stages = config
    tiles_m, tiles_n = triton.cdiv(num_tokens, block_m), triton.cdiv(num_outputs, block_n)
    chunk = min(chunk, triton.cdiv(tiles_n, 2))
    out = torch.empty(num_tokens, num_outputs, dtype=x.dtype, device=x.device)
    sums = torch.empty((num_tokens, num_outputs) if num_sets > 1 else (1, 1), dtype=torch.float32, device=x.device)
    finished = torch.zeros(num_sets, tiles_n, dtype=torch.int32, device=x.device)
    descriptor = row_block_descriptor(weight, block_n, block_k) if group_size % block_k == 0 else None
    _gemm_k_kernel[(triton.cdiv(tiles_n, 2 * chunk) * 2 * chunk * num_sets * tiles_m,)](
        x, descriptor if descriptor is not None else weight, bias if bias is not None else out, out, sums, finished,
        set_rows, set_codes, num_tokens, num_outputs, num_inputs, num_sets, group_size, x.stride(0), weight.stride(0),
        HAS_BIAS=bias is not None, BULK=descriptor is not None, SET=set_size,
        EVEN=group_size % block_k == 0 and num_inputs % group_size == 0,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, CHUNK=chunk, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _nth_group(union, n: tl.constexpr, SET: tl.constexpr):
    """Index of the n-th set bit of `union`, 0 when it has fewer."""
    seen = 0
    found = 0
    for i in tl.static_range(SET):
        on = (union >> i) & 1
        found = tl.where((on == 1) & (seen == n), i, found)
        seen += on
    return found, seen


@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_k_kernel(
    x, w, bias, out, sums, finished, set_rows, set_codes,
    num_tokens, num_outputs, num_inputs, num_sets, group_size, stride_x, stride_w,
    HAS_BIAS: tl.constexpr, BULK: tl.constexpr, SET: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # Order: column chunks in pairs, then sets, then the two chunks of the pair, then rows, then columns of the chunk,
    # so that a chunk's next set starts only after its neighbour's tiles and finds the sums still in the L2 cache.
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    tiles_n = tl.cdiv(num_outputs, BLOCK_N)
    per_chunk = tiles_m * CHUNK
    tile = tl.program_id(0)
    pair = tile // (2 * per_chunk * num_sets)
    tile = tile % (2 * per_chunk * num_sets)
    index = tile // (2 * per_chunk)
    half = (tile // per_chunk) % 2
    tile_n = (pair * 2 + half) * CHUNK + tile % CHUNK
    if tile_n >= tiles_n:
        return
    position = ((tile % per_chunk) // CHUNK) * BLOCK_M + tl.arange(0, BLOCK_M)  # place in the set's order
    listed = position < num_tokens
    place = tl.cast(index, tl.int64) * num_tokens + position
    token = tl.load(set_rows + place, mask=listed, other=0).to(tl.int64)
    code = tl.load(set_codes + place, mask=listed, other=0)
    union = tl.reduce(code, 0, _or)
    g0, num_groups = _nth_group(union, 0, SET)
    g1, num_groups = _nth_group(union, 1, SET)
    g2, num_groups = _nth_group(union, 2, SET)
    g3, num_groups = _nth_group(union, 3, SET)
    g4, num_groups = _nth_group(union, 4, SET)

    k = tl.arange(0, BLOCK_K)
    x_pointers = x + token[:, None] * stride_x + k[None, :]
    steps = tl.cdiv(group_size, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, num_groups * steps):
        slot = step // steps
        group = tl.where(slot < 2, tl.where(slot == 0, g0, g1), tl.where(slot == 2, g2, tl.where(slot == 3, g3, g4)))
        inner = (step % steps) * BLOCK_K
        start = (index * SET + group) * group_size + inner
        runs = ((code >> group) & 1) != 0
        if EVEN:
            a = tl.load(x_pointers + start, mask=runs[:, None], other=0.0)
            b = weight_block(w, tile_n * BLOCK_N, start, num_outputs, num_inputs, stride_w, BULK, BLOCK_N, BLOCK_K)
        else:
            end = tl.minimum(start - inner + group_size, num_inputs)
            a = tl.load(x_pointers + start, mask=runs[:, None] & (k < end - start)[None, :], other=0.0)
            b = weight_block(w, tile_n * BLOCK_N, start, num_outputs, end, stride_w, BULK, BLOCK_N, BLOCK_K)
        acc = mma(a, b, acc, "ieee")

    if index > 0:
        previous = finished + (index - 1) * tiles_n + tile_n
        done = tl.atomic_add(previous, 0, sem="acquire")
        while done < tiles_m:
            done = tl.atomic_add(previous, 0, sem="acquire")
    # By column halves, so that the sums read back do not need as many registers again as the tile.
    left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
    half_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N // 2)
    last = index == num_sets - 1
    touched = listed & ((code != 0) | (index == 0) | last)
    _add_set(left, half_n, bias, out, sums, token, touched, num_outputs, index > 0, last, HAS_BIAS)
    _add_set(right, half_n + BLOCK_N // 2, bias, out, sums, token, touched, num_outputs, index > 0, last, HAS_BIAS)
    if not last:
        tl.debug_barrier()
        tl.atomic_add(finished + index * tiles_n + tile_n, 1, sem="release")


@triton.jit
def _add_set(acc, n, bias, out, sums, token, touched, num_outputs, add, last, HAS_BIAS: tl.constexpr):
    """Add one set's products to the running sums, or write the output when it is the last set."""
    inside = touched[:, None] & (n < num_outputs)[None, :]
    offsets = token[:, None] * num_outputs + n[None, :]
    if add:
        acc += tl.load(sums + offsets, mask=inside, other=0.0, cache_modifier=".cg")
    if last:
        if HAS_BIAS:
            acc += tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)[None, :]
        tl.store(out + offsets, narrow(acc, out.dtype.element_ty), mask=inside)
    else:
        tl.store(sums + offsets, acc, mask=inside)


def reference(
    x: torch.Tensor, weight: torch.Tensor, layout: RoutingLayout, bias: torch.Tensor | None = None,
    group_size: int | None = None, **_: object,
) -> torch.Tensor:  # fmt: skip
    """gemm_k in the inputs' precision; skipped blocks of x are not used, whatever they hold."""
    out = x.masked_fill(~channel_mask(layout.keep_mask, x.shape[1], group_size), 0) @ weight.T
    return out if bias is None else out + bias


def cases():
    """Odd widths, extreme masks, few tokens, strided inputs, NaN in skipped blocks, every route (see `_cases`)."""
    from ._cases import k_cases

    return k_cases()


def bench_shapes() -> list[dict]:
    """The O and down projections of the benchmarked models: name, N, K and the group widths."""
    from ._models import k_shapes

    return k_shapes()
