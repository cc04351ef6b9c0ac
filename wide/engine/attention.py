"""Attention over the static cache: the routed operators on a GPU, the library's kernels where nothing is skipped.

Queries are the last T slots that the cache counts. A single token uses the whole cache and the length on the device,
so that one CUDA graph serves every length; more tokens use the filled part.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from wide_kernels import attention_decode, attention_prefill
from wide_kernels._launch import runs_triton
from wide_kernels.attention_dense import DENSE_BACKENDS, library_attention

from wide.engine.cache import Cache


def attend(
    q: Tensor, keep: Tensor | None, cache: Cache, index: int, window: int | None, expected_keep: float,
    skipped: str = "zeros", spare: int = 0,
) -> Tensor:  # fmt: skip
    """q [B, T, H, d], keep bool [B, T, G] or None for all -> [B, T, H, d]. The keys of these tokens are stored.

    `expected_keep` is the hint of the share of True in `keep`. Skipped (token, group) rows are zeros, or anything where
    the caller says "undefined"; `spare` elements are allocated behind the heads of every token.
    """
    num_tokens, filled = q.shape[1], cache.filled
    keys, values = cache.keys[index], cache.values[index]
    sees_all = window is None or (num_tokens > 1 and filled <= window)
    if not runs_triton(q):
        out = _masked(_plain(q, keys[:, :filled], values[:, :filled], cache, None if sees_all else window), keep)
        return _with_spare(out, spare)
    start = cache.start if cache.padded else None
    if num_tokens == 1:
        keep = cache.all_groups if keep is None else keep
        out = attention_decode(q, keys, values, keep, start, cache.length, window, expected_keep=expected_keep)
        return _with_spare(out, spare)
    keys, values = keys[:, :filled], values[:, :filled]
    if keep is None and start is None and sees_all:
        return library_attention(q, keys, values, None, list(DENSE_BACKENDS))
    keep = cache.all_groups.expand(-1, num_tokens, -1) if keep is None else keep
    window = None if sees_all else window
    skipped = "zeros" if cache.padded else skipped  # rows of padding count as skipped, and their values go on
    return attention_prefill(
        q, keys, values, keep, start, None, window, skipped=skipped, spare=spare, expected_keep=expected_keep
    )


def _with_spare(out: Tensor, spare: int) -> Tensor:
    """[B, T, H, d], copied into rows with `spare` more elements where there must be some."""
    return pad(out.flatten(2), (0, spare))[..., : out[0, 0].numel()].unflatten(2, out.shape[2:]) if spare else out


def _plain(q: Tensor, keys: Tensor, values: Tensor, cache: Cache, window: int | None) -> Tensor:
    """torch's attention with a mask only where one is needed: padding, a window, or a later chunk of a prompt."""
    num_tokens, num_keys = q.shape[1], keys.shape[1]
    seen = None
    if cache.padded or window is not None or 1 < num_tokens < num_keys:
        key = torch.arange(num_keys, device=q.device)
        query = key[num_keys - num_tokens :, None]
        seen = (key <= query)[None] & (key >= cache.start[:, None, None])
        if window is not None:
            seen &= key > query - window
        seen |= key == query  # padding sees itself: a row without keys would be NaN
        seen = seen[:, None]
    q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
    causal = seen is None and num_tokens > 1
    out = scaled_dot_product_attention(q, keys, values, attn_mask=seen, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


def _masked(out: Tensor, keep: Tensor | None) -> Tensor:
    if keep is None:
        return out
    heads = keep.repeat_interleave(out.shape[2] // keep.shape[2], dim=2)
    return out.masked_fill(~heads[..., None], 0)
