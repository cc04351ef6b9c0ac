"""The hooks of one decoder layer: decide, mask, compensate, evict.

Hooks find what they need on the module they hang on, never in their own closures, and what one layer needs is under the
same name in all of them. So one compiled graph serves every layer (`wide.compiled`), as torch.compile guards on
modules but not on their hooks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wide import eviction, families
from wide.families import Layout
from wide.methods.provider import GateProvider

STATE = "wide_layer"
"""Attribute of a hooked module: its layer's `LayerState`. A plain attribute: state-dict keys stay the stock ones."""


@dataclass
class Pass:
    """What holds for all layers in the forward in progress. `valid` [B, T]: which tokens are real (None: all).

    `before` and `after` are called around every forward, outside of compiled code.
    """

    valid: Tensor | None = None
    routing: bool = True
    forced: dict[str, Tensor] | None = None
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None


@dataclass
class LayerState:
    """One layer's share: who decides, under which index, and the gates of the last forward [B, T, G] by kind."""

    shared: Pass
    place: int
    gates: GateProvider
    index: int
    activation: nn.Module
    keep: dict[str, Tensor] = field(default_factory=dict)

    def decide(self, kind: str, hidden: Tensor) -> None:
        if not self.shared.routing:
            return
        valid = self.shared.valid
        if self.shared.forced is not None:
            self.keep[kind] = self.shared.forced[kind][self.place][:, -hidden.shape[1] :].float()
            return
        if valid is not None:  # padding may hold NaN, and 0 * NaN would reach the router's gradient
            hidden = torch.where(valid[..., None], hidden, 0.0)
        self.keep[kind] = self.gates.gate(self.index, kind, hidden)

    def mask(self, kind: str, inputs: Tensor) -> Tensor:
        """The projection's input with skipped groups closed, or with what stands in for them."""
        keep, width = self.keep[kind], self.gates.group_width(kind)
        blocks = inputs.unflatten(-1, (keep.shape[-1], width))  # [B, T, G, width]
        blocks = blocks * self.gates.factors(self.index, kind, keep).to(blocks.dtype)[..., None]
        substitute = self.gates.substitute(self.index, kind)
        if substitute is not None:
            values = substitute.to(blocks.dtype).unflatten(-1, (keep.shape[-1], width))
            blocks = blocks + (1 - keep).to(blocks.dtype)[..., None] * values
        return blocks.flatten(-2)

    def compensate(self, kind: str, output: Tensor) -> Tensor | None:
        vectors = self.gates.compensation(self.index, kind)
        if vectors is None:
            return None
        share = self.gates.stands_in(self.keep[kind])  # [B, T, G]
        return output + (share.to(output.dtype) @ vectors.to(output.dtype))


def hang(layer: nn.Module, layout: Layout, state: LayerState) -> list[RemovableHandle]:
    """Hang a layer's hooks on the outermost projection modules; `release` takes the state off again."""
    handles = []
    for kind, norm, out in (
        ("attention", layout.attn_norm, layout.o_proj),
        ("ffn", layout.ffn_norm, layout.down_proj),
    ):
        out_module = families.get_path(layer, out)
        reads = state.gates.reads[kind]
        if reads == "residual":
            module = families.get_path(layer, norm)
            handles.append(module.register_forward_pre_hook(_DECIDE[kind]))
        elif reads == "product":
            module = out_module
            handles.append(module.register_forward_pre_hook(_DECIDE[kind]))
        else:
            module = families.get_path(layer, layout.gate_proj)
            handles.append(module.register_forward_hook(_decide_from_gate))
        handles.append(out_module.register_forward_pre_hook(_MASK[kind]))
        handles.append(out_module.register_forward_hook(_COMPENSATE[kind]))
        setattr(module, STATE, state)
        setattr(out_module, STATE, state)
    if state.gates.kv == "evicted":
        attention = families.get_path(layer, layout.o_proj.rpartition(".")[0])
        handles.append(attention.register_forward_pre_hook(_evict, with_kwargs=True))
        setattr(attention, STATE, state)
    return handles


def release(layer: nn.Module) -> None:
    for module in layer.modules():
        module.__dict__.pop(STATE, None)


def _decide_attention(module: nn.Module, args: tuple) -> None:
    getattr(module, STATE).decide("attention", args[0])


def _decide_ffn(module: nn.Module, args: tuple) -> None:
    getattr(module, STATE).decide("ffn", args[0])


def _decide_from_gate(module: nn.Module, args: tuple, output: Tensor) -> None:
    state = getattr(module, STATE)
    state.decide("ffn", state.activation(output))


def _mask_attention(module: nn.Module, args: tuple) -> tuple | None:
    state = getattr(module, STATE)
    return (state.mask("attention", args[0]), *args[1:]) if state.shared.routing else None


def _mask_ffn(module: nn.Module, args: tuple) -> tuple | None:
    state = getattr(module, STATE)
    return (state.mask("ffn", args[0]), *args[1:]) if state.shared.routing else None


def _compensate_attention(module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
    state = getattr(module, STATE)
    return state.compensate("attention", output) if state.shared.routing else None


def _compensate_ffn(module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
    state = getattr(module, STATE)
    return state.compensate("ffn", output) if state.shared.routing else None


def _evict(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    state = getattr(module, STATE)
    if not state.shared.routing:
        return None
    kept = state.keep["attention"].amax(-1) > 0  # [B, T]
    kwargs["attention_mask"] = eviction.without_evicted(kwargs["attention_mask"], kept, kwargs, state.index)
    return args, kwargs


_DECIDE = {"attention": _decide_attention, "ffn": _decide_ffn}
_MASK = {"attention": _mask_attention, "ffn": _mask_ffn}
_COMPENSATE = {"attention": _compensate_attention, "ffn": _compensate_ffn}
