"""A static method's result as a plain, smaller transformers checkpoint: `from_pretrained` loads it, no code of ours.

Removed layers, KV heads with all their query heads, and channels are cut out; strengths (DDP) go into the weights, the
means that stand in for removed inputs (FLAP) into biases. Stock configs know one width for all layers, so a layer that
keeps fewer heads or channels than the widest one is padded with zero weights: exact, but no smaller there. Whole layers
(ShortGPT, Shortened LLaMA, SLEB) and equal shares of every layer (spread=layer) need no padding; one threshold over the
model (DDP, FLAP) and single sublayers (BlockPruner) do.

    python -m wide.export CHECKPOINT FOLDER
"""

import copy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from wide import families
from wide.adapter import merge
from wide.checkpoint import from_pretrained
from wide.families import Geometry
from wide.model import RoutedModel
from wide.routing import KINDS


@dataclass
class Shape:
    """What the smaller model is made of."""

    layers: list[int]
    """Stock layers that stay."""
    kv_heads: int
    heads_per_kv: int
    channels: int
    padded: dict[str, list[int]] = field(default_factory=dict)
    """Stock layers whose heads or channels are filled up with zeros, by kind."""


def export_static(routed: RoutedModel, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Shape:
    """Write the smaller checkpoint (and the tokenizer); returns its shape.

    Raises:
        ValueError: decisions that differ between tokens, LoRA not merged, means that the family has no bias for, or a
            folder that holds files: a loader would take shards of an older model.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds files; legal: a new or an empty folder")
    keep = routed.gates.static_keep()
    if keep is None:
        raise ValueError("only a static method exports as a smaller model; this one decides anew for each token")
    if routed.model is not routed.base:
        raise ValueError("LoRA is not merged: export wide.adapter.merge(routed)")
    alive = {
        "attention": keep["attention"].bool().repeat_interleave(routed.gates.attn_group_size, 1).cpu(),
        "ffn": keep["ffn"].bool().repeat_interleave(routed.gates.ffn_group_size, 1).cpu(),
    }
    means = routed.gates.substitute(0, "ffn") is not None
    shape = choose_shape(alive, routed.geometry, keep_every_layer=means)
    config = with_biases(routed.base.config) if means else copy.deepcopy(routed.base.config)
    if config.model_type == "llama" and config.hidden_size % (shape.kv_heads * shape.heads_per_kv):
        config = without_divisibility(config)
    resize(config, shape, routed.geometry)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    smaller = model_class(config).to(routed.base.dtype)
    smaller.load_state_dict(smaller_state(routed, smaller, alive, shape))
    smaller.generation_config = valid_settings(routed.base.generation_config)
    smaller.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return shape


def valid_settings(settings: GenerationConfig) -> GenerationConfig:
    """The base's own, less sampling values beside greedy decoding, which transformers reads and refuses to save."""
    settings = copy.deepcopy(settings)
    if not settings.do_sample:
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
            setattr(settings, name, None)
    return settings


def choose_shape(alive: dict[str, Tensor], geometry: Geometry, keep_every_layer: bool) -> Shape:
    """The smallest widths that hold every layer, and which layers they pad.

    Args:
        alive: heads [L, H] and channels [L, F] that run.
        keep_every_layer: a layer without heads and channels still adds its biases.
    """
    queries = alive["attention"].unflatten(1, (geometry.num_kv_heads, -1)).sum(-1)  # [L, KV heads]
    kv_heads, channels = (queries > 0).sum(1), alive["ffn"].sum(1)
    layers = [i for i in range(geometry.num_layers) if keep_every_layer or kv_heads[i] or channels[i]]
    if not layers:
        raise ValueError("nothing is left to export: every layer is removed")
    shape = Shape(
        layers,
        kv_heads=max(1, int(kv_heads[layers].max())),
        heads_per_kv=max(1, int(queries[layers].max())),
        channels=max(1, int(channels[layers].max())),
    )
    heads = shape.kv_heads * shape.heads_per_kv
    shape.padded = {
        "attention": [i for i in layers if int(queries[i].sum()) < heads],
        "ffn": [i for i in layers if int(channels[i]) < shape.channels],
    }
    return shape


def with_biases(config: PretrainedConfig) -> PretrainedConfig:
    """The config with a bias on every linear; Qwen2 and Mistral without a window are Llama then.

    Raises:
        ValueError: the family has no biases where the means must go.
    """
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if config.model_type not in ("llama", "qwen2", "mistral") or window is not None:
        raise ValueError(
            f"family {config.model_type}{' with a sliding window' if window else ''} has no bias on o_proj and "
            "down_proj for the means of removed inputs; legal: method.compensation=false"
        )
    return LlamaConfig(**common_fields(config, LlamaConfig()) | {"attention_bias": True, "mlp_bias": True})


def without_divisibility(config: PretrainedConfig) -> PretrainedConfig:
    """The same model as Mistral without a window: Llama's config refuses heads that do not divide the hidden size.

    Raises:
        ValueError: the model has biases, which Mistral has not.
    """
    if config.attention_bias or config.mlp_bias:
        raise ValueError(
            "Llama's config wants a number of query heads that divides the hidden size, and these biases fit no other "
            "family; legal: method.spread=layer with such a number left, or method.compensation=false"
        )
    return MistralConfig(**common_fields(config, MistralConfig()) | {"sliding_window": None})


def common_fields(config: PretrainedConfig, other: PretrainedConfig) -> dict:
    names = set(other.to_dict()) - {"model_type", "architectures", "transformers_version"}
    return {key: value for key, value in config.to_dict().items() if key in names}


def resize(config: PretrainedConfig, shape: Shape, geometry: Geometry) -> None:
    config.num_hidden_layers = len(shape.layers)
    config.num_attention_heads = shape.kv_heads * shape.heads_per_kv
    config.num_key_value_heads = shape.kv_heads
    config.head_dim = geometry.head_dim
    config.intermediate_size = shape.channels
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in shape.layers]


def smaller_state(
    routed: RoutedModel, smaller: PreTrainedModel, alive: dict[str, Tensor], shape: Shape
) -> dict[str, Tensor]:
    """State dict of the smaller model."""
    prefix = f"{routed.layout.layers}."
    state = {name: t for name, t in routed.base.state_dict().items() if not name.startswith(prefix)}
    new_layers = families.get_path(smaller, routed.layout.layers)
    assert isinstance(new_layers, nn.ModuleList)
    for place, (index, new) in enumerate(zip(shape.layers, new_layers, strict=True)):
        old = routed.decoder_layers()[index]
        parts = {name: t for name, t in old.state_dict().items() if name in new.state_dict()}
        parts |= layer_state(routed, index, alive, shape)
        zeros = {name: torch.zeros_like(t) for name, t in new.state_dict().items() if name not in parts}
        assert all(name.endswith(".bias") for name in zeros), f"no weights for {sorted(zeros)}"
        state |= {f"{prefix}{place}.{name}": t for name, t in (parts | zeros).items()}
    return state


def layer_state(routed: RoutedModel, index: int, alive: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """The seven projections of one layer, cut and padded."""
    layout, size = routed.layout, routed.geometry.head_dim
    queries, kv_heads = chosen_heads(alive["attention"][index], routed.geometry, shape)
    channels = padded(alive["ffn"][index].nonzero()[:, 0].tolist(), shape.channels)
    rows = {
        layout.q_proj: spread(queries, size),
        layout.k_proj: spread(kv_heads, size),
        layout.v_proj: spread(kv_heads, size),
        layout.gate_proj: torch.tensor(channels),
        layout.up_proj: torch.tensor(channels),
    }
    layer, state = routed.decoder_layers()[index], {}
    for path, places in rows.items():
        for name, tensor in families.get_path(layer, path).state_dict().items():
            state[f"{path}.{name}"] = taken(tensor, places, dim=0)
    columns = {layout.o_proj: spread(queries, size), layout.down_proj: torch.tensor(channels)}
    for kind, (path, places) in zip(KINDS, columns.items(), strict=True):
        weight, bias = folded(routed, index, kind, path)
        state[f"{path}.weight"] = taken(weight, places, dim=1)
        if bias is not None:
            state[f"{path}.bias"] = bias
    return state


def chosen_heads(alive: Tensor, geometry: Geometry, shape: Shape) -> tuple[list[int], list[int]]:
    """Stock query heads and KV heads in their new order, -1 for padding; queries stay beside their KV head."""
    by_kv = alive.unflatten(0, (geometry.num_kv_heads, -1))
    kv_heads = padded(by_kv.any(1).nonzero()[:, 0].tolist(), shape.kv_heads)
    queries: list[int] = []
    for kv in kv_heads:
        own = [] if kv < 0 else [kv * geometry.heads_per_kv + q for q in by_kv[kv].nonzero()[:, 0].tolist()]
        queries += padded(own, shape.heads_per_kv)
    return queries, kv_heads


def padded(places: list[int], length: int) -> list[int]:
    return places + [-1] * (length - len(places))


def spread(heads: list[int], size: int) -> Tensor:
    """Rows of the heads, `size` each; -1 stays -1."""
    column = torch.tensor(heads)[:, None]
    return torch.where(column < 0, -1, column * size + torch.arange(size)).flatten()


def taken(tensor: Tensor, places: Tensor, dim: int) -> Tensor:
    """Rows or columns at `places`, zeros at -1."""
    places = places.to(tensor.device)
    chosen = tensor.index_select(dim, places.clamp(min=0))
    real = (places >= 0).view([-1 if axis == dim else 1 for axis in range(tensor.dim())])
    return torch.where(real, chosen, 0.0).to(tensor.dtype)


def folded(routed: RoutedModel, index: int, kind: str, path: str) -> tuple[Tensor, Tensor | None]:
    """Weight [D, width] with strengths multiplied in, and bias [D] with the means of removed inputs added."""
    module = families.get_path(routed.decoder_layers()[index], path)
    assert isinstance(module, nn.Linear)
    static = routed.gates.static_keep()
    assert static is not None
    keep = static[kind][index]
    width = routed.gates.group_width(kind)
    factors = routed.gates.factors(index, kind, keep[None, None])[0, 0].detach().repeat_interleave(width)
    weight = module.weight.detach()
    means, bias = routed.gates.substitute(index, kind), cast(Tensor | None, module.bias)
    if means is not None:
        off = (1 - keep).repeat_interleave(width)
        bias = weight.float() @ (off * means).float() + (0.0 if bias is None else bias.float())
        bias = bias.to(weight.dtype)
    return (weight.float() * factors).to(weight.dtype), bias


def main(checkpoint: str, folder: str) -> None:
    routed = from_pretrained(checkpoint)
    if routed.model is not routed.base:
        routed = merge(routed)
    shape = export_static(routed, folder)
    print(f"{folder}: {len(shape.layers)} layers of {shape.kv_heads} KV heads, {shape.heads_per_kv} query heads each, ")
    print(f"{shape.channels} channels; filled up with zeros: {shape.padded}")


if __name__ == "__main__":
    main(*sys.argv[1:])
