"""How this package measures: CUDA-graph replays over rotating buffers, variants interleaved, medians.

Each variant is captured once for every buffer set; the sets together are several times the L2 cache, so every call
finds its weights and activations in memory, as in a model. A replay's time over the number of sets is one sample.
"short" clocks: single replays with the device idle in between, so a card at rest keeps its highest clock. "sustained":
the device is kept busy first and never idles, so a card at its power limit has lowered its clock, as in a long run.
"""

import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import triton

COLD_BYTES = 400 * 2**20
CLOCKS = ("short", "sustained")
WARM_MS, BLOCK_MS, NUM_BLOCKS = 300.0, 10.0, 12
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


def measure_at(clocks: str, variants: dict[str, Variant]) -> tuple[dict[str, float], int | None]:
    """`measure` or `measure_sustained`, and the SM clock in MHz: during it, or right after it for "short" clocks."""
    if clocks == "sustained":
        return measure_sustained(variants)
    times = measure(variants)
    return times, sm_clock()


def measure_sustained(variants: dict[str, Variant]) -> tuple[dict[str, float], int | None]:
    """Median milliseconds of one call of each variant on a busy device, and the median SM clock in MHz meanwhile.

    Blocks of about BLOCK_MS of each variant alternate without a wait of the host in between, the first WARM_MS of
    them untimed, so that all variants meet the same power state.
    """
    graphs = {name: _capture(calls) for name, calls in variants.items()}
    repeats = {name: max(1, round(BLOCK_MS / max(_replay(graph), 1e-3))) for name, graph in graphs.items()}
    num_warm = math.ceil(WARM_MS / (BLOCK_MS * len(graphs)))
    blocks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    order = list(graphs)
    for index in range(num_warm + NUM_BLOCKS):
        for name in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(repeats[name]):
                graphs[name].replay()
            end.record()
            if index >= num_warm:
                blocks[name].append((start, end))
        order.reverse()
    timed = [events for pairs in blocks.values() for events in pairs]
    clocks = _clocks_until([start for start, _ in timed], [end for _, end in timed])
    times = {
        name: median(start.elapsed_time(end) for start, end in pairs) / (repeats[name] * len(variants[name]))
        for name, pairs in blocks.items()
    }
    return times, round(median(clocks)) if clocks else sm_clock()


def _clocks_until(starts: list[torch.cuda.Event], ends: list[torch.cuda.Event]) -> list[int]:
    """SM clocks while the device works between the first of `starts` and the last of `ends`, which it waits for."""
    clocks: list[int] = []
    while not all(end.query() for end in ends):
        if any(start.query() for start in starts) and (clock := sm_clock()) is not None:
            clocks.append(clock)
        time.sleep(0.002)
    return clocks


def sm_clock() -> int | None:
    """The current device's SM clock in MHz by NVML, else by nvidia-smi; None where neither answers."""
    try:
        return torch.cuda.clock_rate()
    except Exception:  # no bindings, no library, or a card that does not tell: each has its own class
        smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    device = f"GPU-{torch.cuda.get_device_properties().uuid}"
    query = [smi, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-i", device]
    answer = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return int(answer) if answer.isdigit() else None


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
