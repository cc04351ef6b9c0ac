"""The routing layout: one keep mask turned into the lists the skipping operators of a layer read.

Group lists: how many tokens run each group and which, ascending (`gemm_mn` gathers those rows). Set lists: for each
*set* of neighbouring groups the tokens sorted by their on/off pattern in that set, in Gray-code order, so that 128
neighbours share a pattern or differ in one group (`gemm_k` multiplies only the union of a tile's groups). Active
list, for at most eight tokens: the groups that any token runs (the one-token operators read only those weights).
Each kind is one launch (set lists: two), made when the first operator of the layer asks for it and shared by the
others: no sort, no host synchronisation, no atomics, so it is safe under CUDA graphs and the same in every run.
Axes: T tokens, G groups, S sets.
"""

import torch
import triton
import triton.language as tl

from ._launch import can_chain, chain_option, runs_triton
from .gqa import wait_and_release

MAX_UNION_TOKENS = 8
MAX_SET_SIZE = 8
SPAN = 2048  # tokens counted together for the set lists


class RoutingLayout:
    """A keep mask, and the lists made from it: on its device, built at the first use, never looked at by the host.

    keep_mask      bool[T, G]   True = the group runs for the token
    expected_keep  what the caller expects of the share of True, 0..1; only steers the dispatch
    """

    def __init__(self, keep_mask: torch.Tensor, expected_keep: float) -> None:
        self.keep_mask = keep_mask
        self.expected_keep = expected_keep
        self._lists: dict[str, list[torch.Tensor]] = {}

    def lists(self, route: str, set_size: int = 0) -> list[torch.Tensor]:
        """What a route reads.

        "dense": nothing.
        "one_token": active_groups int32[G] (groups that a token runs, ascending, then the others) and how many are
        active, int32[1].
        "skip": counts int32[G] (tokens that run the group), rows int32[G, T] (those tokens, ascending, then the
        others from the back).
        "skip" with a `set_size` in 1..8: set_rows int32[S, T] (tokens by the Gray rank of their pattern in the set,
        then ascending), set_codes int32[S, T] (the pattern of each: bit i = group `s * set_size + i` runs).
        """
        if route == "dense":
            return []
        key = f"{route} {set_size}"
        if key not in self._lists:
            if route == "one_token":
                self._lists[key] = list(_active(self.keep_mask))
            elif set_size:
                self._lists[key] = list(_sets(self.keep_mask, set_size))
            else:
                self._lists[key] = list(_groups(self.keep_mask))
        return self._lists[key]


def routing_layout(keep_mask: torch.Tensor, expected_keep: float = 0.5) -> RoutingLayout:
    """The layout of `keep_mask`, bool[T, G]; its lists are built when the first operator that skips asks for them.

    `expected_keep` is a static hint: an engine that runs with all groups on says 1.0 and gets the dense library
    call, since the host never reads the mask.
    Raises ValueError for a mask that is not a two-dimensional boolean tensor with groups, or a hint outside 0..1.
    Source: the count-and-rank layout of mixture-of-experts kernels; the pattern sets are this project's own.
    """
    if keep_mask.dtype != torch.bool or keep_mask.dim() != 2:
        raise ValueError(f"keep_mask must be bool[tokens, groups], got {keep_mask.dtype} {tuple(keep_mask.shape)}")
    if keep_mask.shape[1] == 0:
        raise ValueError("keep_mask has no groups")
    if not 0 <= expected_keep <= 1:
        raise ValueError(f"expected_keep must be in 0..1, got {expected_keep}")
    return RoutingLayout(keep_mask.contiguous(), float(expected_keep))


def _int32(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


@torch.library.custom_op("wide_kernels::layout_groups", mutates_args=())
def _groups(keep_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not runs_triton(keep_mask):
        return reference_groups(keep_mask)
    num_tokens, num_groups = keep_mask.shape
    counts, rows = _empty_groups(keep_mask)
    band = min(32, triton.next_power_of_2(num_groups))
    chunk = min(128, triton.next_power_of_2(max(num_tokens, 16)))
    _groups_kernel[(triton.cdiv(num_groups, band), max(1, triton.cdiv(num_tokens, chunk)))](
        keep_mask, counts, rows, num_tokens, NUM_GROUPS=num_groups, BAND=band, CHUNK=chunk, COUNTING=8 * chunk,
        CHAINED=can_chain(keep_mask), num_warps=8,
    )  # fmt: skip
    return counts, rows


@_groups.register_fake
def _empty_groups(keep_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_groups = keep_mask.shape
    return _int32(keep_mask, num_groups), _int32(keep_mask, num_groups, num_tokens)


@torch.library.custom_op("wide_kernels::layout_sets", mutates_args=())
def _sets(keep_mask: torch.Tensor, set_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not 1 <= set_size <= MAX_SET_SIZE:
        raise ValueError(f"set_size must be in 1..{MAX_SET_SIZE}, got {set_size}")
    if not runs_triton(keep_mask):
        return reference_sets(keep_mask, set_size)
    num_tokens, num_groups = keep_mask.shape
    set_rows, set_codes = _empty_sets(keep_mask, set_size)
    classes, chained = max(2, 2**set_size), can_chain(keep_mask)
    span = min(SPAN, triton.next_power_of_2(max(num_tokens, 16)))
    num_spans, chunk = max(1, triton.cdiv(num_tokens, span)), min(512, 8192 // classes, span)
    histogram = _int32(keep_mask, set_rows.shape[0], num_spans, classes)
    options = {"NUM_GROUPS": num_groups, "SET": set_size, "CLASSES": classes, "SPAN": span, "CHAINED": chained}
    _histogram_kernel[(set_rows.shape[0], num_spans)](keep_mask, histogram, num_tokens, num_warps=4, **options)
    _sets_kernel[(set_rows.shape[0], max(1, triton.cdiv(num_tokens, chunk)))](
        keep_mask, histogram, set_rows, set_codes, num_tokens, num_spans, CHUNK=chunk, num_warps=4, **options,
        **chain_option(chained),
    )  # fmt: skip
    return set_rows, set_codes


@_sets.register_fake
def _empty_sets(keep_mask: torch.Tensor, set_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_groups = keep_mask.shape
    num_sets = -(-num_groups // set_size)
    return _int32(keep_mask, num_sets, num_tokens), _int32(keep_mask, num_sets, num_tokens)


@torch.library.custom_op("wide_kernels::layout_active", mutates_args=())
def _active(keep_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_groups = keep_mask.shape
    if num_tokens > MAX_UNION_TOKENS:
        raise ValueError(f"the one_token route takes at most {MAX_UNION_TOKENS} tokens, got {num_tokens}")
    if not runs_triton(keep_mask):
        return reference_active(keep_mask)
    active_groups, num_active = _empty_active(keep_mask)
    _active_kernel[(1,)](
        keep_mask, active_groups, num_active, num_tokens, NUM_GROUPS=num_groups,
        PADDED=triton.next_power_of_2(num_groups), UNION_TOKENS=MAX_UNION_TOKENS, num_warps=4,
    )  # fmt: skip
    return active_groups, num_active


@_active.register_fake
def _empty_active(keep_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _int32(keep_mask, keep_mask.shape[1]), _int32(keep_mask, 1)


def gray_rank(code: torch.Tensor) -> torch.Tensor:
    """Position of a pattern (up to 8 bits) in the reflected Gray code, where neighbours differ in one bit."""
    code = code ^ (code >> 1)
    code = code ^ (code >> 2)
    return code ^ (code >> 4)


def reference_groups(keep_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """counts and rows by a sort: active tokens ascending, then the others descending."""
    num_tokens = keep_mask.shape[0]
    token = torch.arange(num_tokens, device=keep_mask.device)[:, None]
    rows = torch.argsort(torch.where(keep_mask, token, 2 * num_tokens - token), dim=0).T
    return keep_mask.sum(0).to(torch.int32), rows.to(torch.int32).contiguous()


def reference_sets(keep_mask: torch.Tensor, set_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """set_rows and set_codes by a stable sort."""
    num_tokens, num_groups = keep_mask.shape
    num_sets = -(-num_groups // set_size)
    padded = torch.zeros(num_tokens, num_sets * set_size, dtype=torch.int64, device=keep_mask.device)
    padded[:, :num_groups] = keep_mask
    bits = torch.arange(set_size, device=keep_mask.device)
    codes = (padded.view(num_tokens, num_sets, set_size) << bits).sum(-1).T  # [S, T]
    set_rows = torch.argsort(gray_rank(codes), dim=1, stable=True)
    return set_rows.to(torch.int32), torch.gather(codes, 1, set_rows).to(torch.int32)


def reference_active(keep_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """active_groups and their number by a stable sort."""
    used = keep_mask.any(0)
    return torch.argsort(~used, stable=True).to(torch.int32), used.sum().reshape(1).to(torch.int32)


@triton.jit(do_not_specialize=["num_tokens"])
def _groups_kernel(
    keep, counts, rows, num_tokens, NUM_GROUPS: tl.constexpr, BAND: tl.constexpr, CHUNK: tl.constexpr,
    COUNTING: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Rank CHUNK tokens in each of BAND groups; a program counts the tokens before its own itself."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.program_id(0) * BAND + tl.arange(0, BAND)
    first = tl.program_id(1) * CHUNK
    listed = group < NUM_GROUPS
    before = tl.zeros((BAND,), tl.int32)
    for start in range(0, first, COUNTING):
        token = start + tl.arange(0, COUNTING)
        flags = keep + token.to(tl.int64)[:, None] * NUM_GROUPS + group[None, :]
        on = tl.load(flags, mask=(token < first)[:, None] & listed[None, :], other=0).to(tl.int32)
        before += tl.sum(on, 0)
    token = first + tl.arange(0, CHUNK)
    inside = (token < num_tokens)[:, None] & listed[None, :]
    on = tl.load(keep + token.to(tl.int64)[:, None] * NUM_GROUPS + group[None, :], mask=inside, other=0).to(tl.int32)
    rank = before[None, :] + tl.cumsum(on, 0) - on
    place = tl.where(on != 0, rank, num_tokens - 1 - (token[:, None] - rank))
    value = tl.broadcast_to(token[:, None], (CHUNK, BAND))
    tl.store(rows + group.to(tl.int64)[None, :] * num_tokens + place, value, mask=inside)
    if first + CHUNK >= num_tokens:
        tl.store(counts + group, before + tl.sum(on, 0), mask=listed)


@triton.jit
def _codes(keep, tokens, inside, first_group, NUM_GROUPS: tl.constexpr, SET: tl.constexpr):
    code = tl.zeros_like(tokens)
    for i in tl.static_range(SET):
        ok = inside & (first_group + i < NUM_GROUPS)
        on = tl.load(keep + tokens.to(tl.int64) * NUM_GROUPS + first_group + i, mask=ok, other=0).to(tl.int32)
        code |= (on != 0).to(tl.int32) << i
    rank = code ^ (code >> 1)
    rank ^= rank >> 2
    rank ^= rank >> 4
    return code, rank


@triton.jit(do_not_specialize=["num_tokens"])
def _histogram_kernel(
    keep, histogram, num_tokens, NUM_GROUPS: tl.constexpr, SET: tl.constexpr, CLASSES: tl.constexpr,
    SPAN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """How many of SPAN tokens have each pattern of one set, in the order of the Gray code."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    index, span = tl.program_id(0), tl.program_id(1)
    tokens = span * SPAN + tl.arange(0, SPAN)
    inside = tokens < num_tokens
    _, rank = _codes(keep, tokens, inside, index * SET, NUM_GROUPS, SET)
    place = histogram + (index * tl.num_programs(1) + span) * CLASSES + tl.arange(0, CLASSES)
    tl.store(place, tl.histogram(rank, CLASSES, mask=inside))


@triton.jit(do_not_specialize=["num_tokens"])
def _sets_kernel(
    keep, histogram, set_rows, set_codes, num_tokens, num_spans, NUM_GROUPS: tl.constexpr, SET: tl.constexpr,
    CLASSES: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Place CHUNK tokens in one set's order: a counting sort; the tokens before them in their span are counted here."""
    index = tl.program_id(0)
    first = tl.program_id(1) * CHUNK
    span = first // SPAN
    tokens = span * SPAN + tl.arange(0, SPAN)
    earlier = tokens < tl.minimum(first, num_tokens)
    _, rank = _codes(keep, tokens, earlier, index * SET, NUM_GROUPS, SET)
    before = tl.histogram(rank, CLASSES, mask=earlier)
    total = tl.zeros((CLASSES,), tl.int32)
    wait_and_release(CHAINED)
    for other in range(0, num_spans):
        counted = tl.load(histogram + (index * num_spans + other) * CLASSES + tl.arange(0, CLASSES))
        total += counted
        before += tl.where(other < span, counted, 0)
    base = tl.cumsum(total) - total + before  # [CLASSES]
    tokens = first + tl.arange(0, CHUNK)
    inside = tokens < num_tokens
    code, rank = _codes(keep, tokens, inside, index * SET, NUM_GROUPS, SET)
    own = ((rank[:, None] == tl.arange(0, CLASSES)[None, :]) & inside[:, None]).to(tl.int32)
    place = tl.sum(own * (tl.cumsum(own, 0) - 1 + base[None, :]), 1)
    offset = tl.cast(index, tl.int64) * num_tokens
    tl.store(set_rows + offset + place, tokens, mask=inside)
    tl.store(set_codes + offset + place, code, mask=inside)


@triton.jit
def _active_kernel(
    keep, active_groups, num_active, num_tokens, NUM_GROUPS: tl.constexpr, PADDED: tl.constexpr,
    UNION_TOKENS: tl.constexpr,
):  # fmt: skip
    groups = tl.arange(0, PADDED)
    inside = groups < NUM_GROUPS
    on = tl.zeros((PADDED,), tl.int32)
    for token in tl.static_range(UNION_TOKENS):
        ok = inside & (token < num_tokens)
        on |= (tl.load(keep + token * NUM_GROUPS + groups, mask=ok, other=0) != 0).to(tl.int32)
    total = tl.sum(on)
    rank = tl.cumsum(on) - on
    place = tl.where(on != 0, rank, total + groups - rank)
    tl.store(active_groups + place, groups, mask=inside)
    tl.store(num_active, total)
