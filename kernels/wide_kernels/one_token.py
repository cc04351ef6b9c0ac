"""One to eight tokens: the same operators, limited by the bytes of the weights they read.

Only the groups that some token runs are read (the active list); programs are numbered over active groups, so
the idle half of a mask leaves no processor idle. One token multiplies element-wise and reduces once; two to eight
tokens go through a 16-wide matrix product. Sums are float32; the down and O projections keep W as [N, K] and
read the active stretches of its rows, so no second copy of the weight is needed and no partial sums leave a program.
Axes: T tokens, K input channels, N output channels, G groups.
"""

import torch
import triton
import triton.language as tl

from ._launch import can_chain, chain_option
from .gqa import mma, narrow, wait_and_release


def launch_mn(x, weight, up_weight, bias, keep_mask, active_groups, num_active, group_size, config) -> torch.Tensor:
    """`gemm_mn` / `gate_up` for at most 8 tokens; skipped blocks hold zeros. config: [rows, cols, warps, stages]."""
    num_tokens, num_inputs = x.shape
    num_channels, num_groups = weight.shape[0], keep_mask.shape[1]
    block_n, block_k, num_warps, num_stages = config
    if num_tokens > 1:
        block_n, block_k = max(16, block_n), 16 if x.dtype == torch.float32 else block_k  # short chains, see `mma`
    out = torch.empty(num_tokens, num_channels, dtype=x.dtype, device=x.device)
    tiles, chained = triton.cdiv(group_size, block_n), can_chain(x)
    _one_token_mn_kernel[(num_groups * tiles,)](
        x, weight, up_weight if up_weight is not None else weight, bias if bias is not None else out, out, keep_mask,
        active_groups, num_active, num_tokens, num_channels, num_inputs, num_groups, group_size, x.stride(0),
        weight.stride(0), (up_weight if up_weight is not None else weight).stride(0),
        FUSED=up_weight is not None, HAS_BIAS=bias is not None, SINGLE=num_tokens == 1,
        EVEN=num_inputs % block_k == 0 and group_size % block_n == 0 and num_channels % group_size == 0,
        BLOCK_N=block_n, BLOCK_K=block_k, CHAINED=chained, num_warps=num_warps, num_stages=num_stages,
        **chain_option(chained),
    )  # fmt: skip
    return out


def launch_k(x, weight, bias, keep_mask, active_groups, num_active, group_size, config) -> torch.Tensor:
    """`gemm_k` for at most 8 tokens. config: [rows, cols, warps, stages]."""
    num_tokens, num_inputs = x.shape
    num_outputs, num_groups = weight.shape[0], keep_mask.shape[1]
    block_n, block_k, num_warps, num_stages = config
    if num_tokens > 1:
        block_n, block_k = max(16, block_n), 16 if x.dtype == torch.float32 else block_k  # short chains, see `mma`
    out = torch.empty(num_tokens, num_outputs, dtype=x.dtype, device=x.device)
    # Runs of `run` columns lie in one group: what a vector load may rely on.
    run = max(size for size in (1, 2, 4, 8, 16) if group_size % size == 0)
    chained = can_chain(x)
    _one_token_k_kernel[(triton.cdiv(num_outputs, block_n),)](
        x, weight, bias if bias is not None else out, out, keep_mask, active_groups, num_active,
        num_tokens, num_outputs, num_inputs, num_groups, x.stride(0), weight.stride(0),
        GROUP=group_size, RUN=run, HAS_BIAS=bias is not None, SINGLE=num_tokens == 1,
        BLOCK_N=block_n, BLOCK_K=block_k, CHAINED=chained, num_warps=num_warps, num_stages=num_stages,
        **chain_option(chained),
    )  # fmt: skip
    return out


@triton.jit
def _weights(pointers, ok, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers, eviction_policy="evict_first")
    else:
        return tl.load(pointers, mask=ok, other=0.0, eviction_policy="evict_first")


@triton.jit
def _one_token_mn_kernel(
    x, w, w_up, bias, out, keep, active_groups, num_active, num_tokens, num_channels, num_inputs, num_groups,
    group_size, stride_x, stride_w, stride_up, FUSED: tl.constexpr, HAS_BIAS: tl.constexpr, SINGLE: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    wait_and_release(CHAINED)
    tiles = tl.cdiv(group_size, BLOCK_N)
    group = tl.load(active_groups + tl.program_id(0) // tiles)
    n = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = group * group_size + n
    inside = (n < group_size) & (channel < num_channels)
    token = tl.arange(0, 16)
    live = token < num_tokens
    if tl.program_id(0) // tiles >= tl.load(num_active):
        pointers = out + token[None, :] * num_channels + channel[:, None]
        zeros = tl.zeros((BLOCK_N, 16), out.dtype.element_ty)
        tl.store(pointers, zeros, mask=inside[:, None] & live[None, :])
        return

    k = tl.arange(0, BLOCK_K)
    w_pointers = w + channel.to(tl.int64)[:, None] * stride_w + k[None, :]
    up_pointers = w_up + channel.to(tl.int64)[:, None] * stride_up + k[None, :]
    if SINGLE:
        wide = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        wide_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in range(0, num_inputs, BLOCK_K):
            ok = inside[:, None] & (k < num_inputs - start)[None, :]
            a = tl.load(x + start + k, mask=k < num_inputs - start, other=0.0).to(tl.float32)[None, :]
            wide += _weights(w_pointers + start, ok, EVEN).to(tl.float32) * a
            if FUSED:
                wide_up += _weights(up_pointers + start, ok, EVEN).to(tl.float32) * a
        acc = tl.sum(wide, 1)
        acc_up = tl.sum(wide_up, 1)
        if HAS_BIAS:
            acc += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        if FUSED:
            acc = acc / (1.0 + tl.exp(-acc)) * acc_up
        tl.store(out + channel, narrow(acc, out.dtype.element_ty), mask=inside)
    else:
        acc = tl.zeros((BLOCK_N, 16), tl.float32)
        acc_up = tl.zeros((BLOCK_N, 16), tl.float32)
        x_pointers = x + token[None, :] * stride_x + k[:, None]
        for start in range(0, num_inputs, BLOCK_K):
            ok = inside[:, None] & (k < num_inputs - start)[None, :]
            a = tl.load(x_pointers + start, mask=live[None, :] & (k < num_inputs - start)[:, None], other=0.0)
            acc = mma(_weights(w_pointers + start, ok, EVEN), a, acc, "ieee")
            if FUSED:
                acc_up = mma(_weights(up_pointers + start, ok, EVEN), a, acc_up, "ieee")
        if HAS_BIAS:
            acc += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[:, None]
        if FUSED:
            acc = acc / (1.0 + tl.exp(-acc)) * acc_up
        runs = tl.load(keep + token * num_groups + group, mask=live, other=0) != 0
        acc = tl.where(runs[None, :], acc, 0.0)
        pointers = out + token[None, :] * num_channels + channel[:, None]
        tl.store(pointers, narrow(acc, out.dtype.element_ty), mask=inside[:, None] & live[None, :])


@triton.jit
def _one_token_k_kernel(
    x, w, bias, out, keep, active_groups, num_active, num_tokens, num_outputs, num_inputs, num_groups,
    stride_x, stride_w, GROUP: tl.constexpr, RUN: tl.constexpr, HAS_BIAS: tl.constexpr, SINGLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    wait_and_release(CHAINED)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < num_outputs
    k = tl.arange(0, BLOCK_K)
    token = tl.arange(0, 16)
    live = token < num_tokens
    length = tl.load(num_active) * GROUP
    wide = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc = tl.zeros((BLOCK_N, 16), tl.float32)
    for start in range(0, length, BLOCK_K):
        packed = start + k  # place among the active groups' channels
        group = tl.load(active_groups + packed // GROUP, mask=packed < length, other=0)
        group = tl.max_constancy(group, RUN)
        column = group * GROUP + packed % GROUP
        ok = (packed < length) & (column < num_inputs)
        pointers = w + n.to(tl.int64)[:, None] * stride_w + column[None, :]
        b = tl.load(pointers, mask=inside[:, None] & ok[None, :], other=0.0, eviction_policy="evict_first")
        if SINGLE:
            a = tl.load(x + column, mask=ok, other=0.0).to(tl.float32)
            wide += b.to(tl.float32) * a[None, :]
        else:
            runs = tl.load(
                keep + token[None, :] * num_groups + group[:, None], mask=live[None, :] & ok[:, None], other=0
            )
            a = tl.load(x + token[None, :] * stride_x + column[:, None], mask=runs != 0, other=0.0)
            acc = mma(b, a, acc, "ieee")
    if SINGLE:
        single = tl.sum(wide, 1)
        if HAS_BIAS:
            single += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + n, narrow(single, out.dtype.element_ty), mask=inside)
    else:
        if HAS_BIAS:
            acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        pointers = out + token[None, :] * num_outputs + n[:, None]
        tl.store(pointers, narrow(acc, out.dtype.element_ty), mask=inside[:, None] & live[None, :])


def cases():
    """One to eight tokens through the bandwidth-bound route (see `_cases`)."""
    from ._cases import one_token_cases

    return one_token_cases()


def bench_shapes() -> list[dict]:
    """Whole FFNs (gate, up, SiLU, down) and the Q and O projections of the benchmarked models."""
    from ._models import ffn_shapes

    return ffn_shapes()
