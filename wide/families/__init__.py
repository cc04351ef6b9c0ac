"""Model families: one file per Hugging Face `model_type`, holding names and sizes and no logic.

`load("llama")` imports `wide.families.llama` and gives its `LAYOUT` (where the decoder layers, the two norms and
the seven linears are). `Geometry` reads every size from the HF config once; nothing else derives a head size.
Used by `wide.model` (where to hang masks) and by `wide.routing` (what a decision costs).
"""

import importlib
import pkgutil
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Layout:
    """Attribute paths inside a stock causal LM: `decoder` and `layers` from the model, the others from a layer."""

    decoder: str = "model"
    layers: str = "model.layers"
    attn_norm: str = "input_layernorm"
    ffn_norm: str = "post_attention_layernorm"
    q_proj: str = "self_attn.q_proj"
    k_proj: str = "self_attn.k_proj"
    v_proj: str = "self_attn.v_proj"
    o_proj: str = "self_attn.o_proj"
    gate_proj: str = "mlp.gate_proj"
    up_proj: str = "mlp.up_proj"
    down_proj: str = "mlp.down_proj"

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the seven linears as LoRA wants them, e.g. `q_proj`."""
        paths = (self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.gate_proj, self.up_proj, self.down_proj)
        return tuple(path.rsplit(".", 1)[-1] for path in paths)


@dataclass(frozen=True)
class Geometry:
    """Sizes of one model. `head_dim` is explicit in the config where the family has it (Qwen3), else D / H."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied_embeddings: bool
    max_positions: int
    sliding_window: int | None = None

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, config: PretrainedConfig) -> "Geometry":
        """Read the sizes from a Hugging Face config.

        Raises:
            ValueError: unknown `model_type`, or query heads that the KV heads do not divide.
        """
        load(config.model_type)
        num_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
        uses_window = getattr(config, "use_sliding_window", True)
        return cls(
            family=config.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            ffn_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            tied_embeddings=bool(config.tie_word_embeddings),
            max_positions=config.max_position_embeddings,
            sliding_window=getattr(config, "sliding_window", None) if uses_window else None,
        )


def enable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Non-re-entrant checkpointing of every decoder layer; transformers 5.24 renamed the call."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def names() -> list[str]:
    """Every supported `model_type`: the file names of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(model_type: str) -> Layout:
    """Layout of a family; ValueError listing the supported ones otherwise."""
    if model_type not in names():
        raise ValueError(f"model family {model_type!r} is not supported; supported: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{model_type}").LAYOUT


def tiny_config(model_type: str) -> PretrainedConfig:
    """Config of the family's tiny random model (seconds on a CPU; all axes of different size)."""
    load(model_type)
    return importlib.import_module(f"{__name__}.{model_type}").tiny_config()


def get_path(root: nn.Module, path: str) -> nn.Module:
    """`get_path(layer, "self_attn.o_proj")`, through whatever wraps the modules on the way (LoRA does not rename)."""
    return root.get_submodule(path)


def get_weight(root: nn.Module, path: str) -> Tensor:
    """The weight of the module at `path`."""
    weight = get_path(root, path).weight
    assert isinstance(weight, Tensor), f"{path} holds no weight"
    return weight


def legal_attn_group_sizes(geometry: Geometry) -> list[int]:
    """Query heads a group may hold: a divisor of the heads of one KV head, or whole KV heads; dividing all heads."""
    per_kv = geometry.heads_per_kv
    return [
        size
        for size in range(1, geometry.num_heads + 1)
        if geometry.num_heads % size == 0 and (per_kv % size == 0 or size % per_kv == 0)
    ]


def legal_ffn_group_sizes(geometry: Geometry) -> list[int]:
    """Consecutive FFN channels a group may hold: any divisor of the FFN width."""
    return [size for size in range(1, geometry.ffn_size + 1) if geometry.ffn_size % size == 0]


def check_groups(geometry: Geometry, attn_group_size: int | None, ffn_group_size: int | None) -> None:
    """ValueError naming the legal sizes when a group would cut through a head or leave a remainder.

    None is the whole sublayer.
    """
    legal_attn = legal_attn_group_sizes(geometry)
    if attn_group_size is not None and attn_group_size not in legal_attn:
        raise ValueError(
            f"attn_group_size={attn_group_size} does not fit {geometry.num_heads} query heads over "
            f"{geometry.num_kv_heads} KV heads; legal: {', '.join(map(str, legal_attn))}"
        )
    legal_ffn = legal_ffn_group_sizes(geometry)
    if ffn_group_size is not None and ffn_group_size not in legal_ffn:
        raise ValueError(
            f"ffn_group_size={ffn_group_size} does not divide the FFN width {geometry.ffn_size}; "
            f"legal: {', '.join(map(str, legal_ffn))}"
        )
