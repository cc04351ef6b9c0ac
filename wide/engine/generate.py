"""The engine: prefill in chunks, decoding as one CUDA graph per batch size, generation and its checks.

`Engine.forward` gives logits, `generate` whole texts and `stream` one token a step. On a CPU the same code runs
without graphs. Texts of unequal length are left-padded, with a mask that says so.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wide.engine.cache import Cache
from wide.engine.model import Decoder
from wide.engine.sampling import Sampling
from wide.engine.weights import Weights

CAPACITY_STEP = 256


class Engine:
    """A decoder with its cache.

    Args:
        weights: from `take_weights`.
        expected_keep: share of groups expected to run, 0..1; chooses operators, never results.
        max_length: most tokens of a text, prompt and continuation; None takes the model's positions.
        stop_tokens: ids that end a text, unless a call names others. pad_token fills a row that has ended.
        prefill_chunk: most prompt tokens of one forward.
        routing: False runs every group: the dense model from the same code.
    """

    def __init__(
        self,
        weights: Weights,
        expected_keep: float = 0.5,
        max_length: int | None = None,
        stop_tokens: tuple[int, ...] = (),
        pad_token: int = 0,
        prefill_chunk: int = 16384,
        routing: bool = True,
    ):
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk} is out of range; legal: 1 or more")
        limit = weights.geometry.max_positions
        self.max_length = limit if max_length is None else max_length
        if not 1 <= self.max_length <= limit:
            raise ValueError(f"max_length={max_length} is out of range; legal: 1 to {limit}")
        self.decoder = Decoder(weights, expected_keep, routing)
        self.stop_tokens, self.pad_token, self.prefill_chunk = tuple(stop_tokens), pad_token, prefill_chunk
        self.cache: Cache | None = None
        self._graphs: dict[bool, StepGraph] = {}

    @property
    def device(self) -> torch.device:
        return self.decoder.weights.device

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of whole texts, input_ids [B, T] int64; those of padding mean nothing.

        `attention_mask` [B, T] has one run of ones a row, with padding on either side or on none.
        """
        return self.hidden_and_logits(input_ids, attention_mask)[1]

    __call__ = forward

    @torch.inference_mode()
    def hidden_and_logits(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens, start = self._texts(input_ids, attention_mask, new_tokens=0)
        cache = self.reserve(tokens.shape[0], tokens.shape[1])
        cache.reset(start)
        hidden = torch.cat([self.decoder.hidden(part, cache) for part in tokens.split(self.prefill_chunk, dim=1)], 1)
        return hidden, self.decoder.logits(hidden)

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Prompts and continuations [B, T + new], rows that end early filled with the pad token.

        The options and errors of `stream`; the input is left-padded, as for transformers.
        """
        steps = list(self.stream(input_ids, attention_mask, **options))
        return torch.cat([input_ids.to(self.device), *(step[:, None] for step in steps)], dim=1)

    def stream(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: tuple[int, ...] | None = None,
        seed: int | None = None,
    ) -> Iterator[Tensor]:
        """The next token of every row, [B] int64 each step, until all rows have stopped.

        Args:
            input_ids: [B, T] int64, left-padded.
            attention_mask: [B, T], 0 on the padding; None when there is none.
            temperature: 0 is greedy.
            stop_tokens: ids that end a row; None takes the engine's, () none: then no step waits for the device.
            seed: of the samples; None draws from torch's global generator.

        Raises:
            ValueError: at once, for prompts that do not fit the cache, masks with holes or options out of range.
        """
        sampling = Sampling(temperature, top_k, top_p)
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} is out of range; legal: 1 or more")
        tokens, start = self._texts(input_ids, attention_mask, max_new_tokens)
        if attention_mask is not None and not bool(attention_mask[:, -1].all()):
            raise ValueError("attention_mask ends in padding; generation needs left padding")
        stops = self.stop_tokens if stop_tokens is None else tuple(stop_tokens)
        generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        return self._stream(tokens, start, max_new_tokens, sampling, stops, generator)

    @torch.inference_mode()
    def _stream(self, tokens, start, max_new_tokens, sampling, stops, generator) -> Iterator[Tensor]:
        cache = self.reserve(tokens.shape[0], tokens.shape[1] + max_new_tokens)
        token = sampling.pick(self.prefill(tokens, start), generator)
        ends = torch.tensor(stops, dtype=torch.int64, device=self.device)
        running = torch.ones_like(token, dtype=torch.bool)
        for step in range(max_new_tokens):
            if stops:
                token = torch.where(running, token, self.pad_token)
                running &= ~torch.isin(token, ends)
            yield token
            if step + 1 == max_new_tokens or (stops and not bool(running.any())):
                return
            token = sampling.pick(self.step(token, cache), generator)

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, start: Tensor | None = None) -> Tensor:
        """Fill the reserved cache with prompts [B, T], chunk by chunk; logits [B, V] of what comes next."""
        assert self.cache is not None, "reserve first"
        self.cache.reset(start)
        for part in tokens.split(self.prefill_chunk, dim=1):
            hidden = self.decoder.hidden(part, self.cache)
        return self.decoder.logits(hidden[:, -1])

    @torch.inference_mode()
    def step(self, token: Tensor, cache: Cache) -> Tensor:
        """One more token a row, [B] -> logits [B, V]; on a GPU replays the graph of this cache."""
        if not token.is_cuda:
            return self.decoder.logits(self.decoder.hidden(token[:, None], cache)[:, -1])
        if cache.padded not in self._graphs:
            self._graphs[cache.padded] = StepGraph(self.decoder, cache)
        return self._graphs[cache.padded](token)

    def reserve(self, batch: int, length: int) -> Cache:
        """The cache for `batch` texts of up to `length` tokens: the present one where it fits, else a new one."""
        if self.cache is None or self.cache.batch != batch or self.cache.capacity < length:
            self._graphs.clear()
            self.cache = None  # freed before the next is allocated
            capacity = min(-(-length // CAPACITY_STEP) * CAPACITY_STEP, self.decoder.weights.geometry.max_positions)
            self.cache = Cache(self.decoder.weights, batch, capacity)
        return self.cache

    def close(self) -> None:
        """Give up the cache and its graphs; the next call makes new ones."""
        self._graphs.clear()
        self.cache = None

    def _texts(self, input_ids: Tensor, attention_mask: Tensor | None, new_tokens: int) -> tuple[Tensor, Tensor | None]:
        """Checked tokens on the device, and how much padding is in front of each row (None: nowhere)."""
        if input_ids.dim() != 2 or input_ids.numel() == 0 or input_ids.is_floating_point():
            raise ValueError(
                f"input_ids must be integers [B, T] with a token, got {input_ids.dtype} {list(input_ids.shape)}"
            )
        vocab = self.decoder.weights.geometry.vocab_size
        if not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocab:
            raise ValueError(
                f"input_ids hold {int(input_ids.min())} to {int(input_ids.max())}; legal: 0 to {vocab - 1}"
            )
        length = input_ids.shape[1] + new_tokens
        if length > self.max_length:
            raise ValueError(
                f"{input_ids.shape[1]} prompt tokens and {new_tokens} new ones exceed max_length={self.max_length}"
            )
        tokens = input_ids.to(self.device, torch.int64)
        if attention_mask is None:
            return tokens, None
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask {list(attention_mask.shape)} is not like input_ids {list(input_ids.shape)}"
            )
        real = attention_mask.bool()
        begins = real.int().diff(dim=1, prepend=real.new_zeros(len(real), 1).int()) == 1
        if not bool((begins.sum(1) == 1).all()):
            raise ValueError("attention_mask needs one run of ones in every row")
        start = begins.int().argmax(1)
        return tokens, start.to(self.device, torch.int32) if bool(start.any()) else None


class StepGraph:
    """One decoding step over one cache, captured: token [B] -> logits [B, V], the same buffers every time."""

    def __init__(self, decoder: Decoder, cache: Cache):
        self.cache = cache
        self.token = torch.zeros(cache.batch, dtype=torch.int64, device=cache.length.device)
        length, filled = cache.length.clone(), cache.filled
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and allocates workspaces outside of the capture
                self._run(decoder)
                self._rewind(length, filled)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._run(decoder)
        self._rewind(length, filled)

    def _run(self, decoder: Decoder) -> Tensor:
        return decoder.logits(decoder.hidden(self.token[:, None], self.cache)[:, -1])

    def _rewind(self, length: Tensor, filled: int) -> None:
        self.cache.length.copy_(length)
        self.cache.filled = filled

    def __call__(self, token: Tensor) -> Tensor:
        self.token.copy_(token)
        self.graph.replay()
        self.cache.filled += 1
        return self.logits
