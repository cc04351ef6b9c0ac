"""The engine's weights: a routed model's tensors, fused where one product replaces several, shared instead of copied.

Q, K and V become one matrix, gate and up another; the stock modules keep views of them, so the routed model stays
usable and no weight lies in memory twice. Routers are folded: `decide` is its execute rows minus its skip rows, and
its bias holds the dial. Axes: D hidden, H query heads, K kv heads, F FFN channels, G groups, r router rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from wide import families
from wide.adapter import merge
from wide.families import Geometry
from wide.methods.provider import GateProvider
from wide.methods.wide import WideProvider
from wide.model import RoutedModel
from wide.routing import KINDS, Router

UNSUPPORTED_ROTARY = ("dynamic", "longrope")
"""Rotary scalings whose frequencies depend on the length of the text so far."""


@dataclass
class FoldedRouter:
    """Two small products of the residual stream: logits = decide(act(reduce(x))) + bias[position % P], float32.

    reduce [r, D], reduce_bias [r], decide [G, r]; `bias` [P, G] is the second bias and the dial (P = 1), or a row per
    position when a benchmark forces masks. `split` [D, 3r] is `reduce` as a sum of three bfloat16 parts, exact to
    float32, so that bfloat16 tensor cores compute the float32 product.
    """

    reduce: Tensor
    reduce_bias: Tensor
    decide: Tensor
    bias: Tensor
    norm: bool
    silu: bool
    split: Tensor | None


@dataclass
class Routed:
    """The routing of one sublayer. `router` is None when the provider itself is asked (`gates.gate`)."""

    layer: int
    kind: str
    num_groups: int
    group_width: int
    gates: GateProvider
    router: FoldedRouter | None
    vectors: Tensor | None
    """[G, D] added for every skipped group."""
    room: int
    """Further input columns that the output projection is stored with, 0 without vectors."""
    extended: Tensor | None
    """[D, width + P], P <= room: the output projection with the vectors as further input columns, zeros up to P."""


@dataclass
class Layer:
    """One decoder layer; `qkv` is [(H + 2K) * head size, D], `gate_up` is [2F, D]. `window` None sees all keys."""

    attn_norm: Tensor
    ffn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    gate_up: Tensor
    down: Tensor
    window: int | None
    attention: Routed
    ffn: Routed


@dataclass
class Weights:
    geometry: Geometry
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor
    eps: float
    rotary: nn.Module
    """The stock rotary module: gives cos and sin of any position, scaling included."""

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


def take_weights(routed: RoutedModel) -> Weights:
    """Weights of a routed model, LoRA merged. The stock modules then hold views of the fused matrices.

    Raises:
        ValueError: what the engine would compute wrongly: odd rotary scaling, another activation, biases it ignores.
    """
    if routed.model is not routed.base:
        routed = merge(routed)
    config, layout = routed.base.config, routed.layout
    check_supported(config)
    check_method(routed.gates)
    routed.gates.step.noise = None
    windows = attention_windows(config)
    decoder = families.get_path(routed.base, layout.decoder)
    return Weights(
        geometry=routed.geometry,
        embedding=families.get_weight(routed.base.get_input_embeddings(), "").data,
        layers=[
            _layer({name: families.get_path(layer, getattr(layout, name)) for name in _PARTS}, window, routed, index)
            for index, (layer, window) in enumerate(zip(routed.decoder_layers(), windows, strict=True))
        ],
        norm=families.get_weight(decoder, "norm").data,
        head=families.get_weight(routed.base.get_output_embeddings(), "").data,
        eps=config.rms_norm_eps,
        rotary=families.get_path(decoder, "rotary_emb"),
    )


_PARTS = ("attn_norm", "ffn_norm", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check_supported(config: PretrainedConfig) -> None:
    """ValueError for what the engine would compute wrongly."""
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in UNSUPPORTED_ROTARY:
        raise ValueError(f"rope_type={rope_type!r} depends on the length of the text; the engine does not do it")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act={config.hidden_act!r}; the engine does silu only")


def check_method(gates: GateProvider) -> None:
    """ValueError for a method whose decisions need another forward than `norm, decide, compute`."""
    problem = None
    if gates.kv == "evicted":
        problem = "evicts keys and values"
    elif any(read != "residual" for read in gates.reads.values()):
        problem = "decides on activations inside the sublayer"
    elif type(gates).factors is not GateProvider.factors:
        problem = "scales activations"
    if problem:
        raise ValueError(f"{type(gates).__name__} {problem}, which the engine does not do; use the reference path")


def attention_windows(config: PretrainedConfig) -> list[int | None]:
    """Keys each layer sees, None for all: `layer_types` where the family has them, else one window for every layer."""
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def _layer(part: dict[str, Any], window: int | None, routed: RoutedModel, index: int) -> Layer:
    biased = [name for name in ("o_proj", "gate_proj", "up_proj", "down_proj") if part[name].bias is not None]
    if biased:
        raise ValueError(f"{', '.join(biased)} have biases; the engine does biases on q_proj, k_proj and v_proj only")
    attention = part["q_proj"], part["k_proj"], part["v_proj"]
    layer = families.get_path(routed.base, f"{routed.layout.layers}.{index}")
    norms = dict(layer.named_parameters())
    rooms = {
        kind: _make_room(part[name].weight, routed.gates, index, kind)
        for kind, name in (("attention", "o_proj"), ("ffn", "down_proj"))
    }
    return Layer(
        attn_norm=part["attn_norm"].weight.data,
        ffn_norm=part["ffn_norm"].weight.data,
        qkv=_fuse([linear.weight for linear in attention]),
        qkv_bias=_fuse([linear.bias for linear in attention]) if attention[0].bias is not None else None,
        q_norm=_data(norms.get("self_attn.q_norm.weight")),
        k_norm=_data(norms.get("self_attn.k_norm.weight")),
        o=part["o_proj"].weight.data,
        gate_up=_fuse([part["gate_proj"].weight, part["up_proj"].weight]),
        down=part["down_proj"].weight.data,
        window=window,
        attention=routing_of(routed.gates, index, "attention", part["o_proj"].weight.data, rooms["attention"]),
        ffn=routing_of(routed.gates, index, "ffn", part["down_proj"].weight.data, rooms["ffn"]),
    )


def _data(parameter: nn.Parameter | None) -> Tensor | None:
    return None if parameter is None else parameter.data


def _fuse(parameters: list[nn.Parameter]) -> Tensor:
    """The parameters stacked along their rows; each becomes a view of its rows."""
    fused = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(parameters, fused.split([len(p) for p in parameters]), strict=True):
        parameter.data = rows
    return fused


def _make_room(parameter: nn.Parameter, gates: GateProvider, layer: int, kind: str) -> int:
    """Store an output projection with columns for the vectors, if any; the parameter becomes a view. Returns how many.

    Then a dense product with [activations, skipped groups] adds the vectors without a pass over its output.
    """
    if gates.compensation(layer, kind) is None and gates.substitute(layer, kind) is None:
        return 0
    weight, room = parameter.data, num_columns(parameter.data, gates.num_groups[kind])
    parameter.data = torch.cat([weight, weight.new_zeros(len(weight), room)], 1)[:, : weight.shape[1]]
    return room


def num_columns(out: Tensor, num_groups: int) -> int:
    """Columns behind an output projection [D, width] that hold `num_groups` and end rows at a multiple of 128 bytes."""
    line = 128 // out.element_size()
    return -(-(out.shape[1] + num_groups) // line) * line - out.shape[1]


def routing_of(gates: GateProvider, layer: int, kind: str, out: Tensor, room: int) -> Routed:
    """One sublayer's routing under `gates`; `out` [D, width] is its output projection, whose dtype is the model's.

    `room` columns are stored behind its rows, and the vectors are written there if they fit. Values that stand in for
    skipped activations become what the projection makes of them, a vector for each group.
    """
    vectors, values = gates.compensation(layer, kind), gates.substitute(layer, kind)
    if values is not None:
        assert vectors is None, "a method has vectors or substitutes"
        blocks = (out.float() * values.float()).unflatten(1, (gates.num_groups[kind], -1))
        vectors = blocks.sum(-1).T.contiguous()
    vectors = None if vectors is None else vectors.detach().to(out.dtype)
    return Routed(
        layer=layer,
        kind=kind,
        num_groups=gates.num_groups[kind],
        group_width=gates.group_width(kind),
        gates=gates,
        router=fold_router(gates, layer, kind, out.dtype) if isinstance(gates, WideProvider) else None,
        vectors=vectors,
        room=room,
        extended=None if vectors is None else _extend(out, room, vectors),
    )


def _extend(out: Tensor, room: int, vectors: Tensor) -> Tensor | None:
    """[D, width + P] over the storage of `out`, the vectors [G, D] in its columns; None where they do not fit."""
    width, num_groups = out.shape[1], len(vectors)
    columns = num_columns(out, num_groups)
    if columns > room:
        return None
    extended = out.as_strided((len(out), width + columns), out.stride())
    extended[:, width : width + num_groups] = vectors.T
    extended[:, width + num_groups :] = 0
    return extended


def fold_router(gates: WideProvider, layer: int, kind: str, dtype: torch.dtype) -> FoldedRouter:
    """Float32 weights of one router with the dial in its bias; `dtype` is the residual stream's."""
    router = gates.routers[kind][layer]
    assert isinstance(router, Router)
    reduce, decide = router.reduce, router.decide
    bias = decide.bias.data[0::2] - decide.bias.data[1::2] + gates.dial[layer, KINDS.index(kind)]
    return FoldedRouter(
        reduce=reduce.weight.data,
        reduce_bias=reduce.bias.data,
        decide=(decide.weight.data[0::2] - decide.weight.data[1::2]).contiguous(),
        bias=bias[None].contiguous(),
        norm=router.norm,
        silu=isinstance(router.act, nn.SiLU),
        split=split_bfloat16(reduce.weight.data) if dtype == torch.bfloat16 and reduce.weight.is_cuda else None,
    )


def split_bfloat16(weight: Tensor) -> Tensor:
    """[r, D] float32 -> [D, 3r] bfloat16, three parts that add up to the weight to 24 bits."""
    parts, rest = [], weight
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.cat(parts).T.contiguous()
