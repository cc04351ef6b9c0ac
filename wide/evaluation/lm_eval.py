"""lm-evaluation-harness over a routed model: its model `wide`, registered on import (console script `wide-eval`).

All scoring is the harness's; with `dense` the results equal
those of its own `hf` model. Its batches are right-padded without a mask, so the sparsity is not counted there but
afterwards, by an unpadded pass over the tokens that were scored.
"""

import os
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from wide.base_model import load_tokenizer
from wide.checkpoint import from_pretrained, local_folder, read_config
from wide.config import to_dataclass
from wide.model import RoutedModel
from wide.options import ModelConfig
from wide.routing import KINDS, RoutingStats

NO_BARS = bool(os.environ.get("TQDM_DISABLE"))
"""The harness says so to each of its bars itself, so they do not ask the variable."""

ARGUMENTS = ("wide", "pretrained", "sparsity", "dense", "precision", "max_length")


@register_model("wide")
class WideLM(HFLM):
    """The harness's `hf` model around a routed one.

    Args:
        wide: checkpoint folder or hub id; or a live routed model, with `tokenizer`.
        pretrained: folder or hub id of the base, when it is not where the checkpoint says.
        sparsity: dial to this total sparsity; None keeps the trained setting.
        dense: bypass every gate.
        precision: "fp32", or "bf16" for bfloat16 autocast as in training.
        max_length: tokens of a window; None takes the checkpoint's model.max_length.
        batch_size: fixed; results move with it, so it is recorded and never probed for.
    """

    def __init__(
        self,
        wide: str | RoutedModel = "",
        tokenizer: PreTrainedTokenizerBase | None = None,
        pretrained: str = "",
        sparsity: float | None = None,
        dense: bool = False,
        precision: str = "fp32",
        max_length: int | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **unknown: object,
    ):
        if unknown:
            raise ValueError(f"{sorted(unknown)} in model_args; legal: {', '.join(ARGUMENTS)}")
        if not str(batch_size or 1).isdigit():
            raise ValueError(f"batch_size={batch_size!r}; legal: a number (probing for one is not reproducible)")
        if precision not in ("fp32", "bf16"):
            raise ValueError(f"precision={precision!r} in model_args; legal: fp32, bf16")
        if isinstance(wide, str):
            wide, tokenizer, max_length = _load(wide, pretrained, sparsity, device, max_length)
        assert isinstance(wide, RoutedModel)
        self.routed: RoutedModel = wide
        self.bypass = dense
        self.scored: list[tuple[list[int], int]] = []
        super().__init__(
            pretrained=wide.model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=int(batch_size or 1),
            max_length=max_length,
            mixed_precision_dtype="bfloat16" if precision == "bf16" else None,
        )

    def _mode(self):
        self.routed.gates.step.noise = None
        return self.routed.dense() if self.bypass else nullcontext()

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        with self._mode():
            return super()._model_call(inps, attn_mask, labels)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings) -> Tensor:
        with self._mode():
            return super()._model_generate(context, max_length, stop, **settings)

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm or NO_BARS)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, override_bs: int | None = None):
        for _, context, continuation in requests:
            self._note(context, continuation)
        return super()._loglikelihood_tokens(requests, disable_tqdm or NO_BARS, override_bs)

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        texts = super().generate_until(requests, disable_tqdm or NO_BARS)
        for request, text in zip(requests, texts, strict=True):
            if text:
                self._note(self.tok_encode(request.args[0]), self.tok_encode(text, add_special_tokens=False))
        return texts

    def _note(self, context: list[int], continuation: list[int]) -> None:
        """Keep a request as the harness cuts it: the inputs, and how many of their last positions are scored."""
        tokens = (context + continuation)[-(self.max_length + 1) :][:-1]
        self.scored.append((tokens, len(continuation)))

    @torch.no_grad()
    def scored_stats(self) -> RoutingStats | None:
        """What routing did at the scored positions of every request so far; None when nothing was routed.

        A position is scored when its logits predict a token of a continuation, or of a generated text, which is encoded
        again for it. Requests of one length share a forward, so there is no padding.
        """
        if self.bypass or not self.scored:
            return None
        total = None
        for length, group in groupby(sorted(self.scored, key=_length), key=_length):
            requests = list(group)
            for start in range(0, len(requests), self.batch_size):
                stats = self._stats(requests[start : start + self.batch_size], length)
                total = stats if total is None else total + stats
        return total

    def _stats(self, requests: list[tuple[list[int], int]], length: int) -> RoutingStats:
        tokens = torch.tensor([ids for ids, _ in requests], device=self.device)
        counts = torch.tensor([count for _, count in requests], device=self.device)
        dtype = self.mixed_precision_dtype
        with self._mode(), torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            self.routed.hidden_states(input_ids=tokens)
        counted = torch.arange(length, device=self.device) >= length - counts[:, None]  # [B, T]
        kept = {kind: self.routed.last_gates(kind)[:, counted].double().sum(1) for kind in KINDS}
        return RoutingStats(kept, counted.sum().double())


def _length(request: tuple[list[int], int]) -> int:
    return len(request[0])


def _load(folder: str, base: str, sparsity: float | None, device: str | None, max_length: int | None):
    """Routed model, tokenizer and window length of a checkpoint folder named on a command line."""
    if not folder:
        raise ValueError("model_args need wide=CHECKPOINT, a checkpoint folder or hub id")
    stored = {key: value for key, value in read_config(local_folder(folder))["base"].items() if key != "fingerprint"}
    model = to_dataclass(stored, ModelConfig, "base")
    if base:
        model = replace(model, path=base, source="local" if Path(base).exists() else "hub")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    routed = from_pretrained(folder, sparsity=sparsity, device=device, base=model)
    return routed, load_tokenizer(model), max_length or model.max_length
