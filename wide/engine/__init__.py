"""The engine: a small decoder of our own over a routed model's weights, that really skips what the routers skip.

`weights.py` takes a routed model apart, `cache.py` is the static cache, `model.py` the forward, `generate.py` the
rest: `load(folder).generate(input_ids)`. Only this package imports `wide_kernels`.
"""

from pathlib import Path

import torch

from wide.checkpoint import from_pretrained, local_folder, read_config
from wide.engine.generate import Engine
from wide.engine.weights import take_weights
from wide.model import RoutedModel
from wide.options import ModelConfig

__all__ = ["Engine", "from_routed", "load"]


def load(
    folder: str | Path,
    sparsity: float | None = None,
    *,
    device: str | torch.device | None = None,
    base: ModelConfig | None = None,
    **options: object,
) -> Engine:
    """The engine of a checkpoint folder or hub id, LoRA merged; on the GPU when there is one.

    Args:
        sparsity: dial to this total sparsity (needs a stored curve); None keeps the trained setting.
        base: where the base weights are, when not where the checkpoint says.
        options: `max_length`, `stop_tokens`, `prefill_chunk`, `routing` and the others of `Engine`.

    Raises:
        ValueError: what `wide.checkpoint.from_pretrained` refuses, or a model that the engine cannot run.
    """
    folder = local_folder(folder)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    routed = from_pretrained(folder, sparsity=sparsity, device=device, base=base)
    asked = read_config(folder)["method"]["sparsity"] if sparsity is None else sparsity
    return from_routed(routed, **{"expected_keep": 1 - asked} | options)


def from_routed(routed: RoutedModel, **options: object) -> Engine:
    """The engine over a routed model's own weights; they are shared, and LoRA is merged into them."""
    weights = take_weights(routed)
    ends = routed.base.generation_config.eos_token_id
    ends = routed.base.config.eos_token_id if ends is None else ends
    ends = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
    pad = routed.base.generation_config.pad_token_id
    defaults = {"stop_tokens": ends, "pad_token": (ends or (0,))[0] if pad is None else pad}
    return Engine(weights, **defaults | options)
