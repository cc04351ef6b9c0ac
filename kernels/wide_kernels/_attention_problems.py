"""One attention benchmark: inputs in several buffer sets, ours and the library's dense call by its better backend."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.attention import SDPBackend

from ._testing import Verdict, judge, relative_error
from .attention_decode import attention_decode
from .attention_dense import library_attention
from .attention_prefill import attention_prefill
from .gqa import reference
from .timing import Variant, measure_at, num_buffer_sets

OPERATORS = ("attention_prefill", "attention_decode")
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
CHECKED_ROWS = 64


@dataclass
class AttentionProblem:
    """Sizes of `_models.attention_shapes` and a mask bool[B, Tq, K]: a group is the heads of one KV head.

    Inactive rows are `skipped`, the route is the table's unless given.
    """

    operator: str
    shape: dict
    keep_mask: torch.Tensor
    skipped: str = "zeros"
    route: str | None = None
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        self.keep_ratio = self.keep_mask.float().mean().item()
        batch, queries, keys = (self.shape[name] for name in ("batch", "queries", "keys"))
        heads, kv_heads, size = (self.shape[name] for name in ("H", "K", "D"))
        volume = batch * size * (queries * heads + 2 * keys * kv_heads)
        generator = torch.Generator("cuda").manual_seed(0)
        shapes = ((batch, queries, heads, size), (batch, keys, kv_heads, size), (batch, keys, kv_heads, size))
        self.sets = [
            [torch.randn(shape, device="cuda", dtype=self.dtype, generator=generator) for shape in shapes]
            for _ in range(num_buffer_sets(volume * self.dtype.itemsize))
        ]

    def ours(self, index: int) -> torch.Tensor:
        """The operator on buffer set `index`, with the true share of True as the hint."""
        call: Callable[..., torch.Tensor] = (
            attention_decode if self.operator == "attention_decode" else attention_prefill
        )
        options = {"skipped": self.skipped, "expected_keep": self.keep_ratio, "route": self.route}
        return call(*self.sets[index], self.keep_mask, **options)

    def variant(self) -> Variant:
        """Ours, once per buffer set."""
        return [partial(self.ours, index) for index in range(len(self.sets))]

    def dense(self) -> dict[str, Variant]:
        """The library's attention by backend name, each once per buffer set; a backend that refuses is left out."""
        variants = {}
        for name, backend in BACKENDS.items():
            calls: Variant = [
                partial(library_attention, q, k, v, scale=None, backends=[backend]) for q, k, v in self.sets
            ]
            try:
                calls[0]()
            except RuntimeError:
                continue
            variants[name] = calls
        return variants

    def check(self) -> Verdict:
        """The last CHECKED_ROWS queries of the first batch row against float64, by `_testing`'s rule."""
        q, k, v = (x[:1] for x in self.sets[0])
        rows = min(CHECKED_ROWS, q.shape[1])
        keep = self.keep_mask[:1, -rows:]
        queries, keys, values = q[:, -rows:].double(), k.double(), v.double()
        exact = reference(queries, keys, values, keep)
        dense = library_attention(q, k, v, None, [*BACKENDS.values(), SDPBackend.MATH])[:, -rows:]
        dense_error = relative_error(dense, reference(queries, keys, values, torch.ones_like(keep)))
        active = keep.repeat_interleave(q.shape[2] // keep.shape[-1], dim=-1)
        out = self.ours(0)[:1, -rows:]
        return judge(self.operator, self.dtype, out, exact, dense_error, active if self.skipped != "zeros" else None)

    def roofline_ms(self, flops_per_ms: float, bytes_per_ms: float) -> float:
        """Kept products at the matrix rate, or queries, active KV heads and outputs at the read rate."""
        batch, queries, keys = (self.shape[name] for name in ("batch", "queries", "keys"))
        heads, kv_heads, size = (self.shape[name] for name in ("H", "K", "D"))
        seen = keys - (queries - 1) / 2
        flops = 4 * batch * queries * seen * heads * size * self.keep_ratio
        read = self.keep_mask.any(1).float().mean().item()
        moved = (2 * batch * queries * heads * self.keep_ratio + 2 * batch * keys * kv_heads * read) * size
        return max(flops / flops_per_ms, moved * self.dtype.itemsize / bytes_per_ms)

    def row(self, limits: tuple[float, float], clocks: str) -> dict:
        """Check, then time at `clocks` of `timing`."""
        verdict = self.check()
        row = {"operator": self.operator, "sparsity": round(1 - self.keep_ratio, 4), "correct": verdict.ok,
               "error_over_dense": round(verdict.error / max(verdict.dense_error, 1e-9), 3), "skipped": self.skipped,
               "limit_ms": round(self.roofline_ms(*limits), 5)}  # fmt: skip
        if not verdict.ok:
            return row | {"reason": verdict.reason}
        times, clock = measure_at(clocks, {"ours": self.variant()} | self.dense())
        ours = times.pop("ours")
        backend = min(times, key=times.__getitem__)
        times_of = {f"{name}_ms": round(time, 5) for name, time in times.items()}
        row |= times_of | {"backend": backend, "dense_ms": round(times[backend], 5), "ours_ms": round(ours, 5)}
        return row | {"speedup": round(times[backend] / ours, 3), "clocks": clocks, "sm_mhz": clock}
