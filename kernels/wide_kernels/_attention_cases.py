"""The inputs both attention operators have to get right: head geometries, odd sizes, spans, extreme masks, strides.

Sizes are small on purpose (the CPU interpreter runs them); the compiled check runs the same ones.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from ._cases import MASKS, make_mask
from ._testing import Case, Inputs
from .attention_decode import attention_decode
from .attention_prefill import attention_prefill
from .gqa import reference

# H query heads, K kv heads, G groups, D head size
GEOMETRIES = {
    "gqa": (8, 2, 2, 64),
    "smollm_9_heads": (9, 3, 3, 64),
    "group_of_two_kv_heads": (8, 4, 2, 32),
    "half_a_kv_head": (8, 2, 4, 32),
    "multi_head": (6, 6, 6, 16),
    "five_groups": (10, 5, 5, 16),
    "one_group": (4, 1, 1, 64),
    "head_48": (4, 2, 2, 48),
    "head_80": (4, 2, 2, 80),
    "head_96": (6, 2, 2, 96),
    "head_128": (4, 2, 2, 128),
    "head_192": (2, 1, 1, 192),
}


def _inputs(
    generator, device, dtype, *, batch=1, queries=40, keys=None, heads="gqa", mask="random", start=None, length=None,
    window=None, scale=None, strided=False, **options,
) -> Inputs:  # fmt: skip
    num_heads, num_kv_heads, num_groups, head_size = GEOMETRIES[heads]
    keys = queries if keys is None else keys
    shapes = [(batch, queries, num_heads), (batch, keys, num_kv_heads), (batch, keys, num_kv_heads)]
    q, k, v = (torch.randn(*shape, head_size, generator=generator).to(device, dtype) for shape in shapes)
    if strided:  # [B, heads, T, D] buffers with a margin of NaN, seen as [B, T, heads, D]
        q, k, v = (_with_margin(x) for x in (q, k, v))
    spans = {
        name: None if rows is None else torch.tensor(rows, dtype=torch.int32, device=device)
        for name, rows in (("key_start", start), ("key_length", length))
    }
    for row in range(batch):  # what lies outside a row's span must not matter
        for x in (k, v):
            x[row, : 0 if start is None else start[row]] = float("nan")
            x[row, keys if length is None else length[row] :] = float("nan")
    keep_mask = make_mask(mask, generator, batch * queries, num_groups, device).view(batch, queries, num_groups)
    return {"q": q, "k": k, "v": v, "keep_mask": keep_mask, "window": window, "scale": scale} | spans | options


def _with_margin(x: torch.Tensor) -> torch.Tensor:
    batch, tokens, heads, size = x.shape
    buffer = torch.full((batch, heads, tokens, size + 16), float("nan"), dtype=x.dtype, device=x.device)
    view = buffer[..., :size].transpose(1, 2)
    return view.copy_(x)


def _dense(*, q, k, v, keep_mask, key_start, key_length, window, scale, **_) -> torch.Tensor:
    """The library's attention with an explicit mask: its error counts on the same rows as ours, the active ones."""
    batch, num_tokens, num_heads, _size = q.shape
    num_keys = k.shape[1]
    key = torch.arange(num_keys, device=q.device)
    start = torch.zeros(batch, device=q.device) if key_start is None else key_start
    length = torch.full((batch,), num_keys, device=q.device) if key_length is None else key_length
    position = length[:, None] - num_tokens + torch.arange(num_tokens, device=q.device)  # [B, Tq]
    seen = (key >= start[:, None, None]) & (key <= position[..., None])
    if window is not None:
        seen &= key > position[..., None] - window
    q, k, v = (x.nan_to_num().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=scale)
    counted = seen.any(-1)[:, :, None] & keep_mask.repeat_interleave(num_heads // keep_mask.shape[-1], dim=-1)
    return torch.where(counted[..., None], out.transpose(1, 2), 0)


def _plain_reference(*, q, k, v, keep_mask, key_start, key_length, window, scale, **_) -> torch.Tensor:
    return reference(q, k, v, keep_mask, key_start, key_length, window, scale)


def _active(*, q, keep_mask, **_) -> torch.Tensor:
    return keep_mask.repeat_interleave(q.shape[2] // keep_mask.shape[-1], dim=-1)


def _case(op: Callable, name: str, **choices) -> Case:
    valid = _active if choices.get("skipped") == "undefined" else None
    return Case(f"{op.__name__}-{name}", partial(_inputs, **choices), op, _plain_reference, _dense, valid)


def prefill_cases() -> list[Case]:
    """Cases of attention_prefill: whole prompts, chunks, padding, windows, both routes."""
    case = partial(_case, attention_prefill)
    cases = [case(name, heads=name, queries=37) for name in GEOMETRIES]
    cases += [case(f"mask_{mask}", mask=mask) for mask in MASKS]
    cases += [case(f"{tokens}_tokens", queries=tokens, heads="smollm_9_heads") for tokens in (0, 1, 2, 15, 16, 17, 31)]
    cases += [case(f"chunk_{tokens}_of_90", queries=tokens, keys=90) for tokens in (1, 7, 33)]
    return [
        *cases,
        case("left_padding", batch=2, start=[0, 11]),
        case("a_row_of_padding_alone", batch=2, start=[0, 40]),
        case("cache_lengths", batch=3, queries=9, keys=80, length=[80, 9, 41]),
        case("padding_and_lengths", batch=2, queries=20, keys=64, start=[3, 50], length=[50, 60]),
        case("window_1", window=1),
        case("window_8", window=8, heads="head_80"),
        case("window_beyond", window=400),
        case("window_chunk_padding", batch=2, queries=21, keys=70, window=13, start=[0, 44]),
        case("scale", scale=0.31),
        case("strided", batch=2, strided=True, heads="head_96"),
        case("batch_of_3", batch=3, queries=18),
        case("dense_route", route="dense", heads="smollm_9_heads"),
        case("dense_route_undefined", route="dense", skipped="undefined"),
        case("dense_chunk", route="dense", queries=16, keys=64),
        case("dense_strided", route="dense", batch=2, strided=True, heads="head_128"),
        case("all_expected", expected_keep=1.0, mask="all"),
        case("undefined", skipped="undefined"),
        case("undefined_batch", batch=3, queries=18, heads="smollm_9_heads", skipped="undefined", mask="one_each"),
        case("spare_columns", batch=2, queries=37, heads="smollm_9_heads", spare=24),
        case("spare_columns_chunk", batch=2, queries=9, keys=80, length=[80, 41], spare=3),
        case("spare_columns_dense", batch=2, route="dense", spare=64),
    ]


def decode_cases() -> list[Case]:
    """Cases of attention_decode: odd caches, padding, windows, empty rows, both routes."""
    case = partial(_case, attention_decode, queries=1)
    cases = [case(name, heads=name, batch=5, keys=75) for name in GEOMETRIES]
    cases += [case(f"mask_{mask}", mask=mask, batch=4, keys=50) for mask in MASKS]
    cases += [case(f"{keys}_keys", keys=keys, heads="smollm_9_heads") for keys in (1, 2, 15, 16, 17, 31, 33, 300)]
    return [
        *cases,
        case("left_padding", batch=2, keys=60, start=[0, 37]),
        case("lengths", batch=3, keys=130, length=[1, 130, 64]),
        case("an_empty_row", batch=2, keys=40, length=[0, 40]),
        case("padding_and_lengths", batch=2, keys=64, start=[3, 50], length=[50, 60]),
        case("window_1", keys=50, window=1),
        case("window_20", batch=2, keys=90, window=20, length=[90, 15]),
        case("scale", keys=50, scale=0.31),
        case("strided", batch=2, keys=50, strided=True, heads="head_96"),
        case("batch_of_5", batch=5, keys=33),
        case("dense_route", batch=2, keys=70, route="dense", heads="smollm_9_heads"),
        case("dense_undefined", batch=2, keys=70, route="dense", skipped="undefined"),
        case("all_expected", keys=70, expected_keep=1.0, mask="all"),
        case("undefined", batch=3, keys=40, skipped="undefined"),
        case("empty_batch", batch=0, keys=16),
    ]
