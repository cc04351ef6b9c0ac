"""Device code of routed prefill attention: the token partition and the tiled causal kernel.

The attention kernel packs the active tokens of a group with its query heads into tiles of BLOCK_M rows, in ascending
position, so a tile runs unmasked key blocks up to its first position and masked ones up to its last. Online softmax
after FlashAttention (arXiv 2205.14135), base 2, float32. Launched by `attention_prefill`.
"""

import triton
import triton.language as tl

from .gqa import mma, narrow, wait_and_release


@triton.jit
def partition_kernel(
    keep_ptr,  # bool [B, Tq, G]
    start_ptr,  # int32 [B] or unused
    length_ptr,  # int32 [B] or unused
    token_ptr,  # int32 [B, G, Tq]: active tokens ascending from the front, inactive ones from the back
    count_ptr,  # int32 [B, G]: active tokens
    stride_kb,
    stride_kt,
    stride_kg,
    num_tokens,
    num_keys,
    NUM_GROUPS: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTING: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """CHUNK tokens of one (batch row, group); a padded query, one before the row's first key, counts as inactive.

    Each program counts the active tokens before its chunk itself, so one launch is enough.
    """
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    item = tl.program_id(0)
    batch, group = item // NUM_GROUPS, item % NUM_GROUPS
    begin = tl.program_id(1) * CHUNK
    start = tl.load(start_ptr + batch) if HAS_START else 0
    length = tl.load(length_ptr + batch) if HAS_LENGTH else num_keys
    first = tl.maximum(start - length + num_tokens, 0)  # token at the row's first key
    keep_ptr += batch.to(tl.int64) * stride_kb + group * stride_kg
    token_ptr += item.to(tl.int64) * num_tokens
    before = tl.zeros([COUNTING], tl.int32)
    for base in tl.range(0, begin, COUNTING):
        token = base + tl.arange(0, COUNTING)
        counted = (token >= first) & (token < begin)
        before += tl.load(keep_ptr + token.to(tl.int64) * stride_kt, mask=counted, other=0).to(tl.int32)
    num_before = tl.sum(before, 0)
    token = begin + tl.arange(0, CHUNK)
    valid = token < num_tokens
    keep = tl.load(keep_ptr + token.to(tl.int64) * stride_kt, mask=valid & (token >= first), other=0).to(tl.int32)
    rank = num_before + tl.cumsum(keep, 0) - keep  # active tokens before this one
    slot = tl.where(keep != 0, rank, num_tokens - 1 - (token - rank))
    tl.store(token_ptr + slot, token, mask=valid)
    if begin + CHUNK >= num_tokens:
        tl.store(count_ptr + item, num_before + tl.sum(keep, 0))


@triton.jit
def online_softmax(s, m, den, acc, v, scale, PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """One key block: raw scores `s` [M, N] (-inf where hidden), running peak `m`, sum `den`, accumulator `acc`."""
    peak = tl.maximum(m, tl.max(s, 1) * scale)
    shift = tl.where(peak == -float("inf"), 0.0, peak) if MASKED else peak
    p = tl.exp2(s * scale - shift[:, None])
    decay = tl.exp2(m - shift)
    den = den * decay + tl.sum(p, 1)
    acc = mma(narrow(p, v.dtype), v, acc * decay[:, None], PRECISION)
    return peak, den, acc


@triton.jit
def prefill_kernel(
    q_ptr,  # [B, Tq, H, D]
    k_ptr,  # [B, Tk, K, D]
    v_ptr,
    k_desc,  # the same as [B, K, Tk, D] descriptors, blocks [1, 1, BLOCK_N, BLOCK_D]; unused without USE_TMA
    v_desc,
    out_ptr,  # [B, Tq, H, D], a token's heads contiguous
    token_ptr,
    count_ptr,
    start_ptr,
    length_ptr,
    stride_qb,
    stride_qt,
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
    stride_ob,
    stride_ot,
    scale,  # softmax scale times log2(e)
    num_tokens,
    num_keys,
    window,
    num_items,
    NUM_GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ZEROS: tl.constexpr,
    USE_TMA: tl.constexpr,
    CHAINED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of one item; program order is tile-major from the last (longest) tile, then the zero tiles."""
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    item = tl.program_id(0) % num_items
    rank = tl.program_id(0) // num_items
    batch = item // (NUM_GROUPS * UNITS)
    unit = item % (NUM_GROUPS * UNITS)
    row_item = batch * NUM_GROUPS + unit // UNITS
    first_head = unit * HEADS
    kv_head = first_head // HEADS_PER_KV
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    count = tl.load(count_ptr + row_item)
    num_tiles = tl.cdiv(count, TOKENS)
    row = tl.arange(0, BLOCK_M)
    slot = row // HEADS
    token_ptr += row_item.to(tl.int64) * num_tokens
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_SIZE
    out_ptr += batch.to(tl.int64) * stride_ob
    head_offset = (first_head + row % HEADS) * HEAD_SIZE

    active = rank < num_tiles
    if rank >= num_tiles and not ZEROS:
        return
    first = (num_tiles - 1 - rank) * TOKENS
    entry = tl.where(active, first + slot, num_tokens - 1 - (rank - num_tiles) * TOKENS - slot)
    stored = (slot < TOKENS) & tl.where(active, entry < count, entry >= count)
    token = tl.load(token_ptr + entry, mask=stored, other=0)
    start = tl.load(start_ptr + batch) if HAS_START else 0
    length = tl.load(length_ptr + batch) if HAS_LENGTH else num_keys
    offset = length - num_tokens
    first_pos = offset + tl.load(token_ptr + first, mask=active, other=0)
    last_pos = offset + tl.load(token_ptr + tl.minimum(first + TOKENS, count) - 1, mask=active, other=0)
    pos = offset + token

    q_ptr += batch.to(tl.int64) * stride_qb + first_head * stride_qh
    q_rows = q_ptr + token.to(tl.int64) * stride_qt + (row % HEADS) * stride_qh
    q = tl.load(q_rows[:, None] + d[None] * stride_qd, mask=active & stored[:, None] & in_head[None], other=0.0)
    k_ptr += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_ptr += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh

    low = tl.maximum(start, first_pos - window + 1) if HAS_WINDOW else start
    num_blocks = tl.where(active, tl.cdiv(last_pos + 1 - low, BLOCK_N), 0)
    full_low = tl.cdiv(tl.maximum(last_pos - window + 1 - low, 0), BLOCK_N) if HAS_WINDOW else 0
    full_low = tl.minimum(full_low, num_blocks)
    full_high = tl.minimum(tl.maximum((first_pos + 1 - low) // BLOCK_N, full_low), num_blocks)

    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    n = tl.arange(0, BLOCK_N)
    for block in tl.range(full_low, full_high):
        key = low + block * BLOCK_N
        if USE_TMA:
            k = k_desc.load([batch, kv_head, key, 0]).reshape(BLOCK_N, BLOCK_D)
            s = mma(q, k.T, zero, PRECISION)
            v = v_desc.load([batch, kv_head, key, 0]).reshape(BLOCK_N, BLOCK_D)
        else:
            rows = (key + n).to(tl.int64)
            k = tl.load(k_ptr + rows[None] * stride_kt + d[:, None] * stride_kd, mask=in_head[:, None], other=0.0)
            s = mma(q, k, zero, PRECISION)
            v = tl.load(v_ptr + rows[:, None] * stride_vt + d[None] * stride_vd, mask=in_head[None], other=0.0)
        m, den, acc = online_softmax(s, m, den, acc, v, scale, PRECISION, False)

    for step in tl.range(0, full_low + num_blocks - full_high):
        block = tl.where(step < full_low, step, step - full_low + full_high)
        key = low + block * BLOCK_N + n
        if USE_TMA and not HAS_LENGTH:  # beyond the cache a tensor map reads zeros; beyond key_length it might not
            k = k_desc.load([batch, kv_head, low + block * BLOCK_N, 0]).reshape(BLOCK_N, BLOCK_D)
            s = mma(q, k.T, zero, PRECISION)
            v = v_desc.load([batch, kv_head, low + block * BLOCK_N, 0]).reshape(BLOCK_N, BLOCK_D)
        else:
            rows = key.to(tl.int64)
            inside = key <= last_pos
            k_mask = inside[None] & in_head[:, None]
            k = tl.load(k_ptr + rows[None] * stride_kt + d[:, None] * stride_kd, mask=k_mask, other=0.0)
            s = mma(q, k, zero, PRECISION)
            v_mask = inside[:, None] & in_head[None]
            v = tl.load(v_ptr + rows[:, None] * stride_vt + d[None] * stride_vd, mask=v_mask, other=0.0)
        seen = key[None] <= pos[:, None]
        if HAS_WINDOW:
            seen &= key[None] > pos[:, None] - window
        s = tl.where(seen, s, -float("inf"))
        m, den, acc = online_softmax(s, m, den, acc, v, scale, PRECISION, True)

    place = token.to(tl.int64) * stride_ot + head_offset
    out = narrow(acc / tl.where(den == 0, 1.0, den)[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + place[:, None] + d[None], out, mask=stored[:, None] & in_head[None])


@triton.jit
def zero_kernel(
    out_ptr,  # [B, Tq, H, D] contiguous
    keep_ptr,  # bool [B * Tq, G] contiguous
    num_tokens,  # B * Tq
    NUM_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of a group, its heads times D
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Zero the inactive rows of one group in a dense result; nothing is written where all are active."""
    wait_and_release(CHAINED)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    group = tl.program_id(1)
    offset = token.to(tl.int64) * NUM_GROUPS + group
    keep = tl.load(keep_ptr + offset, mask=token < num_tokens, other=1)
    if tl.min(keep.to(tl.int32), 0) == 1:
        return
    zeros = tl.zeros([BLOCK_T, BLOCK_W], out_ptr.dtype.element_ty)
    for base in range(0, WIDTH, BLOCK_W):
        column = base + tl.arange(0, BLOCK_W)
        idle = (keep == 0)[:, None] & (column < WIDTH)[None]
        tl.store(out_ptr + (offset * WIDTH)[:, None] + column[None], zeros, mask=idle)
