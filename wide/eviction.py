"""Eviction of keys and values: tokens that skip attention are seen by no later query (D-LLM, NeurIPS 2024).

The stock attention runs with a narrower mask. Which cached keys were kept is remembered on the cache itself, so that
it lives exactly as long as they do. A token always sees itself: the output of a skipped one is thrown away, and a
softmax over nothing would be NaN. Beam search, which reorders a cache, is not followed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ATTRIBUTE = "kept_keys"
LEGAL = ("sdpa", "eager")


def check_attention(implementation: str) -> None:
    """ValueError for attention that takes no dense mask."""
    if implementation not in LEGAL:
        raise ValueError(
            f"model.attn_implementation={implementation!r} but this method evicts keys; legal: {', '.join(LEGAL)}"
        )


def cache_in(kwargs: dict):
    """The cache among a module's arguments, or None; transformers 5.24 renamed it."""
    cache = kwargs.get("cache")
    return kwargs.get("past_key_values") if cache is None else cache


def without_evicted(mask: Tensor | None, kept: Tensor, kwargs: dict, layer: int) -> Tensor:
    """Attention mask of one layer with evicted keys closed.

    Args:
        mask: the stock one, [B or 1, 1, Tq, Tk] bool (True: seen) or additive; None is plain causal.
        kept: [B, Tq] bool, tokens of this forward whose keys and values stay.
        kwargs: arguments of the attention module, for its cache.
        layer: the layer's place in the cache.
    """
    num_queries, cache = kept.shape[1], cache_in(kwargs)
    if cache is None:
        past, offset, num_keys, history = 0, 0, num_queries, kept
    else:
        past = int(cache.get_seq_length(layer))
        num_keys, offset = cache.get_mask_sizes(num_queries, layer)
        history = _remember(cache, layer, kept, past)
    keys = torch.arange(offset, offset + num_keys, device=kept.device)
    queries = torch.arange(past, past + num_queries, device=kept.device)
    seen = F.pad(history, (0, max(0, offset + num_keys - history.shape[1])), value=True)
    seen = seen[:, offset : offset + num_keys][:, None, None, :]  # [B, 1, 1, Tk]
    itself = keys[None, :] == queries[:, None]  # [Tq, Tk]
    if mask is None:
        return (keys[None, :] <= queries[:, None]) & seen | itself
    if mask.dtype == torch.bool:
        return mask & seen | itself
    return mask.masked_fill(~(seen | itself), torch.finfo(mask.dtype).min)


def _remember(cache, layer: int, kept: Tensor, past: int) -> Tensor:
    """Kept flags [B, past + Tq] of every key the layer has seen; keys cached by another model count as kept."""
    histories = cache.__dict__.setdefault(ATTRIBUTE, {})
    before = histories.get(layer, kept[:, :0])[:, :past]
    before = F.pad(before, (0, past - before.shape[1]), value=True)
    histories[layer] = torch.cat([before, kept], dim=1)
    return histories[layer]
