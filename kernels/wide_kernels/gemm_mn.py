"""Products whose *output* channels are pruned by token: the Q projection, gate, up, and gate+up+SiLU in one kernel.

`gemm_mn`: out[t, n] = x[t] . weight[n] (+ bias[n]) wherever token t runs the group of channel n.
`gate_up`: out[t, f] = silu(x[t] . gate[f]) * (x[t] . up[f]), likewise.
A program multiplies 128 tokens of one group (gathered by the layout's list) with a block of the group's weight rows.
Sums are float32. A skipped block holds exact zeros or, when the caller says `skipped="undefined"`, anything.
Axes: T tokens, K input channels, N output channels, G groups of `group_size` channels (the last may be narrower).
"""

import torch
import torch.nn.functional as F

from ._launch import last_dim_contiguous, refuse_gradient, runs_triton
from .dispatch import Plan, choose
from .layout import RoutingLayout
from .masking import channel_mask, mask_blocks_, silu_mul
from .mn_skip import launch_skip
from .one_token import launch_mn

SKIPPED = ("zeros", "undefined")


def gemm_mn(
    x: torch.Tensor, weight: torch.Tensor, layout: RoutingLayout, bias: torch.Tensor | None = None, *,
    group_size: int | None = None, skipped: str = "undefined", plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """Token-pruned linear layer: [T, K] x [N, K] -> [T, N], computed where `layout.keep_mask[T, G]` is True.

    `group_size` defaults to N / G and must be given when the last group is narrower. `bias` is [N] and is added to
    running blocks only. `skipped` says what other blocks hold: "undefined" (the caller never reads them; free) or
    "zeros". `plan` overrides the measured table (see `dispatch`). Few tokens or narrow groups run the dense product,
    which fills skipped "undefined" blocks with the unpruned values.
    Raises ValueError for shapes, dtypes or devices that do not fit, RuntimeError when a gradient would be needed.
    Source: WIDE (arXiv 2607.28418) names the operator; the gather-fused form is that of mixture-of-experts kernels.
    """
    refuse_gradient("gemm_mn", x, weight, bias)
    group_size = check_operands("gemm_mn", x, weight, layout, weight.shape[0], group_size, bias)
    check_skipped(skipped)
    plan = plan or choose("gemm_mn", x, weight, layout, group_size)
    return _gemm_mn(
        x, weight, None, bias, layout.keep_mask, layout.lists(plan.route),
        group_size, skipped == "zeros", plan.route, list(plan.config), 0,
    )  # fmt: skip


def gate_up(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, layout: RoutingLayout, *,
    group_size: int | None = None, skipped: str = "zeros", spare: int = 0, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """Token-pruned first half of a gated FFN: silu(x gate^T) * (x up^T), [T, K] -> [T, N], both weights [N, K].

    The products and the activation stay in float32 and are rounded once, at the end. `skipped` defaults to "zeros",
    which a dense down projection needs. `spare` undefined columns are allocated behind every row, so that the caller
    can extend rows in place (see `masking.skipped_columns_`). Other arguments and errors: `gemm_mn`.
    """
    refuse_gradient("gate_up", x, gate_weight, up_weight)
    group_size = check_operands("gate_up", x, gate_weight, layout, gate_weight.shape[0], group_size, None)
    if up_weight.shape != gate_weight.shape or up_weight.dtype != gate_weight.dtype or up_weight.stride(1) != 1:
        raise ValueError(
            f"gate_up: up_weight {tuple(up_weight.shape)} must be like gate_weight {tuple(gate_weight.shape)}"
        )
    check_skipped(skipped)
    plan = plan or choose("gate_up", x, gate_weight, layout, group_size)
    return _gemm_mn(
        x, gate_weight, up_weight, None, layout.keep_mask, layout.lists(plan.route), group_size, skipped == "zeros",
        plan.route, list(plan.config), spare,
    )  # fmt: skip


def check_skipped(skipped: str) -> None:
    """ValueError unless `skipped` is one of the two declared contents of a skipped block."""
    if skipped not in SKIPPED:
        raise ValueError(f"skipped must be one of {', '.join(SKIPPED)}, got {skipped!r}")


def check_operands(
    operator: str, x: torch.Tensor, weight: torch.Tensor, layout: RoutingLayout, num_channels: int,
    group_size: int | None, bias: torch.Tensor | None,
) -> int:  # fmt: skip
    """Check one call and return the group width; `num_channels` is the length of the pruned axis."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"{operator}: x [T, K] and weight [N, K] needed, got {tuple(x.shape)}, {tuple(weight.shape)}")
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise ValueError(f"{operator}: x and weight need one floating dtype, got {x.dtype} and {weight.dtype}")
    if len({x.device, weight.device, layout.keep_mask.device}) > 1:
        raise ValueError(
            f"{operator}: x, weight and layout lie on {x.device}, {weight.device}, {layout.keep_mask.device}"
        )
    if weight.stride(1) != 1:
        raise ValueError(f"{operator}: weight rows must be contiguous (strides {weight.stride()}); copy it once")
    num_tokens, num_groups = layout.keep_mask.shape
    if num_tokens != x.shape[0]:
        raise ValueError(f"{operator}: the layout has {num_tokens} tokens, x has {x.shape[0]}")
    if group_size is None and num_channels % num_groups:
        raise ValueError(f"{operator}: {num_channels} channels do not split into {num_groups} groups: give group_size")
    group_size = num_channels // num_groups if group_size is None else group_size
    if group_size < 1 or -(-num_channels // group_size) != num_groups:
        raise ValueError(f"{operator}: groups of {group_size} do not cut {num_channels} channels into {num_groups}")
    if bias is not None and (bias.shape != (weight.shape[0],) or bias.dtype != x.dtype):
        raise ValueError(f"{operator}: bias must be {x.dtype}[{weight.shape[0]}], got {bias.dtype}{tuple(bias.shape)}")
    return group_size


@torch.library.custom_op("wide_kernels::gemm_mn", mutates_args=())
def _gemm_mn(
    x: torch.Tensor, weight: torch.Tensor, up_weight: torch.Tensor | None, bias: torch.Tensor | None,
    keep_mask: torch.Tensor, lists: list[torch.Tensor], group_size: int, zeros: bool, route: str, config: list[int],
    spare: int,
) -> torch.Tensor:  # fmt: skip
    x = last_dim_contiguous(x)
    if x.shape[0] == 0 or weight.shape[0] == 0:
        return _rows(x, weight, spare)
    if route == "dense" or not runs_triton(x):
        return _dense(x, weight, up_weight, bias, keep_mask, group_size, zeros, spare)
    first, second = lists
    if route == "one_token":
        few = launch_mn(x, weight, up_weight, bias, keep_mask, first, second, group_size, config)
        return _rows(x, weight, spare).copy_(few) if spare else few
    return launch_skip(x, weight, up_weight, bias, first, second, group_size, zeros, config, _rows(x, weight, spare))


@_gemm_mn.register_fake
def _(x, weight, up_weight, bias, keep_mask, lists, group_size, zeros, route, config, spare):
    return _rows(x, weight, spare)


def _rows(x: torch.Tensor, weight: torch.Tensor, spare: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] + spare)[:, : weight.shape[0]]


def _dense(x, weight, up_weight, bias, keep_mask, group_size, zeros, spare) -> torch.Tensor:
    if up_weight is not None:
        out = _rows(x, weight, spare) if spare else None
        return silu_mul(F.linear(x, weight), F.linear(x, up_weight), keep_mask if zeros else None, group_size, out)
    out = F.linear(x, weight, bias)
    return mask_blocks_(out, keep_mask, group_size) if zeros else out


def reference(
    x: torch.Tensor, weight: torch.Tensor, layout: RoutingLayout, bias: torch.Tensor | None = None,
    group_size: int | None = None, **_: object,
) -> torch.Tensor:  # fmt: skip
    """gemm_mn with zeros in skipped blocks, in the inputs' precision."""
    out = x @ weight.T if bias is None else x @ weight.T + bias
    return out * channel_mask(layout.keep_mask, weight.shape[0], group_size)


def gate_up_reference(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, layout: RoutingLayout,
    group_size: int | None = None, **_: object,
) -> torch.Tensor:  # fmt: skip
    """gate_up with zeros in skipped blocks, in the inputs' precision."""
    out = F.silu(x @ gate_weight.T) * (x @ up_weight.T)
    return out * channel_mask(layout.keep_mask, gate_weight.shape[0], group_size)


def cases():
    """Odd widths, extreme masks, few tokens, strided inputs, every route (see `_cases`)."""
    from ._cases import mn_cases

    return mn_cases()


def bench_shapes() -> list[dict]:
    """The Q, gate and up projections of the benchmarked models: name, N, K and the group widths."""
    from ._models import mn_shapes

    return mn_shapes()
