"""The dense way of both attention operators, and which way a call takes.

Dense is the library's attention over whole rows, then zeros in the inactive ones. It can stand in only for plain
causal attention: with padding, a cache length or a window the library would need a mask of Tq x Tk.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ._launch import can_chain, chain_option, runs_triton
from .dispatch import rule_for
from .gqa import HeadGroups
from .gqa_prefill import zero_kernel

DENSE_BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
SKIPPED = ("zeros", "undefined")
ROUTES = ("skip", "dense")


def check_skipped(skipped: str) -> None:
    """ValueError unless `skipped` is one of the two declared contents of an inactive row."""
    if skipped not in SKIPPED:
        raise ValueError(f"skipped must be one of {', '.join(SKIPPED)}, got {skipped!r}")


def route_of(
    operator: str,
    q: Tensor,
    k: Tensor,
    key_start: Tensor | None,
    key_length: Tensor | None,
    window: int | None,
    expected_keep: float,
    route: str | None,
) -> str:
    """ "skip" or "dense" for one call, from shapes, dtype and the hint; the table's rules give q's width in channels
    as the weight size, the head size as the group size, and count queries (`attention_decode`: keys of the batch)."""
    plain = key_start is None and key_length is None and window is None and q.shape[1] <= k.shape[1]
    if route is not None:
        if route not in ROUTES:
            raise ValueError(f"route must be one of {', '.join(ROUTES)}, got {route!r}")
        if route == "dense" and not plain:
            raise ValueError(f"{operator}: the dense route takes no key_start, key_length or window, nor Tq > Tk")
        return route
    if not plain or not runs_triton(q):
        return "skip"
    count = k.shape[0] * k.shape[1] if operator == "attention_decode" else q.shape[1]
    return rule_for(operator, q, count, q.shape[2] * q.shape[3], q.shape[3], expected_keep).route


def library_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, backends: list[SDPBackend]) -> Tensor:
    """Causal attention of [B, Tq, H, D] queries, the last of the Tk positions, by the first backend that can."""
    num_tokens, num_keys = q.shape[1], k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal: dict[str, Any] = {"is_causal": num_tokens > 1}
    if 1 < num_tokens < num_keys:
        causal = {"attn_mask": causal_lower_right(num_tokens, num_keys)}
    with sdpa_kernel(backends, set_priority=True):
        out = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **causal)
    return out.transpose(1, 2)


def run_dense(q: Tensor, k: Tensor, v: Tensor, keep_mask: Tensor, scale: float, zeros: bool) -> Tensor:
    """Whole rows, contiguous, then (with `zeros`) zeros in the inactive ones."""
    sizes = HeadGroups.of(q, k, v, keep_mask)
    if q.numel() == 0 or sizes.num_keys == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    out = library_attention(q, k, v, scale, list(DENSE_BACKENDS)).contiguous()
    if zeros:
        chained = can_chain(q)
        num_rows, width = sizes.batch * sizes.num_tokens, sizes.group_size * sizes.head_size
        zero_kernel[(triton.cdiv(num_rows, 32), sizes.num_groups)](
            out, keep_mask.contiguous(), num_rows, NUM_GROUPS=sizes.num_groups, WIDTH=width, BLOCK_T=32,
            BLOCK_W=min(512, triton.next_power_of_2(width)), CHAINED=chained, **chain_option(chained),
        )  # fmt: skip
    return out
