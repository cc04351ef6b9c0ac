"""One compiled decoder layer for all layers of a model: a graph is traced once, not once per layer.

Compiling the whole model takes minutes, as its graph is that of a layer times the number of layers. Stock layers differ
in nothing but their weights, which are inputs of a compiled graph; the provider's parts for one layer are made alike by
`one_layer`. Only training forwards are compiled (those with sampled gates); evaluation stays eager.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wide.methods.provider import GateProvider, GateStep
from wide.model import RoutedModel

_REFUSAL = (
    "trainer.compile=true needs a method whose parameters lie in dictionaries of lists with one entry per layer "
    "(`per_layer`, `parameters_per_layer`), not {}; legal: trainer.compile=false"
)


class CompiledLayers:
    """Runs the layers of `routed` through one `torch.compile`, each with a provider of its own, until `remove`."""

    def __init__(self, routed: RoutedModel):
        torch.compiler.reset()  # an earlier model's graphs may have had other hooks, which no guard looks at
        self.routed = routed
        run = torch.compile(_run_layer, dynamic=False)
        routed.shared.before, routed.shared.after = self.spread, self.gather
        for state, layer in zip(routed.layers, routed.decoder_layers(), strict=True):
            state.gates, state.index = one_layer(routed.gates, state.place), 0
            layer.forward = self._forward(layer, run)

    def remove(self) -> None:
        """The layers as they were."""
        self.routed.shared.before = self.routed.shared.after = None
        for state, layer in zip(self.routed.layers, self.routed.decoder_layers(), strict=True):
            state.gates, state.index = self.routed.gates, state.place
            del layer.forward

    def _forward(self, layer: nn.Module, run: Callable) -> Callable:
        gates = self.routed.gates

        def forward(*args: Any, **kwargs: Any) -> Any:
            chosen = _run_layer if gates.step.noise is None else run
            return chosen(layer, *args, **kwargs)

        return forward

    def spread(self) -> None:
        """Hand each layer its part of the step's settings, before a forward."""
        step = self.routed.gates.step
        noise = step.noise and {kind: values.contiguous() for kind, values in step.noise.items()}
        for state in self.routed.layers:
            own = noise and {kind: values[state.place, None] for kind, values in noise.items()}
            state.gates.step = GateStep(own, step.tau, step.positions, step.valid)

    def gather(self) -> None:
        """Bring what the layers' gates remembered to the provider, after a forward."""
        gates = self.routed.gates
        for name in gates.remembers:
            for state in self.routed.layers:
                found = getattr(state.gates, name) or {}
                for key, value in found.items():
                    place = (key[0], state.place) if isinstance(key, tuple) else state.place
                    getattr(gates, name)[place] = value
                found.clear()  # a dictionary that is empty in one step and not in the next would be compiled for anew


def _run_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def one_layer(gates: GateProvider, index: int) -> GateProvider:
    """A provider that answers for layer `index` under index 0, on the same parameters and buffers.

    Holds for providers that keep what belongs to a layer as the framework's own do: lists with one entry per layer in
    module dictionaries (`per_layer`, `parameters_per_layer`), buffers [L, ...], and the dictionaries in `remembers`.
    """
    num_layers = gates.geometry.num_layers
    if any(True for _ in gates.parameters(recurse=False)):
        raise ValueError(_REFUSAL.format("Parameter"))
    view = copy.copy(gates)
    view._modules = {name: _one_of(module, num_layers, index) for name, module in gates._modules.items()}
    view._buffers = {
        name: buffer[index, None] if buffer is not None and buffer.dim() and len(buffer) == num_layers else buffer
        for name, buffer in gates._buffers.items()
    }
    for name in gates.remembers:
        setattr(view, name, None if getattr(gates, name) is None else {})
    return view


def _one_of(module: nn.Module | None, num_layers: int, index: int) -> nn.Module | None:
    if module is None:
        return None
    children = module.items() if isinstance(module, nn.ModuleDict) else [("", module)]
    part = nn.ModuleDict()
    for name, child in children:
        if not name or not isinstance(child, nn.ModuleList | nn.ParameterList) or len(child) != num_layers:
            raise ValueError(_REFUSAL.format(type(child).__name__))
        part[name] = type(child)([child[index]])
    return part
