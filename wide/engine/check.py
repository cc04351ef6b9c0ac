"""The correctness gate of a benchmark: a two-layer model of the real widths, engine against the reference path.

Masks are forced, so that a router's rounding cannot move them; the reference is the stock transformers model in
float32 with those masks. The engine passes when its error is within `FACTOR` times the error of the same reference
path in the engine's dtype: prefill long enough for the skipping operators, chunks, unequal prompts, decoding.
"""

import copy

import torch
from torch import Tensor
from transformers import PretrainedConfig

from wide.engine.generate import Engine
from wide.engine.synthetic import forced_keep, random_model, random_routed, with_forced_masks
from wide.engine.weights import take_weights
from wide.methods.wide import Config as WideConfig
from wide.model import RoutedModel

FACTOR = 2.0
PERIOD = 509
TAIL = 64


@torch.inference_mode()
def check_engine(
    config: PretrainedConfig, method: WideConfig, sparsity: float, device: torch.device, dtype: torch.dtype, length: int
) -> dict:
    """{"correct", "errors": {case: [engine's, reference's in dtype]}}: relative errors against float32.

    `length` tokens of prefill; the chunked case cuts them unevenly.
    """
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.vocab_size = 2, min(config.vocab_size, 8192)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    narrow = random_routed(random_model(config, device, dtype), method)
    wide = random_routed(random_model(config, device, torch.float32), method)
    wide.base.load_state_dict(narrow.base.state_dict())
    keep = forced_keep(narrow.gates, sparsity, seed=1, period=PERIOD)
    cases: dict[str, tuple[Tensor, Tensor | None, Tensor, float]] = {}
    for name, (ids, mask) in _texts(config.vocab_size, length, device).items():
        expected = reference_tail(wide, keep, ids, mask)
        cases[name] = (ids, mask, expected, relative_error(reference_tail(narrow, keep, ids, mask), expected))
    weights = with_forced_masks(take_weights(narrow), keep)
    engine = Engine(weights, expected_keep=1 - sparsity)
    chunked = Engine(weights, expected_keep=1 - sparsity, prefill_chunk=length * 2 // 3)
    errors = {}
    for name, (ids, mask, expected, own) in cases.items():
        errors[name] = [relative_error(_tail(engine.hidden_and_logits(ids, mask)[1]), expected), own]
        errors[f"{name}, decoded"] = [relative_error(decoded(engine, ids, mask, 4), expected[:, -4:]), own]
    ids, mask, expected, own = cases["prefill"]
    errors["prefill in chunks"] = [relative_error(_tail(chunked.hidden_and_logits(ids, mask)[1]), expected), own]
    floor = 1e-5 if dtype == torch.float32 else 0.0  # the two float32 paths differ in the order of sums alone
    return {"correct": all(mine <= FACTOR * own + floor for mine, own in errors.values()), "errors": errors}


def _texts(vocab: int, length: int, device: torch.device) -> dict[str, tuple[Tensor, Tensor | None]]:
    """One long text, and a pair of unequal ones."""
    generator = torch.Generator(device).manual_seed(2)
    long = torch.randint(vocab, (1, length), device=device, generator=generator)
    pair = torch.randint(vocab, (2, 2 * TAIL + 9), device=device, generator=generator)
    mask = torch.ones_like(pair)
    mask[0, :37] = 0
    return {"prefill": (long, None), "unequal prompts": (pair, mask)}


def _tail(logits: Tensor) -> Tensor:
    return logits[:, -TAIL:].float()


def reference_tail(routed: RoutedModel, keep: dict[str, Tensor], ids: Tensor, mask: Tensor | None) -> Tensor:
    """Logits [B, TAIL, V] float32 of the reference path whose gates are forced to `keep` by position."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    if mask is not None:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
    gates = {kind: rows[:, positions % rows.shape[1]].float() for kind, rows in keep.items()}
    with routed.forced(**gates):
        known = {} if mask is None else {"attention_mask": mask}
        hidden = routed.hidden_states(input_ids=ids, **known)[:, -TAIL:]
    return routed.base.get_output_embeddings()(hidden).float()


def decoded(engine: Engine, ids: Tensor, mask: Tensor | None, steps: int) -> Tensor:
    """Logits [B, steps, V] float32 of the last tokens, fed one by one after a prefill of the others."""
    start = None if mask is None else mask.argmax(1).int()
    cache = engine.reserve(*ids.shape)
    engine.prefill(ids[:, :-steps], start)
    return torch.stack([engine.step(ids[:, t], cache).float().clone() for t in range(-steps, 0)], dim=1)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expectation."""
    return float((found - expected).norm() / expected.norm())
