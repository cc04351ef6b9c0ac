"""Tiny random models of every family and hand-made masks, shared by the tests."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from wide import families
from wide.base_model import load_tiny, tiny_config
from wide.families import Geometry
from wide.methods import load as load_method
from wide.model import RoutedModel

FAMILIES = (*families.names(), "smol")


def routed(family: str, attn: str = "sdpa", seed: int = 0, **options) -> RoutedModel:
    """A tiny routed model; by default one KV head's queries per group, 32 channels per group, half on."""
    geometry = Geometry.from_hf(tiny_config(family))
    defaults = {
        "attn_group_size": geometry.heads_per_kv,
        "ffn_group_size": 32,
        "router_rank": 4,
        "init_gap": 0.0,
        "compensation": False,
    }
    method = load_method("wide")
    gates = method.build(method.Config(**defaults | options), geometry, seed)
    return RoutedModel(stock(family, attn), gates, families.load(geometry.family))


def stock(family: str, attn: str = "sdpa") -> PreTrainedModel:
    """The dense model that a routed one must agree with."""
    return load_tiny(family, attn_implementation=attn).requires_grad_(False)


def pattern(model: RoutedModel, batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Random gates [L, B, T, G] of both kinds."""
    generator = torch.Generator().manual_seed(seed)
    shape = (model.geometry.num_layers, batch, length)
    return {
        kind: (torch.rand((*shape, groups), generator=generator) < 0.5).float()
        for kind, groups in model.gates.num_groups.items()
    }


def zeroed(model: PreTrainedModel, gates: dict[str, Tensor], geometry: Geometry) -> PreTrainedModel:
    """The stock model with those heads and channels zeroed by independent hooks, column by column."""

    def zero(columns: Tensor):  # [B, T, width of the projection's input]
        def hook(module, args):
            return (args[0] * columns[:, -args[0].shape[1] :].to(args[0].dtype),)

        return hook

    for index, layer in enumerate(model.model.layers):
        heads = gates["attention"][index]
        channels = gates["ffn"][index]
        head_columns = heads.repeat_interleave(geometry.num_heads * geometry.head_dim // heads.shape[-1], dim=-1)
        channel_columns = channels.repeat_interleave(geometry.ffn_size // channels.shape[-1], dim=-1)
        layer.self_attn.o_proj.register_forward_pre_hook(zero(head_columns))
        layer.mlp.down_proj.register_forward_pre_hook(zero(channel_columns))
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 199, (batch, length), generator=generator)
