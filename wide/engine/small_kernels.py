"""Device code of `wide.engine.small`: norm, routing decisions, one-token routing, rotary embedding with cache write."""

import triton
import triton.language as tl
from wide_kernels.gqa import narrow, wait_and_release

ROUTER_EPS = tl.constexpr(1e-6)


@triton.jit
def add_norm_kernel(residual, delta, weight, out, square, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    """One token: residual += delta; out = norm(residual) * weight; square = mean of residual^2."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(residual + token * width + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta + token * width + column, mask=inside, other=0.0).to(tl.float32)
        rounded = narrow(x, residual.dtype.element_ty)
        tl.store(residual + token * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    mean_square = tl.sum(x * x) / width
    tl.store(square + token, mean_square)
    normed = narrow(x * tl.rsqrt(mean_square + eps), out.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, narrow(normed * w, out.dtype.element_ty), mask=inside)


@triton.jit
def decide_kernel(
    reduced, square, reduce_bias, decide, bias, positions, keep, num_tokens, num_groups, num_rows,
    RANK: tl.constexpr, PARTS: tl.constexpr, RANK_P: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """BLOCK_M tokens x BLOCK_G groups of keep = decide(act(reduced)) + bias >= 0."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    rank = tl.arange(0, RANK_P)
    live, known = token < num_tokens, group < num_groups
    filled = live[:, None] & (rank < RANK)[None, :]
    z = tl.zeros((BLOCK_M, RANK_P), tl.float32)
    for part in tl.static_range(PARTS):
        z += tl.load(reduced + token[:, None] * (PARTS * RANK) + part * RANK + rank[None, :], mask=filled, other=0.0)
    if NORM:
        z *= tl.rsqrt(tl.load(square + token, mask=live, other=1.0) + ROUTER_EPS)[:, None]
    z += tl.load(reduce_bias + rank, mask=rank < RANK, other=0.0)[None, :]
    if SILU:
        z = z / (1.0 + tl.exp(-z))
    w = tl.load(decide + group[None, :] * RANK + rank[:, None], mask=known[None, :] & (rank < RANK)[:, None], other=0.0)
    logits = tl.dot(z, w, input_precision="ieee")
    if HAS_POSITIONS:
        row = tl.load(positions + token, mask=live, other=0) % num_rows
        logits += tl.load(
            bias + row[:, None] * num_groups + group[None, :], mask=live[:, None] & known[None, :], other=0.0
        )
    else:
        logits += tl.load(bias + group, mask=known, other=0.0)[None, :]
    on = (logits >= 0).to(tl.uint8)
    tl.store(keep + token[:, None] * num_groups + group[None, :], on, mask=live[:, None] & known[None, :])


@triton.jit
def route_token_kernel(
    residual, delta, previous, vectors, weight, out, reduce, reduce_bias, decide, bias, num_rows, length, start,
    keep, active, counts, partial, counter, width, eps, num_groups, num_previous, always,
    RANK: tl.constexpr, RANK_P: tl.constexpr, SPLITS: tl.constexpr, SPLITS_P: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDTH_P: tl.constexpr, ALWAYS_P: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr, HAS_DELTA: tl.constexpr,
    HAS_VECTORS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_G: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Every program adds its columns and multiplies them with the router; the last to finish norms and decides.

    A chain of waits on memory, so all that can be is read at its start, also what only the last program needs. A delta
    is all that the kernel before it wrote; so with one, everything else is read before waiting for that kernel.
    """
    split, rank = tl.program_id(0), tl.arange(0, RANK_P)
    column = split * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < width
    if not HAS_DELTA:
        wait_and_release(CHAINED)
    x = tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
    used = (rank < RANK)[:, None] & inside[None, :]
    w = tl.load(reduce + rank[:, None] * width + column[None, :], mask=used, other=0.0)
    row = bias
    if num_rows > 1:
        row += ((tl.load(length) - 1 - tl.load(start)) % num_rows) * num_groups
    first_rows, first_bias = _decide_rows(decide, row, 0, num_groups, RANK, RANK_P, BLOCK_G)
    rank_bias = tl.load(reduce_bias + rank, mask=rank < RANK, other=0.0)
    norm_weight = tl.load(weight + tl.arange(0, WIDTH_P), mask=tl.arange(0, WIDTH_P) < width, other=0.0)
    if HAS_VECTORS:
        for first in range(0, num_previous, BLOCK_V):
            group = first + tl.arange(0, BLOCK_V)
            known = group < num_previous
            pointers = vectors + group.to(tl.int64)[:, None] * width + column[None, :]
            values = tl.load(pointers, mask=known[:, None] & inside[None, :], other=0.0).to(tl.float32)
            skipped = tl.load(previous + group, mask=known, other=1) == 0
            x += tl.sum(tl.where(skipped[:, None], values, 0.0), 0)
    if HAS_DELTA:
        wait_and_release(CHAINED)
        x += tl.load(delta + column, mask=inside, other=0.0).to(tl.float32)
    x = narrow(x, residual.dtype.element_ty)
    tl.store(residual + column, x, mask=inside)
    x = x.to(tl.float32)
    tl.store(partial + split * (RANK_P + 1) + rank, tl.sum(w * x[None, :], 1))
    tl.store(partial + split * (RANK_P + 1) + RANK_P, tl.sum(x * x))
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") != SPLITS - 1:
        return
    tl.store(counter, 0)
    _finish_token(
        residual, norm_weight, out, partial, rank_bias, first_rows, first_bias, decide, row, keep, active, counts,
        width, eps, num_groups, always, RANK, RANK_P, SPLITS, SPLITS_P, WIDTH_P, ALWAYS_P, NORM, SILU, BLOCK_G,
    )  # fmt: skip


@triton.jit
def _finish_token(
    residual, norm_weight, out, partial, rank_bias, first_rows, first_bias, decide, bias, keep, active, counts,
    width, eps, num_groups, always, RANK: tl.constexpr, RANK_P: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_P: tl.constexpr, WIDTH_P: tl.constexpr, ALWAYS_P: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """The last program's part: norm, decisions, lists. What others stored is not read from the first-level cache."""
    splits = tl.arange(0, SPLITS_P)
    rank = tl.arange(0, RANK_P)
    everything = tl.arange(0, WIDTH_P)
    rows = partial + splits * (RANK_P + 1)
    squares = tl.load(rows + RANK_P, mask=splits < SPLITS, other=0.0, cache_modifier=".cg")
    parts = tl.load(rows[:, None] + rank[None, :], mask=(splits < SPLITS)[:, None], other=0.0, cache_modifier=".cg")
    whole = tl.load(residual + everything, mask=everything < width, other=0.0, cache_modifier=".cg").to(tl.float32)
    mean_square = tl.sum(squares) / width
    z = tl.sum(parts, 0)
    if NORM:
        z *= tl.rsqrt(mean_square + ROUTER_EPS)
    z += rank_bias
    if SILU:
        z = z / (1.0 + tl.exp(-z))
    normed = narrow(whole * tl.rsqrt(mean_square + eps), out.dtype.element_ty).to(tl.float32)
    scaled = narrow(normed * norm_weight.to(tl.float32), out.dtype.element_ty)
    tl.store(out + everything, scaled, mask=everything < width)
    _list_groups(
        z, first_rows, first_bias, decide, bias, keep, active, counts, num_groups, always,
        RANK, RANK_P, ALWAYS_P, BLOCK_G,
    )  # fmt: skip


@triton.jit
def _decide_rows(decide, bias, first, num_groups, RANK: tl.constexpr, RANK_P: tl.constexpr, BLOCK_G: tl.constexpr):
    """Rows `first`.. of the router's second product, [BLOCK_G, RANK_P], and their biases."""
    group, rank = first + tl.arange(0, BLOCK_G), tl.arange(0, RANK_P)
    known = group < num_groups
    filled = known[:, None] & (rank < RANK)[None, :]
    rows = tl.load(decide + group[:, None] * RANK + rank[None, :], mask=filled, other=0.0)
    return rows, tl.load(bias + group, mask=known, other=0.0)


@triton.jit
def _list_groups(
    z, w, b, decide, bias, keep, active, counts, num_groups, always,
    RANK: tl.constexpr, RANK_P: tl.constexpr, ALWAYS_P: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Decide every group; active ones go to the front of the list, then `always` more, skipped ones to its end.

    `w` and `b` are the first BLOCK_G rows of `decide` and `bias`.
    """
    num_on = 0
    for first in range(0, num_groups, BLOCK_G):
        group = first + tl.arange(0, BLOCK_G)
        known = group < num_groups
        if first > 0:
            w, b = _decide_rows(decide, bias, first, num_groups, RANK, RANK_P, BLOCK_G)
        on = ((tl.sum(w * z[None, :], 1) + b >= 0) & known).to(tl.int32)
        tl.store(keep + group, on.to(tl.uint8), mask=known)
        until = num_on + tl.cumsum(on)  # active groups up to this one
        place = tl.where(on != 0, until - 1, num_groups + always - 1 - (group - until))
        tl.store(active + place, group, mask=known)
        num_on += tl.sum(on)
    extra = tl.arange(0, ALWAYS_P)
    tl.store(keep + num_groups + extra, tl.full((ALWAYS_P,), 1, tl.uint8), mask=extra < always)
    tl.store(active + num_on + extra, num_groups + extra, mask=extra < always)
    tl.store(counts, num_on)
    tl.store(counts + 1, num_on + always)


@triton.jit
def _norm_heads(
    low, high, is_q, q_weight, k_weight, d, half: tl.constexpr, eps, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr
):
    """Both halves of heads [BLOCK_H, HALF_P] divided by their root mean square, times the weights of q or of k."""
    scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps)[:, None]
    low = narrow(low * scale, DTYPE).to(tl.float32)
    high = narrow(high * scale, DTYPE).to(tl.float32)
    w_low = tl.load(q_weight + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
    w_high = tl.load(q_weight + half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
    wk_low = tl.load(k_weight + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
    wk_high = tl.load(k_weight + half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
    low = narrow(low * tl.where(is_q, w_low, wk_low), DTYPE).to(tl.float32)
    return low, narrow(high * tl.where(is_q, w_high, wk_high), DTYPE).to(tl.float32)


@triton.jit
def rotate_kernel(
    q, kv, cos, sin, keys, values, start, length, q_weight, k_weight, keep, heads_per_group, stride_q, stride_kv,
    stride_batch, stride_slot, num_tokens, eps, num_heads, num_kv, HEAD_DIM: tl.constexpr, HALF_P: tl.constexpr,
    BLOCK_H: tl.constexpr, HAS_NORM: tl.constexpr, HAS_KEEP: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one token: of q in place, of k and v into the cache slot that the row's length gives.

    Heads of q whose group the token skips are neither read nor written.
    """
    wait_and_release(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    batch = row // num_tokens
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    slot = tl.load(length + batch) - num_tokens + (row % num_tokens)
    position = tl.maximum(slot - tl.load(start + batch), 0)
    half: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, HALF_P)
    inside = (d < half)[None, :]
    runs = head < num_heads
    if HAS_KEEP:
        places = keep + row * (num_heads // heads_per_group) + head // heads_per_group
        runs = tl.load(places, mask=runs, other=0) != 0
    is_q = runs[:, None]
    is_k = ((head >= num_heads) & (head < num_heads + num_kv))[:, None]
    is_v = ((head >= num_heads + num_kv) & (head < num_heads + 2 * num_kv))[:, None]
    q_low = q + row * stride_q + head[:, None] * HEAD_DIM + d[None, :]
    kv_low = kv + row * stride_kv + (head[:, None] - num_heads) * HEAD_DIM + d[None, :]
    low = tl.load(q_low, mask=is_q & inside, other=0.0).to(tl.float32)
    high = tl.load(q_low + half, mask=is_q & inside, other=0.0).to(tl.float32)
    low += tl.load(kv_low, mask=(is_k | is_v) & inside, other=0.0).to(tl.float32)
    high += tl.load(kv_low + half, mask=(is_k | is_v) & inside, other=0.0).to(tl.float32)
    v_low, v_high = low, high
    if HAS_NORM:
        low, high = _norm_heads(low, high, is_q, q_weight, k_weight, d, half, eps, HEAD_DIM, q.dtype.element_ty)
    c = tl.load(cos + position * half + d, mask=d < half, other=0.0)[None, :]
    s = tl.load(sin + position * half + d, mask=d < half, other=0.0)[None, :]
    new_low = tl.where(is_v, v_low, low * c - high * s)
    new_high = tl.where(is_v, v_high, high * c + low * s)
    new_low, new_high = narrow(new_low, q.dtype.element_ty), narrow(new_high, q.dtype.element_ty)
    tl.store(q_low, new_low, mask=is_q & inside)
    tl.store(q_low + half, new_high, mask=is_q & inside)
    place = batch * stride_batch + slot.to(tl.int64) * stride_slot
    k_low = keys + place + (head[:, None] - num_heads) * HEAD_DIM + d[None, :]
    v_place = values + place + (head[:, None] - num_heads - num_kv) * HEAD_DIM + d[None, :]
    tl.store(k_low, new_low, mask=is_k & inside)
    tl.store(k_low + half, new_high, mask=is_k & inside)
    tl.store(v_place, new_low, mask=is_v & inside)
    tl.store(v_place + half, new_high, mask=is_v & inside)
