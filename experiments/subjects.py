"""What the latency benchmark times, behind one interface: the engine, and transformers with its own generate.

`times(phase, texts, new_tokens, repeats)` gives milliseconds: of the first token ("prefill"), or of one further token
("decode"). Clocks start and stop with the device idle; every shape is warmed up before it is timed.
"""

import time
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from transformers import GenerationMixin

from wide.engine.generate import Engine
from wide.engine.parts import profile
from wide.model import RoutedModel


class Subject:
    """`labels` go into every row; `routed` gives sizes and costs."""

    def __init__(self, routed: RoutedModel, labels: dict):
        self.routed, self.labels = routed, labels
        self.device = next(routed.base.parameters()).device

    def times(self, phase: str, texts: Tensor, new_tokens: int, repeats: int) -> list[float]:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return getattr(self, phase)(texts, new_tokens, repeats)

    def prefill(self, texts: Tensor, new_tokens: int, repeats: int) -> list[float]:
        raise NotImplementedError

    def decode(self, texts: Tensor, new_tokens: int, repeats: int) -> list[float]:
        raise NotImplementedError

    def parts(self, phase: str, texts: Tensor) -> dict[str, float] | None:
        """Milliseconds by part, or None where nothing is known."""
        return None

    def memory_gb(self) -> float | None:
        """Peak of the last timing."""
        return torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else None

    def clock(self, call: Callable[[], object]) -> float:
        """Milliseconds of one call, the device idle before and after."""
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return (time.perf_counter() - start) * 1e3

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def release(self) -> None:
        """Give up what the subject holds beyond the shared weights."""


class EngineSubject(Subject):
    """The engine, routed or dense; prompts are prefilled for real before decoding is timed."""

    def __init__(self, engine: Engine, routed: RoutedModel, labels: dict):
        super().__init__(routed, labels)
        self.engine = engine

    @torch.inference_mode()
    def prefill(self, texts: Tensor, new_tokens: int, repeats: int) -> list[float]:
        self.engine.reserve(*texts.shape)
        first = lambda: self.engine.prefill(texts).argmax(-1)  # noqa: E731
        first()
        first()
        return [self.clock(first) for _ in range(repeats)]

    @torch.inference_mode()
    def decode(self, texts: Tensor, new_tokens: int, repeats: int) -> list[float]:
        cache = self.engine.reserve(texts.shape[0], texts.shape[1] + new_tokens * (repeats + 1))
        token = self.engine.prefill(texts).argmax(-1)

        def steps() -> None:
            current = token
            for _ in range(new_tokens):
                current = self.engine.step(current, cache).argmax(-1)

        steps()
        return [self.clock(steps) / new_tokens for _ in range(repeats)]

    @torch.inference_mode()
    def parts(self, phase: str, texts: Tensor) -> dict[str, float] | None:
        if self.device.type != "cuda":
            return None
        if phase == "prefill":
            return profile(lambda: self.engine.prefill(texts))
        cache, token = self.engine.cache, texts[:, -1]
        assert cache is not None
        self.engine.prefill(texts)
        return profile(lambda: self.engine.step(token, cache))

    def release(self) -> None:
        self.engine.close()


class TransformersSubject(Subject):
    """transformers' own generate: `transformers` eager over its best cache, `compiled` the same compiled by it,
    `reference` the routed model that trains, masks attached.
    """

    def __init__(self, routed: RoutedModel, name: str, sparsity: float):
        masks = {"masks": "learned"} if name == "reference" else {}
        super().__init__(routed, {"path": name, "sparsity": sparsity} | masks)
        routed.attach_masks() if name == "reference" else routed.detach_masks()
        self.compiled = name == "compiled"

    def generate(self, texts: Tensor, new_tokens: int, static: bool) -> Tensor:
        return cast(GenerationMixin, self.routed.base).generate(
            input_ids=texts,
            attention_mask=torch.ones_like(texts),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static" if static else None,
            disable_compile=not self.compiled,
        )

    def prefill(self, texts: Tensor, new_tokens: int, repeats: int) -> list[float]:
        """With the growing cache, whose causal attention needs no mask; the compiled path has the static one."""
        first = lambda: self.generate(texts, 1, self.compiled)  # noqa: E731
        first()
        return [self.clock(first) for _ in range(repeats)]

    def decode(self, texts: Tensor, new_tokens: int, repeats: int) -> list[float]:
        """The difference between many tokens and one, over their number."""
        static = self.device.type == "cuda"
        self.generate(texts, new_tokens + 1, static)
        many = [self.clock(lambda: self.generate(texts, new_tokens + 1, static)) for _ in range(repeats)]
        one = sorted(self.clock(lambda: self.generate(texts, 1, static)) for _ in range(repeats))[repeats // 2]
        return [(time_many - one) / new_tokens for time_many in many]

    def release(self) -> None:
        vars(self.routed.base)["_cache"] = None
        torch._dynamo.reset()
