"""The dense-and-mask pieces: zero the skipped blocks of a dense result, and silu(gate) * up with the mask fused in."""

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
    return values.masked_fill_(~_widen(keep_mask, values.shape[1], group_size), 0)


def masked_blocks(values: torch.Tensor, keep_mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """A copy of [T, N] with zeros in the blocks the token skips, whatever (NaN too) they held."""
    if runs_triton(values) and values.numel():
        out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
        _sweep(values, values, out, keep_mask, group_size, gated=False)
        return out
    return values.masked_fill(~_widen(keep_mask, values.shape[1], group_size), 0)


def silu_mul(gate: torch.Tensor, up: torch.Tensor, keep_mask: torch.Tensor | None, group_size: int) -> torch.Tensor:
    """silu(gate) * up over [T, N], zero where the token skips the channel's group (keep_mask None: nowhere)."""
    if runs_triton(gate) and gate.numel():
        _sweep(gate, up, gate, keep_mask, group_size, gated=True)
        return gate
    out = F.silu(gate) * up
    return out if keep_mask is None else out.masked_fill_(~_widen(keep_mask, out.shape[1], group_size), 0)


def _widen(keep_mask: torch.Tensor, num_channels: int, group_size: int) -> torch.Tensor:
    return keep_mask.repeat_interleave(group_size, dim=1)[:, :num_channels]


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
