"""The dense-and-mask pieces: zero the skipped blocks of a dense result, silu(gate) * up with the mask fused in, and
the skipped groups as further columns of an activation, which let a dense product add a vector for each of them.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ._launch import runs_triton
from .gqa import narrow


def mask_blocks_(values: torch.Tensor, keep_mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """Zero, in place, the channels of [T, N] whose group the token skips; keep_mask is bool[T, G]."""
    if runs_triton(values) and values.numel():
        _sweep(values, values, values, keep_mask, group_size, gated=False)
        return values
    return values.masked_fill_(~channel_mask(keep_mask, values.shape[1], group_size), 0)


def masked_blocks(values: torch.Tensor, keep_mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """A copy of [T, N] with zeros in the blocks the token skips, whatever (NaN too) they held."""
    if runs_triton(values) and values.numel():
        out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
        _sweep(values, values, out, keep_mask, group_size, gated=False)
        return out
    return values.masked_fill(~channel_mask(keep_mask, values.shape[1], group_size), 0)


def silu_mul(
    gate: torch.Tensor, up: torch.Tensor, keep_mask: torch.Tensor | None, group_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """silu(gate) * up over [T, N], zero where the token skips the channel's group (keep_mask None: nowhere).

    Written to `out` [T, N], dense along N; None takes `gate` itself on a GPU, and a fresh tensor elsewhere.
    """
    if runs_triton(gate) and gate.numel():
        out = gate if out is None else out
        _sweep(gate, up, out, keep_mask, group_size, gated=True)
        return out
    product = F.silu(gate) * up
    if keep_mask is not None:
        product.masked_fill_(~channel_mask(keep_mask, product.shape[1], group_size), 0)
    return product if out is None else out.copy_(product)


def skipped_columns_(columns: torch.Tensor, keep_mask: torch.Tensor) -> torch.Tensor:
    """Fill [T, P] with 1 at [t, g] where token t skips group g of keep_mask bool[T, G], else 0; G <= P.

    A product with [W; V], V [G, N] and zeros up to P, then is x W + sum of V[g] over the skipped g, without a second
    pass over its output.
    """
    num_tokens, num_groups = keep_mask.shape
    if runs_triton(columns) and columns.numel():
        width = triton.next_power_of_2(columns.shape[1])
        block = max(1, 4096 // width)
        _skipped_columns_kernel[(triton.cdiv(num_tokens, block),)](
            columns, keep_mask, num_tokens, columns.shape[1], columns.stride(0), num_groups, WIDTH=width, BLOCK=block
        )
        return columns
    columns[:, :num_groups] = torch.logical_not(keep_mask)
    columns[:, num_groups:] = 0
    return columns


def channel_mask(keep_mask: torch.Tensor, num_channels: int, group_size: int | None) -> torch.Tensor:
    """bool[T, G] -> bool[T, N]: the mask of each channel."""
    size = group_size if group_size is not None else num_channels // keep_mask.shape[1]
    return keep_mask.repeat_interleave(size, dim=1)[:, :num_channels]


def _sweep(first, second, out, keep_mask, group_size, gated: bool) -> None:
    num_tokens, num_channels = first.shape
    block = min(1024, triton.next_power_of_2(num_channels))
    num_groups = triton.cdiv(num_channels, group_size)
    _sweep_kernel[(num_tokens, triton.cdiv(num_channels, block))](
        first, second, out, first if keep_mask is None else keep_mask, num_channels, num_groups,
        first.stride(0), second.stride(0), out.stride(0), GROUP=group_size, GATED=gated,
        MASKED=keep_mask is not None, BLOCK=block,
    )  # fmt: skip


@triton.jit
def _sweep_kernel(
    first, second, out, keep, num_channels, num_groups, stride_first, stride_second, stride_out,
    GROUP: tl.constexpr, GATED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < num_channels
    runs = inside
    if MASKED:
        on = tl.load(keep + token * num_groups + channel // GROUP, mask=inside, other=0)
        runs = inside & (on != 0)
    value = tl.load(first + token * stride_first + channel, mask=runs, other=0.0).to(tl.float32)
    if GATED:
        value = value / (1.0 + tl.exp(-value))
        value *= tl.load(second + token * stride_second + channel, mask=runs, other=0.0).to(tl.float32)
    tl.store(out + token * stride_out + channel, narrow(value, out.dtype.element_ty), mask=inside)


@triton.jit
def _skipped_columns_kernel(
    columns, keep, num_tokens, num_columns, stride, num_groups, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    group = tl.arange(0, WIDTH)[None, :]
    live = token < num_tokens
    on = tl.load(keep + token * num_groups + group, mask=live & (group < num_groups), other=1)
    value = tl.where(on == 0, 1.0, 0.0).to(columns.dtype.element_ty)
    tl.store(columns + token * stride + group, value, mask=live & (group < num_columns))
