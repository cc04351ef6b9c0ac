"""Models of published sizes with random weights, and forced random masks: what a benchmark without weights runs.

Everything is built on the device from the sizes alone: no download, no disk. Forced masks go through the routers'
last bias, so the routing costs what it always costs. Used by the latency benchmark and by the engine's check.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from wide import families
from wide.engine.weights import Routed, Weights, routing_of
from wide.families import Geometry
from wide.methods.provider import GateProvider
from wide.methods.wide import Config as WideConfig
from wide.methods.wide import build
from wide.model import RoutedModel

LLAMA3_ROTARY = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SIZES = {
    "llama8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_parameters": LLAMA3_ROTARY, "tie_word_embeddings": False,
    },
    "qwen3_14b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}  # fmt: skip
"""Sizes of models whose weights may not be at hand, as their cards state them."""


def published_config(name: str) -> PretrainedConfig:
    """HF config of a model of `SIZES`."""
    sizes: dict[str, Any] = dict(SIZES[name])
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


def random_model(config: PretrainedConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """The stock model with random weights, made on `device`, frozen."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def random_routed(model: PreTrainedModel, method: WideConfig, seed: int = 0) -> RoutedModel:
    """Fresh routers on a stock model; compensation vectors, where the method has them, random and small."""
    geometry = Geometry.from_hf(model.config)
    families.check_groups(geometry, method.attn_group_size, method.ffn_group_size)
    gates = build(method, geometry, seed).to(model.device)
    for parameters in (gates.vectors or {}).values():
        for parameter in parameters:
            torch.nn.init.normal_(parameter, std=0.01)
    return RoutedModel(model, gates.requires_grad_(False), families.load(geometry.family)).eval()


def forced_keep(gates: GateProvider, sparsity: float, seed: int, period: int) -> dict[str, Tensor]:
    """Random keep decisions by position, bool [L, period, G] of each kind: position p takes row p % period."""
    device = gates.dial.device
    generator = torch.Generator(device).manual_seed(seed)
    shape = (gates.geometry.num_layers, period)
    return {
        kind: torch.rand(*shape, groups, device=device, generator=generator) >= sparsity
        for kind, groups in gates.num_groups.items()
    }


def with_forced_masks(weights: Weights, keep: dict[str, Tensor]) -> Weights:
    """The same weights, whose routers run as ever and are overruled by `keep`, bool [L, period, G]."""

    def force(routed: Routed) -> Routed:
        assert routed.router is not None, "only folded routers can be overruled"
        bias = torch.where(keep[routed.kind][routed.layer], 1e9, -1e9).contiguous()
        return replace(routed, router=replace(routed.router, bias=bias))

    layers = [replace(layer, attention=force(layer.attention), ffn=force(layer.ffn)) for layer in weights.layers]
    return replace(weights, layers=layers)


def with_gates(weights: Weights, gates: GateProvider) -> Weights:
    """The same stock weights under another provider; with vectors, `weights` itself may be used no more.

    Both would keep their vectors in the same columns behind the output projections.
    """
    layers = [
        replace(
            layer,
            attention=routing_of(gates, index, "attention", layer.o, layer.attention.room),
            ffn=routing_of(gates, index, "ffn", layer.down, layer.ffn.room),
        )
        for index, layer in enumerate(weights.layers)
    ]
    return replace(weights, layers=layers)
