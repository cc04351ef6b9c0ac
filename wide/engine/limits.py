"""The least time a card needs for a forward: its measured copy and matrix rates against the bytes and products."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from wide.model import RoutedModel


@dataclass(frozen=True)
class Limits:
    """Bytes and multiply-add FLOPs per second, measured; None where nothing was (a CPU)."""

    bytes_per_second: float | None
    flops_per_second: float | None

    def milliseconds(self, routed: RoutedModel, phase: str, batch: int, length: int, sparsity: float) -> float | None:
        """The larger of what reading takes and what multiplying takes, when a share `sparsity` is skipped.

        At decoding a weight is read when any text of the batch runs its group, taken as independent.
        """
        if self.bytes_per_second is None or self.flops_per_second is None:
            return None
        cost, g, kept = routed.cost(length), routed.geometry, 1 - sparsity
        tokens = batch * (length if phase == "prefill" else 1)
        read = 1 - sparsity ** min(tokens, 64)
        routers = 4 * cost.router if sparsity else 0
        weights = 2 * cost.num_layers * (read * (cost.attention + cost.ffn) + cost.other) + 2 * cost.head
        keys = 4 * g.num_layers * g.num_kv_heads * g.head_dim * length * batch * (kept if phase == "decode" else 1)
        seconds = (weights + keys + cost.num_layers * routers) / self.bytes_per_second
        core = cost.core if phase == "prefill" else 2 * g.num_heads * g.head_dim * length
        products = cost.num_layers * (kept * (cost.attention + cost.ffn + core) + cost.other)
        flops = 2 * tokens * products + 2 * batch * cost.head
        return 1e3 * max(seconds, flops / self.flops_per_second)


def measure_limits(device: torch.device) -> Limits:
    """A copy of 4 GB and a bfloat16 product of 8192 cubed, the fastest of several each."""
    if device.type != "cuda":
        return Limits(None, None)
    source, target = (torch.zeros(2**31, dtype=torch.bfloat16, device=device) for _ in range(2))
    copy = _fastest(lambda: target.copy_(source))
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = _fastest(lambda: left @ right)
    return Limits(2 * 2**32 / copy, 2 * 8192**3 / product)


def _fastest(call: Callable[[], object]) -> float:
    """Seconds."""
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times[2:])
