"""Device code of routed decode attention: the work list, the split kernel and the merge kernel.

The work is the key blocks of the active (batch row, group, KV head) items, one after another. Every program derives
that list from the mask and the cache lengths and takes an equal, contiguous share of it (stream-K order), so the
load is even whatever the mask. Launched by `attention_decode`.
"""

import triton
import triton.language as tl

from wide_kernels.gqa import mma, narrow


@triton.jit
def span_of(batch, start_ptr, length_ptr, num_keys, window):
    """First key and end of the keys that a row's token sees; None pointers mean the whole cache."""
    high = num_keys if length_ptr is None else tl.load(length_ptr + batch)
    low = high * 0 if start_ptr is None else tl.load(start_ptr + batch)
    if window is not None:
        low = tl.maximum(low, high - window)
    return low, high


@triton.jit
def work_list(
    keep_ptr,
    start_ptr,
    length_ptr,
    stride_kb,
    stride_kg,
    num_keys,
    window,
    num_items,
    NUM_GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Key blocks of every item and their running total, int32 [ITEMS] each; inactive items have none."""
    item = tl.arange(0, ITEMS)
    valid = item < num_items
    batch = item // (NUM_GROUPS * UNITS)
    group = item // UNITS % NUM_GROUPS
    keep = tl.load(keep_ptr + batch.to(tl.int64) * stride_kb + group * stride_kg, mask=valid, other=0) != 0
    batch = tl.where(valid, batch, 0)
    low, high = span_of(batch, start_ptr, length_ptr, num_keys, window)
    blocks = tl.where(keep, (tl.maximum(high - low, 0) + BLOCK_N - 1) // BLOCK_N, 0)
    return blocks, tl.cumsum(blocks, 0)


@triton.jit
def split_kernel(
    q_ptr,  # [B, 1, H, D]
    k_ptr,  # [B, Tk, K, D]
    v_ptr,
    keep_ptr,  # bool [B, 1, G]
    start_ptr,  # int32 [B] or None
    length_ptr,  # int32 [B] or None
    part_ptr,  # float32 [segments, HEADS, D], unnormalised sums
    stat_ptr,  # float32 [segments, 2, HEADS], running peak and sum
    stride_qb,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_vd,
    stride_mb,
    stride_mg,
    scale,  # softmax scale times log2(e)
    num_keys,
    window,
    num_items,
    NUM_GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    ITEMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One share of the work list; a segment is its part of one item, numbered program + item."""
    blocks, ends = work_list(
        keep_ptr, start_ptr, length_ptr, stride_mb, stride_mg, num_keys, window, num_items,
        NUM_GROUPS, UNITS, BLOCK_N, ITEMS,
    )  # fmt: skip
    total = tl.sum(blocks, 0)
    share = tl.cdiv(total, tl.num_programs(0))
    here = tl.program_id(0) * share
    stop = tl.minimum(here + share, total)
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    in_row, in_head = row < HEADS, d < HEAD_SIZE
    zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    while here < stop:
        item = tl.sum((ends <= here).to(tl.int32), 0)
        end = tl.sum(tl.where(tl.arange(0, ITEMS) == item, ends, 0), 0)
        first = end - tl.sum(tl.where(tl.arange(0, ITEMS) == item, blocks, 0), 0)
        batch = item // (NUM_GROUPS * UNITS)
        head = item % (NUM_GROUPS * UNITS) * HEADS
        kv_head = (head // HEADS_PER_KV).to(tl.int64)
        low, high = span_of(batch, start_ptr, length_ptr, num_keys, window)
        q_rows = q_ptr + batch.to(tl.int64) * stride_qb + (head + row) * stride_qh
        q = tl.load(q_rows[:, None] + d[None] * stride_qd, mask=in_row[:, None] & in_head[None], other=0.0)
        k_base = k_ptr + batch.to(tl.int64) * stride_kb + kv_head * stride_kh
        v_base = v_ptr + batch.to(tl.int64) * stride_vb + kv_head * stride_vh
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for block in tl.range(here - first, tl.minimum(stop, end) - first):
            key = low + block * BLOCK_N + n
            rows = key.to(tl.int64)
            inside = key < high
            k_mask = inside[None] & in_head[:, None]
            k = tl.load(k_base + rows[None] * stride_kt + d[:, None] * stride_kd, mask=k_mask, other=0.0)
            v_mask = inside[:, None] & in_head[None]
            v = tl.load(v_base + rows[:, None] * stride_vt + d[None] * stride_vd, mask=v_mask, other=0.0)
            s = tl.where(inside[None], mma(q, k, zero, PRECISION), -float("inf"))
            peak = tl.maximum(m, tl.max(s, 1) * scale)
            p = tl.exp2(s * scale - peak[:, None])
            decay = tl.exp2(m - peak)
            l = l * decay + tl.sum(p, 1)
            acc = mma(narrow(p, v.dtype), v, acc * decay[:, None], PRECISION)
            m = peak
        segment = (tl.program_id(0) + item).to(tl.int64)
        stat_row = stat_ptr + segment * (2 * HEADS) + row
        tl.store(stat_row, m, mask=in_row)
        tl.store(stat_row + HEADS, l, mask=in_row)
        part_row = part_ptr + (segment * HEADS + row) * HEAD_SIZE
        tl.store(part_row[:, None] + d[None], acc, mask=in_row[:, None] & in_head[None])
        here = tl.minimum(stop, end)


@triton.jit
def merge_kernel(
    keep_ptr,
    start_ptr,
    length_ptr,
    part_ptr,
    stat_ptr,
    out_ptr,  # [B, 1, H, D] contiguous
    stride_mb,
    stride_mg,
    num_keys,
    window,
    num_items,
    num_splitters,
    NUM_GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ITEMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """One head of one item: weigh its segments by their peaks, in program order."""
    item, head = tl.program_id(0), tl.program_id(1)
    blocks, ends = work_list(
        keep_ptr, start_ptr, length_ptr, stride_mb, stride_mg, num_keys, window, num_items,
        NUM_GROUPS, UNITS, BLOCK_N, ITEMS,
    )  # fmt: skip
    share = tl.maximum(tl.cdiv(tl.sum(blocks, 0), num_splitters), 1)
    end = tl.sum(tl.where(tl.arange(0, ITEMS) == item, ends, 0), 0)
    count = tl.sum(tl.where(tl.arange(0, ITEMS) == item, blocks, 0), 0)
    first = (end - count) // share
    last = (end + share - 1) // share if count > 0 else first
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_SIZE
    m = tl.full([1], -float("inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for base in tl.range(first, last, SEGMENTS):
        program = base + tl.arange(0, SEGMENTS)
        valid = program < last
        segment = (program + item).to(tl.int64)
        peaks = tl.load(stat_ptr + segment * (2 * HEADS) + head, mask=valid, other=-float("inf"))
        sums = tl.load(stat_ptr + segment * (2 * HEADS) + HEADS + head, mask=valid, other=0.0)
        part_row = part_ptr + (segment * HEADS + head) * HEAD_SIZE
        parts = tl.load(part_row[:, None] + d[None], mask=valid[:, None] & in_head[None], other=0.0)
        peak = tl.maximum(m, tl.max(peaks, 0))
        weight = tl.exp2(peaks - peak)
        decay = tl.exp2(m - peak)
        l = l * decay + tl.sum(weight * sums, 0)
        acc = acc * decay + tl.sum(weight[:, None] * parts, 0)
        m = peak
    out = narrow(acc / tl.where(l == 0, 1.0, l), out_ptr.dtype.element_ty)
    tl.store(out_ptr + (item.to(tl.int64) * HEADS + head) * HEAD_SIZE + d, out, mask=in_head)
