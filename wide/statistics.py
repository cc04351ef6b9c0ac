"""What the dense model does on calibration text: moments of what o_proj and down_proj read, per layer and channel.

Used by methods before any training. `routed` is a `wide.model.RoutedModel`; this file lies below it in the imports.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wide import families
from wide.routing import KINDS

if TYPE_CHECKING:
    from wide.model import RoutedModel


@torch.no_grad()
def mean_inputs(routed: "RoutedModel", batches: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Mean input of every o_proj ("attention") and down_proj ("ffn") over the real tokens: [L, width] float64."""
    sums: dict[tuple[str, int], Tensor] = {}
    count = 0

    def add(valid: Tensor, kind: str, layer: int, inputs: Tensor) -> None:
        total = inputs[valid].double().sum(0)
        sums[kind, layer] = sums[kind, layer] + total if (kind, layer) in sums else total

    for batch in batches:
        valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        with watch_inputs(routed, partial(add, valid)), routed.dense():
            routed.hidden_states(**batch)
        count += int(valid.sum())
    layers = range(routed.geometry.num_layers)
    return {kind: torch.stack([sums[kind, layer] for layer in layers]) / count for kind in KINDS}


@contextmanager
def watch_inputs(routed: "RoutedModel", see: Callable[[str, int, Tensor], None]) -> Iterator[None]:
    """Call `see(kind, layer, inputs)` with what each o_proj and down_proj reads [B, T, width]."""
    paths = dict(zip(KINDS, (routed.layout.o_proj, routed.layout.down_proj), strict=True))
    handles = [
        families.get_path(layer, path).register_forward_pre_hook(
            lambda module, args, kind=kind, index=index: see(kind, index, args[0])
        )
        for index, layer in enumerate(routed.decoder_layers())
        for kind, path in paths.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def mean_outputs(routed: "RoutedModel", batches: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What each group adds to the residual stream on average: {kind: [L, G, D]} float32.

    A group's output is linear in its slice of the input, so its mean is the mean slice through the weight's columns.
    """
    paths = dict(zip(KINDS, (routed.layout.o_proj, routed.layout.down_proj), strict=True))
    outputs = {}
    for kind, means in mean_inputs(routed, batches).items():
        rows = []
        for mean, layer in zip(means, routed.decoder_layers(), strict=True):
            weight = families.get_weight(layer, paths[kind])  # [D, width]
            groups = routed.gates.num_groups[kind]
            slices = weight.double().unflatten(1, (groups, -1))  # [D, G, width / G]
            rows.append(torch.einsum("dgw,gw->gd", slices, mean.unflatten(0, (groups, -1))))
        outputs[kind] = torch.stack(rows).float()
    return outputs
