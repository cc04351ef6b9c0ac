"""Device code of routed decode attention: the work list, the split kernel and the merge kernel.

The work is the key blocks of the active (batch row, group, KV head) items. Every program derives
that list from the mask and the cache lengths and takes one split of one item; items get splits in proportion to
their keys, so the load is even whatever the mask. Launched by `attention_decode`.
"""

import triton
import triton.language as tl

from .gqa import mma, narrow, wait_and_release


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
    num_programs,
    NUM_GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Key blocks of every item and the running total of its splits, int32 [ITEMS] each; inactive items have none.

    Every active item gets one program and its part of the spare ones, so all splits fit in `num_programs`.
    """
    item = tl.arange(0, ITEMS)
    valid = item < num_items
    batch = tl.where(valid, item // (NUM_GROUPS * UNITS), 0)
    group = item // UNITS % NUM_GROUPS
    keep = tl.load(keep_ptr + batch.to(tl.int64) * stride_kb + group * stride_kg, mask=valid, other=0) != 0
    low, high = span_of(batch, start_ptr, length_ptr, num_keys, window)
    blocks = tl.where(keep, (tl.maximum(high - low, 0) + BLOCK_N - 1) // BLOCK_N, 0)
    total = tl.maximum(tl.sum(blocks, 0), 1)
    spare = tl.maximum(num_programs - tl.sum((blocks > 0).to(tl.int32), 0), 0)
    share = (blocks.to(tl.int64) * spare // total).to(tl.int32)
    return blocks, tl.cumsum(tl.minimum(share + 1, blocks), 0)


@triton.jit
def at(values, index, SIZE: tl.constexpr):
    """values[index] of a register vector."""
    return tl.sum(tl.where(tl.arange(0, SIZE) == index, values, 0), 0)


@triton.jit
def split_kernel(
    q_ptr,  # [B, 1, H, D]
    k_ptr,  # [B, Tk, K, D]
    v_ptr,
    keep_ptr,  # bool [B, 1, G]
    start_ptr,  # int32 [B] or None
    length_ptr,  # int32 [B] or None
    part_ptr,  # float32 [programs, HEADS, D], unnormalised sums
    stat_ptr,  # float32 [programs, 2, HEADS], running peak and sum
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
    num_programs,
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
    CHAINED: tl.constexpr,
):
    """One split of one item; its partial result lands in the slot of its program number."""
    wait_and_release(CHAINED)
    blocks, ends = work_list(
        keep_ptr, start_ptr, length_ptr, stride_mb, stride_mg, num_keys, window, num_items, num_programs,
        NUM_GROUPS, UNITS, BLOCK_N, ITEMS,
    )  # fmt: skip
    program = tl.program_id(0)
    item = tl.sum((ends <= program).to(tl.int32), 0)
    if item >= num_items:
        return
    count = at(blocks, item, ITEMS)
    first = at(ends, item - 1, ITEMS)
    splits = at(ends, item, ITEMS) - first
    from_block = ((program - first).to(tl.int64) * count // splits).to(tl.int32)
    to_block = ((program - first + 1).to(tl.int64) * count // splits).to(tl.int32)
    batch = item // (NUM_GROUPS * UNITS)
    head = item % (NUM_GROUPS * UNITS) * HEADS
    kv_head = (head // HEADS_PER_KV).to(tl.int64)
    low, high = span_of(batch, start_ptr, length_ptr, num_keys, window)
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    in_row, in_head = row < HEADS, d < HEAD_SIZE
    q_rows = q_ptr + batch.to(tl.int64) * stride_qb + (head + row) * stride_qh
    q = tl.load(q_rows[:, None] + d[None] * stride_qd, mask=in_row[:, None] & in_head[None], other=0.0)
    k_ptr += batch.to(tl.int64) * stride_kb + kv_head * stride_kh
    v_ptr += batch.to(tl.int64) * stride_vb + kv_head * stride_vh
    zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in tl.range(from_block, to_block):
        key = low + block * BLOCK_N + n
        rows = key.to(tl.int64)
        inside = key < high
        k_mask = inside[None] & in_head[:, None]
        k = tl.load(k_ptr + rows[None] * stride_kt + d[:, None] * stride_kd, mask=k_mask, other=0.0)
        v_mask = inside[:, None] & in_head[None]
        v = tl.load(v_ptr + rows[:, None] * stride_vt + d[None] * stride_vd, mask=v_mask, other=0.0)
        s = tl.where(inside[None], mma(q, k, zero, PRECISION), -float("inf"))
        peak = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2((s - peak[:, None]) * scale)  # the difference first: the weights that count lose nothing
        decay = tl.exp2((m - peak) * scale)
        den = den * decay + tl.sum(p, 1)
        acc = mma(narrow(p, v.dtype), v, acc * decay[:, None], PRECISION)
        m = peak
    stat_row = stat_ptr + program.to(tl.int64) * (2 * HEADS) + row
    tl.store(stat_row, m, mask=in_row)
    tl.store(stat_row + HEADS, den, mask=in_row)
    part_row = part_ptr + (program.to(tl.int64) * HEADS + row) * HEAD_SIZE
    tl.store(part_row[:, None] + d[None], acc, mask=in_row[:, None] & in_head[None])


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
    scale,
    num_keys,
    window,
    num_items,
    num_programs,
    NUM_GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ITEMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """BLOCK_D columns of one head of one item: weigh its splits by their peaks, in program order."""
    item, head = tl.program_id(0), tl.program_id(1)
    _, ends = work_list(
        keep_ptr, start_ptr, length_ptr, stride_mb, stride_mg, num_keys, window, num_items, num_programs,
        NUM_GROUPS, UNITS, BLOCK_N, ITEMS,
    )  # fmt: skip
    first = at(ends, item - 1, ITEMS)
    last = at(ends, item, ITEMS)
    wait_and_release(CHAINED)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_head = d < HEAD_SIZE
    m = tl.full([1], -float("inf"), tl.float32)
    den = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for base in tl.range(first, last, SPLITS):
        program = (base + tl.arange(0, SPLITS)).to(tl.int64)
        valid = program < last
        peaks = tl.load(stat_ptr + program * (2 * HEADS) + head, mask=valid, other=-float("inf"))
        sums = tl.load(stat_ptr + program * (2 * HEADS) + HEADS + head, mask=valid, other=0.0)
        part_row = part_ptr + (program * HEADS + head) * HEAD_SIZE
        parts = tl.load(part_row[:, None] + d[None], mask=valid[:, None] & in_head[None], other=0.0)
        peak = tl.maximum(m, tl.max(peaks, 0))
        weight = tl.exp2((peaks - peak) * scale)
        decay = tl.exp2((m - peak) * scale)
        den = den * decay + tl.sum(weight * sums, 0)
        acc = acc * decay + tl.sum(weight[:, None] * parts, 0)
        m = peak
    out = narrow(acc / tl.where(den == 0, 1.0, den), out_ptr.dtype.element_ty)
    tl.store(out_ptr + (item.to(tl.int64) * HEADS + head) * HEAD_SIZE + d, out, mask=in_head)
