"""Where the time of a forward goes: the kernels of one forward, in order, sorted into parts.

A forward has two norms a layer and one at the end, so the norms tell which sublayer a kernel belongs to, and its name
tells the rest. The gaps between kernels are "launch". Works on replayed graphs, whose kernels the profiler sees too.
"""

import re
from collections.abc import Callable, Iterable

import torch

PARTS = ("projections", "attention", "ffn", "routing", "norm", "head", "rest", "launch")
NORM = re.compile(r"add_norm_kernel|route_token_kernel")
ROUTING = re.compile(r"decide_kernel|layout|_groups_kernel|\b_sets_kernel|_active_kernel|partition_kernel")
ROTARY = re.compile(r"rotate_kernel")
ATTENTION = re.compile(r"prefill_kernel|split_kernel|merge_kernel|zero_kernel|flash|fmha|sdpa|attention", re.I)


def profile(forward: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of each part of one call on a CUDA device; `launch` is time in which no kernel ran."""
    forward()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        forward()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sort_kernels((e.name, e.time_range.start, e.time_range.end) for e in events)


def sort_kernels(kernels: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """(name, start, end) in microseconds -> milliseconds of each part."""
    kernels = sorted(kernels, key=lambda kernel: kernel[1])
    norms = sum(bool(NORM.search(name)) for name, _, _ in kernels)
    times = dict.fromkeys(PARTS, 0.0)
    seen, decided, last_end = 0, True, kernels[0][1] if kernels else 0.0
    for place, (name, start, end) in enumerate(kernels):
        if NORM.search(name):
            seen += 1
            decided = not _decides_next([n for n, _, _ in kernels[place + 1 :]])
        part = _part(name, seen, norms, decided)
        decided = decided or "decide_kernel" in name
        times[part] += max(end - max(start, last_end), 0.0) / 1e3
        times["launch"] += max(start - last_end, 0.0) / 1e3
        last_end = max(last_end, end)
    return times


def _decides_next(names: list[str]) -> bool:
    """Whether a router's decision comes before the next norm: then what lies between is the router's product."""
    for name in names:
        if NORM.search(name):
            return False
        if "decide_kernel" in name:
            return True
    return False


def _part(name: str, seen: int, norms: int, decided: bool) -> str:
    if "route_token_kernel" in name or ROUTING.search(name):
        return "routing"
    if NORM.search(name):
        return "norm"
    if not decided:
        return "routing"
    if seen == norms:
        return "head"
    if seen == 0 or ROTARY.search(name):
        return "rest"
    if seen % 2 == 0:
        return "ffn"
    return "attention" if ATTENTION.search(name) else "projections"
