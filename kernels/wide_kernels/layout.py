"""The routing layout: one keep mask turned into the lists every skipping operator of a layer reads.

For each group: how many tokens run it and which, ascending (`gemm_mn` gathers those rows). For each *set* of
`set_size` neighbouring groups: the tokens sorted by their on/off pattern in that set, in Gray-code order, so that
128 neighbours share a pattern or differ in one group (`gemm_k` multiplies only the union of a tile's groups).
For at most eight tokens: the groups that any token runs (the one-token operators read only those weights).
One launch, no sort, no host synchronisation, no atomics: safe under CUDA graphs, and the same in every run.
Axes: T tokens, G groups, S sets.
"""

import torch
import triton
import triton.language as tl

from ._launch import runs_triton

MAX_UNION_TOKENS = 8
MAX_SET_SIZE = 5


class RoutingLayout:
    """A keep mask, and the lists made from it: on its device, built at the first use, never looked at by the host.

    keep_mask      bool[T, G]   True = the group runs for the token
    set_size       groups in a set
    expected_keep  what the caller expects of the share of True, 0..1; only steers the dispatch

    `lists()` gives, in this order:
    counts         int32[G]     tokens that run the group
    rows           int32[G, T]  the tokens that run the group, ascending, then those that do not, ascending
    set_rows       int32[S, T]  tokens ordered by the Gray rank of their pattern in the set, then ascending
    set_codes      int32[S, T]  the pattern of each of those tokens: bit i = group `s * set_size + i` runs
    active_groups  int32[G]     groups that at least one token runs, ascending, then the others (empty above 8 tokens)
    num_active     int32[1]     how many of `active_groups` are active
    """

    def __init__(self, keep_mask: torch.Tensor, set_size: int, expected_keep: float) -> None:
        self.keep_mask = keep_mask
        self.set_size = set_size
        self.expected_keep = expected_keep
        self._lists: tuple[torch.Tensor, ...] | None = None

    def lists(self, route: str = "skip") -> list[torch.Tensor]:
        """counts, rows, set_rows, set_codes, active_groups, num_active: one launch; the route "dense" needs none."""
        if route == "dense":
            return []
        if self._lists is None:
            self._lists = _build(self.keep_mask, self.set_size)
        return list(self._lists)


def routing_layout(keep_mask: torch.Tensor, set_size: int = 4, expected_keep: float = 0.5) -> RoutingLayout:
    """The layout of `keep_mask`, bool[T, G]: one launch when the first operator that skips asks for it.

    `set_size` is the number of neighbouring groups whose pattern is bucketed together (1..5; more makes fewer
    passes over the output of `gemm_k` and more boundary tiles). `expected_keep` is a static hint: an engine that
    runs with all groups on says 1.0 and gets the dense library call, since the host never reads the mask.
    Raises ValueError for a mask that is not a two-dimensional boolean tensor or a set size out of range.
    Source: the count-and-rank layout of mixture-of-experts kernels; the pattern sets are this project's own.
    """
    if keep_mask.dtype != torch.bool or keep_mask.dim() != 2:
        raise ValueError(f"keep_mask must be bool[tokens, groups], got {keep_mask.dtype} {tuple(keep_mask.shape)}")
    if not 1 <= set_size <= MAX_SET_SIZE:
        raise ValueError(f"set_size must be in 1..{MAX_SET_SIZE}, got {set_size}")
    if keep_mask.shape[1] == 0:
        raise ValueError("keep_mask has no groups")
    return RoutingLayout(keep_mask.contiguous(), set_size, float(expected_keep))


@torch.library.custom_op("wide_kernels::routing_layout", mutates_args=())
def _build(
    keep_mask: torch.Tensor, set_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if not runs_triton(keep_mask):
        return reference(keep_mask, set_size)
    num_tokens, num_groups = keep_mask.shape
    num_sets = triton.cdiv(num_groups, set_size)
    outputs = _empty_outputs(keep_mask, set_size)
    counts, rows, set_rows, set_codes, active_groups, num_active = outputs
    chunk = min(512, triton.next_power_of_2(max(num_tokens, 16)))
    counting = min(4096, triton.next_power_of_2(max(num_tokens, 16)))
    grid = (num_groups + num_sets + 1, max(1, triton.cdiv(num_tokens, chunk)))
    _layout_kernel[grid](
        keep_mask, counts, rows, set_rows, set_codes, active_groups, num_active, num_tokens, num_groups, num_sets,
        SET=set_size, CLASSES=max(2, 2**set_size), CHUNK=chunk, COUNTING=counting,
        GROUPS_PADDED=triton.next_power_of_2(num_groups), UNION=num_tokens <= MAX_UNION_TOKENS,
        UNION_TOKENS=MAX_UNION_TOKENS, num_warps=4,
    )  # fmt: skip
    return outputs


def _empty_outputs(keep_mask: torch.Tensor, set_size: int) -> tuple[torch.Tensor, ...]:
    num_tokens, num_groups = keep_mask.shape
    num_sets = -(-num_groups // set_size)
    num_listed = num_groups if num_tokens <= MAX_UNION_TOKENS else 0
    shapes = (
        (num_groups,), (num_groups, num_tokens), (num_sets, num_tokens), (num_sets, num_tokens), (num_listed,), (1,)
    )  # fmt: skip
    return tuple(torch.empty(shape, dtype=torch.int32, device=keep_mask.device) for shape in shapes)


@_build.register_fake
def _(keep_mask: torch.Tensor, set_size: int) -> tuple[torch.Tensor, ...]:
    return _empty_outputs(keep_mask, set_size)


def gray_rank(code: torch.Tensor) -> torch.Tensor:
    """Position of a pattern (up to 8 bits) in the reflected Gray code, where neighbours differ in one bit."""
    code = code ^ (code >> 1)
    code = code ^ (code >> 2)
    return code ^ (code >> 4)


def reference(keep_mask: torch.Tensor, set_size: int) -> tuple[torch.Tensor, ...]:
    """What `RoutingLayout.lists` gives, by stable sorts."""
    num_tokens, num_groups = keep_mask.shape
    num_sets = -(-num_groups // set_size)
    counts = keep_mask.sum(0)
    rows = torch.argsort(~keep_mask.T, dim=1, stable=True)
    padded = torch.zeros(num_tokens, num_sets * set_size, dtype=torch.int64, device=keep_mask.device)
    padded[:, :num_groups] = keep_mask
    bits = torch.arange(set_size, device=keep_mask.device)
    codes = (padded.view(num_tokens, num_sets, set_size) << bits).sum(-1).T  # [S, T]
    set_rows = torch.argsort(gray_rank(codes), dim=1, stable=True)
    set_codes = torch.gather(codes, 1, set_rows)
    used = keep_mask.any(0)
    active_groups = torch.argsort(~used, stable=True)[: num_groups if num_tokens <= MAX_UNION_TOKENS else 0]
    num_active = used.sum().reshape(1)
    return tuple(part.to(torch.int32) for part in (counts, rows, set_rows, set_codes, active_groups, num_active))


@triton.jit
def _list_group(keep, counts, rows, group, first, num_tokens, num_groups, CHUNK: tl.constexpr, COUNTING: tl.constexpr):
    total = 0
    before = 0
    for start in range(0, num_tokens, COUNTING):
        tokens = start + tl.arange(0, COUNTING)
        on = tl.load(keep + tokens.to(tl.int64) * num_groups + group, mask=tokens < num_tokens, other=0).to(tl.int32)
        total += tl.sum(on)
        before += tl.sum(tl.where(tokens < first, on, 0))
    tokens = first + tl.arange(0, CHUNK)
    inside = tokens < num_tokens
    on = tl.load(keep + tokens.to(tl.int64) * num_groups + group, mask=inside, other=0).to(tl.int32)
    rank = before + tl.cumsum(on) - on
    place = tl.where(on != 0, rank, total + tokens - rank)
    tl.store(rows + tl.cast(group, tl.int64) * num_tokens + place, tokens, mask=inside)
    if first == 0:
        tl.store(counts + group, total)


@triton.jit
def _codes(keep, tokens, inside, first_group, num_groups, SET: tl.constexpr):
    code = tl.zeros_like(tokens)
    for i in tl.static_range(SET):
        ok = inside & (first_group + i < num_groups)
        on = tl.load(keep + tokens.to(tl.int64) * num_groups + first_group + i, mask=ok, other=0).to(tl.int32)
        code |= (on != 0).to(tl.int32) << i
    rank = code ^ (code >> 1)
    rank ^= rank >> 2
    rank ^= rank >> 4
    return code, rank


@triton.jit
def _sort_set(
    keep, set_rows, set_codes, index, first, num_tokens, num_groups,
    SET: tl.constexpr, CLASSES: tl.constexpr, CHUNK: tl.constexpr, COUNTING: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((CLASSES,), tl.int32)
    before = tl.zeros((CLASSES,), tl.int32)
    for start in range(0, num_tokens, COUNTING):
        tokens = start + tl.arange(0, COUNTING)
        inside = tokens < num_tokens
        code, rank = _codes(keep, tokens, inside, index * SET, num_groups, SET)
        total += tl.histogram(rank, CLASSES, mask=inside)
        before += tl.histogram(rank, CLASSES, mask=inside & (tokens < first))
    base = tl.cumsum(total) - total + before  # [CLASSES]
    tokens = first + tl.arange(0, CHUNK)
    inside = tokens < num_tokens
    code, rank = _codes(keep, tokens, inside, index * SET, num_groups, SET)
    own = ((rank[:, None] == tl.arange(0, CLASSES)[None, :]) & inside[:, None]).to(tl.int32)
    place = tl.sum(own * (tl.cumsum(own, 0) - 1 + base[None, :]), 1)
    offset = tl.cast(index, tl.int64) * num_tokens
    tl.store(set_rows + offset + place, tokens, mask=inside)
    tl.store(set_codes + offset + place, code, mask=inside)


@triton.jit
def _list_active(
    keep, active_groups, num_active, num_tokens, num_groups, PADDED: tl.constexpr, UNION_TOKENS: tl.constexpr
):
    groups = tl.arange(0, PADDED)
    inside = groups < num_groups
    on = tl.zeros((PADDED,), tl.int32)
    for token in tl.static_range(UNION_TOKENS):
        ok = inside & (token < num_tokens)
        on |= (tl.load(keep + token * num_groups + groups, mask=ok, other=0) != 0).to(tl.int32)
    total = tl.sum(on)
    rank = tl.cumsum(on) - on
    place = tl.where(on != 0, rank, total + groups - rank)
    tl.store(active_groups + place, groups, mask=inside)
    tl.store(num_active, total)


@triton.jit(do_not_specialize=["num_tokens"])
def _layout_kernel(
    keep, counts, rows, set_rows, set_codes, active_groups, num_active, num_tokens, num_groups, num_sets,
    SET: tl.constexpr, CLASSES: tl.constexpr, CHUNK: tl.constexpr, COUNTING: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, UNION: tl.constexpr, UNION_TOKENS: tl.constexpr,
):  # fmt: skip
    role = tl.program_id(0)
    first = tl.program_id(1) * CHUNK
    if role < num_groups:
        _list_group(keep, counts, rows, role, first, num_tokens, num_groups, CHUNK, COUNTING)
    elif role < num_groups + num_sets:
        index = role - num_groups
        _sort_set(keep, set_rows, set_codes, index, first, num_tokens, num_groups, SET, CLASSES, CHUNK, COUNTING)
    elif UNION:
        _list_active(keep, active_groups, num_active, num_tokens, num_groups, GROUPS_PADDED, UNION_TOKENS)
