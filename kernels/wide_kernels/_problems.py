"""One benchmark problem: inputs in several buffer sets and every way of computing it.

`ours` includes the routing layout. `dense` is the library product without a mask, followed, for FFNs, by one fused
SiLU-multiply kernel (a stronger baseline than two element-wise calls).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from ._testing import Verdict, judge, relative_error
from .dispatch import Plan
from .gemm_k import gemm_k
from .gemm_mn import gate_up, gemm_mn
from .layout import routing_layout
from .masking import channel_mask, mask_blocks_, silu_mul
from .timing import Variant, num_buffer_sets

OPERATORS = ("gemm_mn", "gate_up", "gemm_k", "ffn")
CHECKED_TOKENS = 128


def exact_keep_mask(num_tokens: int, num_groups: int, keep: float, seed: int = 1) -> torch.Tensor:
    """A random bool[T, G] on the GPU with exactly round(keep * T * G) True, wherever they fall."""
    generator = torch.Generator("cuda").manual_seed(seed)
    order = torch.rand(num_tokens * num_groups, device="cuda", generator=generator).argsort()
    mask = torch.zeros(num_tokens * num_groups, dtype=torch.bool, device="cuda")
    mask[order[: round(keep * mask.numel())]] = True
    return mask.view(num_tokens, num_groups)


@dataclass
class Problem:
    """Operator, N output and K input channels (`ffn`: N = FFN width, K = hidden), group width, mask bool[T, G].

    `plans` overrides the table by operator name.
    """

    operator: str
    num_outputs: int
    num_inputs: int
    group_size: int
    keep_mask: torch.Tensor
    dtype: torch.dtype = torch.bfloat16
    plans: dict[str, Plan] = field(default_factory=dict)
    skipped: str | None = None

    def __post_init__(self) -> None:
        if self.operator not in OPERATORS:
            raise ValueError(f"operator must be one of {', '.join(OPERATORS)}, got {self.operator!r}")
        device, self.keep_ratio = self.keep_mask.device, self.keep_mask.float().mean().item()
        num_tokens, num_weights = self.keep_mask.shape[0], {"gate_up": 2, "ffn": 3}.get(self.operator, 1)
        size = self.num_outputs * self.num_inputs * num_weights + num_tokens * (self.num_inputs + self.num_outputs)
        self.generator = torch.Generator(device).manual_seed(0)
        self.sets = []
        for _ in range(num_buffer_sets(size * self.dtype.itemsize)):
            x = self._random(num_tokens, self.num_inputs)
            if self.operator == "gemm_k":
                mask_blocks_(x, self.keep_mask, self.group_size)
            weights = [self._random(self.num_outputs, self.num_inputs) for _ in range(num_weights)]
            weights = [weight.div_(self.num_inputs**0.5) for weight in weights]
            if self.operator == "ffn":
                weights[2] = weights[2].view(self.num_inputs, self.num_outputs)
            self.sets.append((x, weights))

    def _random(self, rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, device=self.keep_mask.device, dtype=self.dtype, generator=self.generator)

    def ours(self, index: int, keep_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Layout and operator on buffer set `index`."""
        x, weights = self.sets[index]
        keep_mask = self.keep_mask if keep_mask is None else keep_mask
        layout = routing_layout(keep_mask, self.keep_ratio)
        plan = self.plans.get(self.operator)
        size = self.group_size
        if self.operator == "gemm_mn":
            return gemm_mn(x, weights[0], layout, group_size=size, skipped=self.skipped or "undefined", plan=plan)
        if self.operator == "gate_up":
            return gate_up(
                x, weights[0], weights[1], layout, group_size=size, skipped=self.skipped or "zeros", plan=plan
            )
        if self.operator == "gemm_k":
            return gemm_k(x, weights[0], layout, group_size=size, skipped="zeros", plan=plan)
        hidden = gate_up(x, weights[0], weights[1], layout, group_size=size, plan=self.plans.get("gate_up"))
        return gemm_k(hidden, weights[2], layout, group_size=size, skipped="zeros", plan=self.plans.get("gemm_k"))

    def dense(self, index: int) -> torch.Tensor:
        """The unpruned library computation on buffer set `index`."""
        x, weights = self.sets[index]
        if self.operator in ("gemm_mn", "gemm_k"):
            return F.linear(x, weights[0])
        hidden = silu_mul(F.linear(x, weights[0]), F.linear(x, weights[1]), None, self.group_size)
        return hidden if self.operator == "gate_up" else F.linear(hidden, weights[2])

    def variant(self, call: Callable[[int], torch.Tensor]) -> Variant:
        """`call` once per buffer set."""
        return [partial(call, index) for index in range(len(self.sets))]

    def check(self, out: torch.Tensor | None = None) -> Verdict:
        """`out` (ours by default) on up to CHECKED_TOKENS tokens spread over the batch against float64.

        By `_testing`'s rule; both on buffer set 0.
        """
        x, weights = self.sets[0]
        num_tokens = x.shape[0]
        picked = torch.linspace(0, num_tokens - 1, min(CHECKED_TOKENS, num_tokens), device=x.device).long()
        wide, keep = [weight.double() for weight in weights], channel_mask(
            self.keep_mask[picked], self.num_inputs if self.operator == "gemm_k" else self.num_outputs, self.group_size
        )  # fmt: skip
        exact, rounded = self._formula(x[picked].double(), wide, keep), self._formula(x[picked], weights, keep)
        out = (self.ours(0) if out is None else out)[picked]
        valid = keep if self.operator in ("gemm_mn", "gate_up") and self.skipped != "zeros" else None
        return judge(self.operator, self.dtype, out, exact, relative_error(rounded, exact), valid)

    def _formula(self, x: torch.Tensor, weights: list[torch.Tensor], keep: torch.Tensor) -> torch.Tensor:
        if self.operator == "gemm_k":
            return (x * keep) @ weights[0].T
        if self.operator == "gemm_mn":
            return (x @ weights[0].T) * keep
        hidden = F.silu(x @ weights[0].T) * (x @ weights[1].T) * keep
        return hidden if self.operator == "gate_up" else hidden @ weights[2].T

    def naive(self) -> torch.Tensor:
        """Gather, compute, scatter, group by group, in plain torch (buffer set 0; `nonzero` waits for the device)."""
        x, weights = self.sets[0]
        num_out = self.num_inputs if self.operator == "ffn" else self.num_outputs
        out = torch.zeros(x.shape[0], num_out, device=x.device, dtype=torch.float32 if self._sums() else x.dtype)
        for group in range(self.keep_mask.shape[1]):
            tokens = self.keep_mask[:, group].nonzero().squeeze(1)
            channels = slice(group * self.group_size, (group + 1) * self.group_size)
            if self.operator == "gemm_k":
                part = x[tokens, channels] @ weights[0][:, channels].T
            else:
                part = x[tokens] @ weights[0][channels].T
            if self.operator in ("gate_up", "ffn"):
                part = F.silu(part) * (x[tokens] @ weights[1][channels].T)
            if self.operator == "ffn":
                part = part @ weights[2][:, channels].T
            if self._sums():
                out.index_add_(0, tokens, part.float())
            else:
                out[tokens, channels] = part
        return out.to(x.dtype)

    def _sums(self) -> bool:
        return self.operator in ("gemm_k", "ffn")

    def grouped(self) -> Callable[[], torch.Tensor] | None:
        """torch._grouped_mm between a gather and a scatter, lists made beforehand; gemm_mn and gemm_k only."""
        if self.operator not in ("gemm_mn", "gemm_k") or self.num_groups_uneven():
            return None
        x, weights = self.sets[0]
        groups, tokens = self.keep_mask.T.nonzero().unbind(1)
        ends = self.keep_mask.sum(0).cumsum(0).to(torch.int32)
        num_groups, size = self.keep_mask.shape[1], self.group_size
        if self.operator == "gemm_mn":
            weight = weights[0].view(num_groups, size, self.num_inputs).transpose(1, 2)

            def forward() -> torch.Tensor:
                out = torch.empty(x.shape[0], num_groups, size, device=x.device, dtype=x.dtype)
                out[tokens, groups] = torch._grouped_mm(x[tokens], weight, offs=ends)
                return out.view(x.shape[0], -1)

            return forward
        blocks = weights[0].T.contiguous().view(num_groups, size, self.num_outputs)

        def summed() -> torch.Tensor:
            part = torch._grouped_mm(x.view(-1, num_groups, size)[tokens, groups], blocks, offs=ends)
            out = torch.zeros(x.shape[0], self.num_outputs, device=x.device, dtype=torch.float32)
            return out.index_add_(0, tokens, part.float()).to(x.dtype)

        return summed

    def num_groups_uneven(self) -> bool:
        """Whether the last group is narrower (a batched weight view does not exist then)."""
        pruned = self.num_inputs if self.operator == "gemm_k" else self.num_outputs
        return pruned % self.group_size != 0

    def roofline_ms(self, flops_per_ms: float, bytes_per_ms: float) -> float:
        """Lower limit of the skipped work: kept products at the matrix rate or touched bytes at the copy rate."""
        num_weights = {"gate_up": 2, "ffn": 3}.get(self.operator, 1)
        num_tokens, weight = self.keep_mask.shape[0], self.num_outputs * self.num_inputs
        used = self.keep_mask.any(0).float().mean().item()
        flops = 2 * num_tokens * weight * num_weights * self.keep_ratio
        pruned_in = self.keep_ratio if self.operator == "gemm_k" else 1.0
        pruned_out = self.keep_ratio if self.operator in ("gemm_mn", "gate_up") else 1.0
        outputs = self.num_inputs if self.operator == "ffn" else self.num_outputs
        activations = num_tokens * (self.num_inputs * pruned_in + outputs * pruned_out)
        moved = (weight * num_weights * used + activations) * self.dtype.itemsize
        return max(flops / flops_per_ms, moved / bytes_per_ms)
