"""Tiny models with LoRA on all seven projections, for the tests of stage 2 and of its checkpoint folder."""

import torch
from tiny import routed, stock

from wide import families
from wide.adapter import LoraRoutedModel, add_lora
from wide.families import Geometry
from wide.methods import load as load_method
from wide.model import RoutedModel
from wide.options import StageConfig

PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
METHODS = ("compensated", "wide", "dense")
NO_DROPOUT = {"name": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0}


def untrained(family: str, method: str, **options) -> RoutedModel:
    """A routed tiny model; vectors are random, so that compensation shows."""
    if method == "dense":
        geometry = Geometry.from_hf(stock(family).config)
        module = load_method("dense")
        return RoutedModel(stock(family), module.build(module.Config(), geometry), families.load(geometry.family))
    model = routed(family, compensation=method == "compensated", **options)
    generator = torch.Generator().manual_seed(1)
    for kind in model.gates.vectors or ():
        for vectors in model.gates.vectors[kind]:
            vectors.data = torch.randn(vectors.shape, generator=generator) * 0.3
    return model


def method_options(model: RoutedModel, **more) -> dict:
    """Options of method wide that fit the model's gates."""
    sizes = {"attn_group_size": model.gates.attn_group_size, "ffn_group_size": model.gates.ffn_group_size}
    return sizes | {"router_rank": 4, "init_gap": 0.0} | more


def randomise(model: RoutedModel) -> RoutedModel:
    """Non-zero B on all projections; returns the model."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def recovered(family: str, method: str, stage: dict | None = None, **options) -> LoraRoutedModel:
    return randomise(add_lora(untrained(family, method, **options), StageConfig(**NO_DROPOUT | (stage or {})), seed=3))
