"""Options of the group `bench`: what the latency and throughput benchmarks time."""

from dataclasses import dataclass, field

from wide.ranges import check_choice, check_range


@dataclass
class BenchConfig:
    """What the actions `latency` (first token, time per token, beside dense baselines) and `throughput` time."""

    name: str = "default"
    checkpoint: str = ""
    """Run folder or checkpoint folder whose learned masks are timed on held-out text; empty: random weights and masks
    at the model's real sizes."""
    prefill: list[int] = field(default_factory=lambda: [4096, 16384])
    """Prompt lengths whose first token is timed."""
    decode: list[int] = field(default_factory=lambda: [1024, 8192, 32768])
    """Context lengths at which the time per token is taken."""
    batch: list[int] = field(default_factory=lambda: [1])
    sparsity: list[float] = field(default_factory=lambda: [0.5])
    ffn_group_sizes: list[int] = field(default_factory=list)
    """FFN group widths under random masks; empty takes method.ffn_group_size."""
    baselines: list[str] = field(default_factory=lambda: ["transformers"])
    """Beside the engine with routing off: transformers, compiled, reference (the routed model that trains)."""
    new_tokens: int = 32
    """Tokens of one timing of the decoding."""
    repeats: int = 5
    """Timings of which the median is taken; of the action `throughput`, optimiser steps."""
    peak_tflops: float = 790.0
    """What the action `throughput` takes for the card's arithmetic limit: a bfloat16 product on an H200."""
    breakdown: bool = True
    """Also sort the kernels of one forward into parts (GPU only)."""
    check_tokens: int = 4200
    """Prompt length of the correctness gate."""

    def __post_init__(self) -> None:
        for key in ("prefill", "decode", "batch", "ffn_group_sizes"):
            for value in getattr(self, key):
                check_range("bench", key, value, 1)
        for value in self.sparsity:
            check_range("bench", "sparsity", value, 0, 1)
        for value in self.baselines:
            check_choice("bench", "baselines", value, ("transformers", "compiled", "reference"))
        check_range("bench", "new_tokens", self.new_tokens, 1)
        check_range("bench", "repeats", self.repeats, 1)
        check_range("bench", "peak_tflops", self.peak_tflops, 1)
        check_range("bench", "check_tokens", self.check_tokens, 100)
        if not self.prefill and not self.decode:
            raise ValueError("bench.prefill and bench.decode are both empty; give at least one length")
