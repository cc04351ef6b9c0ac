"""The engine's Triton path under the interpreter against the reference path; started by `test_engine_kernels` alone,
because the interpreter must be chosen before the kernels are first imported.
"""

import torch
from test_engine import batch, difference, model_of, reference

from wide.engine import from_routed
from wide.engine.synthetic import forced_keep, with_forced_masks
from wide.model import RoutedModel


def float32(family: str, options: dict) -> None:
    """Small operators, routing of one token, rotary embedding, attention: prompts cut in ways, unequal."""
    model, (ids, mask) = model_of(family, **options), batch("left", (4, 6))
    expected = reference(model, ids, mask)
    real = mask.bool()
    found = from_routed(model, prefill_chunk=4)(ids, mask)
    assert difference(found[real], expected[real]) < 1e-4, (family, "chunks of unequal prompts")
    found = from_routed(model, prefill_chunk=1)(ids[1:])
    assert difference(found, expected[1:]) < 1e-4, (family, "token by token")


def bfloat16(model: RoutedModel) -> None:
    """The operators that skip, in bfloat16, under forced masks: within twice the reference path's own error."""
    keep = forced_keep(model.gates, 0.5, seed=1, period=5)
    ids, _ = batch("left", (12,))
    gates = {kind: rows[:, torch.arange(12) % 5][:, None].float() for kind, rows in keep.items()}
    with model.forced(**gates):
        expected = reference(model, ids)
        model.base.to(torch.bfloat16)
        own = reference(model, ids).float()
    for chunk in (12, 1):
        engine = from_routed(model, prefill_chunk=chunk)
        engine.decoder.weights = with_forced_masks(engine.decoder.weights, keep)
        found = engine(ids).float()
        error, allowed = (float((x - expected).norm() / expected.norm()) for x in (found, own))
        assert error < 2 * allowed, (chunk, error, allowed)


if __name__ == "__main__":
    float32("qwen3", {"compensation": True, "router_norm": True, "router_activation": "silu"})
    float32("smol", {"router_norm": False})
    bfloat16(model_of("llama", compensation=True))
    print("equal")
