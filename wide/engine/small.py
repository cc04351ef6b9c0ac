"""The small operators between the products, each one launch on a GPU and plain torch elsewhere.

`add_norm` adds a sublayer's output to the residual stream and norms it; `decide` turns the routers' first product
into keep decisions; `route_token` does all of that, compensation included, for a single token and also lists the
active groups, so that one-token decoding needs no separate layout; `rotate_and_store` norms and rotates queries and
keys and writes the cache. The residual stream is in the model's dtype; sums, norms and routing are float32.
Axes: M tokens (B x T), D hidden, G groups, r router rank, H query heads, K kv heads.
"""

import torch
import triton
from torch import Tensor
from wide_kernels._launch import can_chain, chain_option, runs_triton

from wide.engine import small_kernels as kernels
from wide.engine.cache import Cache
from wide.engine.weights import FoldedRouter, Layer, Routed

Owed = tuple[Tensor, Tensor]
"""Of the last sublayer: whose vectors are not added, bool [M, G], and the vectors [G, D]."""


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """residual [M, D] (+ delta) -> the new residual (in place), its RMS norm in the model's dtype, mean square [M]."""
    if runs_triton(residual):
        num_tokens, width = residual.shape
        out, square = torch.empty_like(residual), residual.new_empty(num_tokens, dtype=torch.float32)
        kernels.add_norm_kernel[(num_tokens,)](
            residual, residual if delta is None else delta, weight, out, square, width, eps,
            HAS_DELTA=delta is not None, BLOCK=triton.next_power_of_2(width), num_warps=8 if width > 2048 else 4,
        )  # fmt: skip
        return residual, out, square
    if delta is not None:
        residual = residual + delta
    wide = residual.float()
    square = wide.square().mean(-1)
    return residual, weight * (wide * torch.rsqrt(square + eps)[:, None]).to(residual.dtype), square


def decide(router: FoldedRouter, residual: Tensor, square: Tensor, positions: Tensor | None) -> Tensor:
    """Keep decisions bool [M, G] from the residual stream [M, D] and its mean square [M]; `positions` [M] or None."""
    if router.split is not None:
        reduced = torch.mm(residual, router.split, out_dtype=torch.float32)  # [M, 3r]: three parts of one sum
    else:
        reduced = residual.float() @ router.reduce.T
    num_tokens, (num_groups, rank) = len(residual), router.decide.shape
    if runs_triton(residual):
        keep = torch.empty(num_tokens, num_groups, dtype=torch.bool, device=residual.device)
        kernels.decide_kernel[(triton.cdiv(num_tokens, 32), triton.cdiv(num_groups, 64))](
            reduced, square, router.reduce_bias, router.decide, router.bias, square if positions is None else positions,
            keep.view(torch.uint8), num_tokens, num_groups, len(router.bias), RANK=rank, PARTS=reduced.shape[1] // rank,
            RANK_P=max(16, triton.next_power_of_2(rank)), NORM=router.norm, SILU=router.silu,
            HAS_POSITIONS=positions is not None, BLOCK_M=32, BLOCK_G=64,
        )  # fmt: skip
        return keep
    if router.norm:
        reduced = reduced * torch.rsqrt(square + 1e-6)[:, None]
    reduced = reduced + router.reduce_bias
    if router.silu:
        reduced = torch.nn.functional.silu(reduced)
    bias = router.bias[0] if positions is None else router.bias[positions % len(router.bias)]
    return reduced @ router.decide.T + bias >= 0


class TokenScratch:
    """Working memory of `route_token`: partial sums of the splits, and the counter that finds the last one."""

    def __init__(self, width: int, rank: int, device: torch.device):
        self.block = 128 if width > 1024 else 64
        self.splits = triton.cdiv(width, self.block)
        self.partial = torch.empty(self.splits, triton.next_power_of_2(rank) + 1, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)


def route_token(
    residual: Tensor, delta: Tensor | None, owed: Owed | None, weight: Tensor, eps: float,
    routed: Routed, cache: Cache, always: int, scratch: TokenScratch,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """One token [1, D]: the new residual (in place) and everything the next sublayer reads, in one launch.

    `owed` is the previous sublayer's: its skipped groups' vectors are added. `always`
    more groups behind the G routed ones are listed as active (keys and values beside the routed queries).
    Returns the norm [1, D]; keep bool [1, G + always]; the active groups, routed ones first, int32 [G + always];
    and how many are active, int32 [2]: routed ones, and with `always`.
    """
    router = routed.router
    assert router is not None
    width, groups, rank = residual.shape[1], routed.num_groups, router.reduce.shape[0]
    keep = torch.empty(1, groups + always, dtype=torch.bool, device=residual.device)
    active = torch.empty(groups + always, dtype=torch.int32, device=residual.device)
    counts = torch.empty(2, dtype=torch.int32, device=residual.device)
    out = torch.empty_like(residual)
    previous, vectors = owed if owed is not None else (keep, residual)
    chained = can_chain(residual)
    kernels.route_token_kernel[(scratch.splits,)](
        residual, residual if delta is None else delta, previous.view(torch.uint8), vectors, weight, out,
        router.reduce, router.reduce_bias, router.decide, router.bias, len(router.bias), cache.length, cache.start,
        keep.view(torch.uint8), active, counts, scratch.partial, scratch.counter, width, eps, groups,
        previous.shape[1], always, RANK=rank, RANK_P=triton.next_power_of_2(rank), SPLITS=scratch.splits,
        SPLITS_P=triton.next_power_of_2(scratch.splits), BLOCK_D=scratch.block,
        WIDTH_P=triton.next_power_of_2(width), ALWAYS_P=triton.next_power_of_2(max(always, 1)), NORM=router.norm,
        SILU=router.silu, HAS_DELTA=delta is not None, HAS_VECTORS=owed is not None,
        BLOCK_V=min(128, triton.next_power_of_2(previous.shape[1])),
        BLOCK_G=min(128, max(16, triton.next_power_of_2(groups))), CHAINED=chained, num_warps=8,
        **chain_option(chained),
    )  # fmt: skip
    return out, keep, active, counts


def rotate_and_store(
    q: Tensor, kv: Tensor, layer: Layer, index: int, cache: Cache, eps: float, keep: Tensor | None = None
) -> Tensor:
    """Norm (where the family has it) and rotate q [M, H x d] and the keys of kv [M, 2K x d]; write the cache.

    The tokens are the last M / B slots that the cache counts. Returns q, rotated in place on a GPU, where the heads
    that keep [M, G] skips are left as they are (half of the reads and writes of q at a half mask).
    """
    head_dim, num_kv = cache.keys[index].shape[3], cache.keys[index].shape[2]
    num_heads, num_tokens = q.shape[1] // head_dim, q.shape[0] // cache.batch
    keys, values = cache.keys[index], cache.values[index]
    if runs_triton(q):
        block, chained = 8, can_chain(q)
        keep = None if len(q) == 1 else keep  # one token waits for one load less
        kernels.rotate_kernel[(q.shape[0], triton.cdiv(num_heads + 2 * num_kv, block))](
            q, kv, cache.cos, cache.sin, keys, values, cache.start, cache.length,
            q if layer.q_norm is None else layer.q_norm, q if layer.k_norm is None else layer.k_norm,
            q if keep is None else keep.view(torch.uint8), num_heads if keep is None else num_heads // keep.shape[1],
            q.stride(0), kv.stride(0), keys.stride(0), keys.stride(1), num_tokens, eps, num_heads, num_kv,
            HEAD_DIM=head_dim, HALF_P=triton.next_power_of_2(head_dim // 2), BLOCK_H=block,
            HAS_NORM=layer.q_norm is not None, HAS_KEEP=keep is not None, CHAINED=chained, num_warps=2,
            **chain_option(chained),
        )  # fmt: skip
        return q
    slots = torch.arange(cache.filled - num_tokens, cache.filled, device=q.device)
    positions = (slots - cache.start[:, None]).clamp(min=0)  # [B, T]
    cos, sin = cache.cos[positions][:, :, None], cache.sin[positions][:, :, None]
    q, k, v = (x.unflatten(0, (cache.batch, num_tokens)).unflatten(-1, (-1, head_dim))
               for x in (q, *kv.chunk(2, dim=-1)))  # fmt: skip
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _norm(q, layer.q_norm, eps), _norm(k, layer.k_norm, eps)
    keys[:, slots[0] : cache.filled] = _rotate(k, cos, sin)
    values[:, slots[0] : cache.filled] = v
    return _rotate(q, cos, sin).flatten(2).flatten(0, 1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
