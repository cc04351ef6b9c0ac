"""How this package measures: CUDA-graph replays over rotating buffers, variants interleaved, medians.

Each variant is captured once for every buffer set; the sets together are several times the L2 cache, so every call
finds its weights and activations in memory, as in a model. A replay's time over the number of sets is one sample.
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import triton

COLD_BYTES = 400 * 2**20
Variant = list[Callable[[], torch.Tensor]]


def num_buffer_sets(bytes_per_set: int) -> int:
    """Buffer sets needed so that together they exceed COLD_BYTES, 2..32."""
    return max(2, min(32, -(-COLD_BYTES // max(bytes_per_set, 1))))


def measure(variants: dict[str, Variant], num_replays: int = 11, budget_ms: float = 120.0) -> dict[str, float]:
    """Median milliseconds of one call of each variant; a variant is one closure per buffer set.

    Replays of the variants alternate, and so does their order, so that clocks and temperature move all of them
    alike. `budget_ms` lowers the number of replays (to no fewer than 5) for long calls.
    """
    graphs = {name: _capture(calls) for name, calls in variants.items()}
    once = sum(_replay(graph) for graph in graphs.values())
    rounds = max(5, min(num_replays, int(budget_ms / max(once, 1e-3))))
    samples: dict[str, list[float]] = {name: [] for name in variants}
    order = list(graphs)
    for _ in range(rounds):
        for name in order:
            samples[name].append(_replay(graphs[name]) / len(variants[name]))
        order.reverse()
    return {name: median(times) for name, times in samples.items()}


def _capture(calls: Variant) -> torch.cuda.CUDAGraph:
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_outputs = [call() for call in calls]  # kept until the end, so that no two calls share an output
    del graph_outputs
    _replay(graph)
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure_eager(call: Callable[[], torch.Tensor], num_calls: int = 5) -> float:
    """Median milliseconds of a call that synchronises with the host and cannot be captured (warm buffers)."""
    call()
    samples = []
    for _ in range(num_calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return median(samples)


def provenance(command: str) -> dict[str, str]:
    """Card, versions, command and revision of a row: WIDE_GIT_REVISION, for a copy without git, or the checkout's."""
    here = Path(__file__).parent
    revision = os.environ.get("WIDE_GIT_REVISION", "")
    if not revision:
        git = subprocess.run(["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        revision = git.stdout.strip() or "unknown"
    return {
        "card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cuda": str(torch.version.cuda), "revision": revision, "command": command,
        "method": "CUDA-graph replay, rotating buffers, interleaved, median",
    }  # fmt: skip
