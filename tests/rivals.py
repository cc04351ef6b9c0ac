"""Every method on every tiny family, ready to run: options that skip about half, statistics from random text."""

import torch
from tiny import stock, tokens
from torch import Tensor

from wide import families
from wide.families import Geometry
from wide.methods import load as load_method
from wide.model import RoutedModel

CASES: dict[str, tuple[str, dict]] = {
    "dense": ("dense", {}),
    "wide": ("wide", {"attn_group_size": "kv", "ffn_group_size": 32, "router_rank": 4, "init_gap": 0.0}),
    "skipgpt": ("skipgpt", {}),
    "skipgpt_mlp": ("skipgpt", {"router": "mlp"}),
    "skipgpt_matched": ("skipgpt", {"router": "bottleneck", "router_rank": 4, "router_norm": True}),
    "ddp": ("ddp", {"attn_group_size": "kv", "ffn_group_size": 32}),
    "ddp_single": ("ddp", {}),
    "flap": ("flap", {"attn_group_size": "kv", "budget_price": "mean"}),
    "flap_heads": ("flap", {"attn_group_size": 1, "ffn_group_size": 8}),
    "wanda_sp": ("flap", {"attn_group_size": "kv", "score": "magnitude", "spread": "layer", "compensation": False}),
    "blockpruner": ("depth", {}),
    "sleb": ("depth", {"unit": "layer"}),
    "shortgpt": ("depth", {"unit": "layer", "score": "influence", "greedy": False}),
    "taylor": ("depth", {"score": "taylor", "greedy": False}),
    "random": ("random", {"attn_group_size": "kv", "ffn_group_size": 32}),
    "cats": ("cats", {"attn_group_size": "kv", "ffn_group_size": 32}),
    "teal": ("cats", {"attn_group_size": "kv", "ffn_group_size": 32, "score": "product", "spread": "global"}),
    "cats_oracle": ("cats", {"attn_group_size": 1, "ffn_group_size": 16, "score": "oracle"}),
    "dllm": ("dllm", {"dense_layers": 0, "router_rank": 8, "init_gap": 0.0}),
    "dllm_kept": ("dllm", {"dense_layers": 1, "dense_tokens": 0, "router_rank": 8, "evict": False, "init_gap": 0.0}),
    "mod_d": ("dllm", {"dense_layers": 0, "unit": "sublayer", "capacity": True, "router": "linear", "init_gap": 0.0}),
}
STATIC = ("ddp", "ddp_single", "flap", "flap_heads", "wanda_sp", "blockpruner", "sleb", "shortgpt", "taylor")
TRAINED = ("skipgpt", "skipgpt_mlp", "skipgpt_matched", "ddp", "ddp_single", "dllm", "dllm_kept", "mod_d")
PREPARED = ("flap", "flap_heads", "wanda_sp", "blockpruner", "sleb", "shortgpt", "taylor")


def config_of(case: str, family: str, **more):
    """The method's config, group sizes fitted to the family."""
    name, options = CASES[case]
    options = options | more
    if options.get("attn_group_size") == "kv":
        options["attn_group_size"] = Geometry.from_hf(stock(family).config).heads_per_kv
    sparsity = {} if name == "dense" else {"sparsity": 0.5}
    return load_method(name).Config(**sparsity | options)


def text() -> list[dict[str, Tensor]]:
    """Calibration text: two batches of random tokens."""
    return [{"input_ids": tokens(2, 24, seed=seed)} for seed in (1, 2)]


def build(case: str, family: str, attn: str = "sdpa", fresh: bool = False, **more) -> RoutedModel:
    """A routed tiny model of the case; learned tensors drawn as if trained and statistics taken, unless `fresh`."""
    config = config_of(case, family, **more)
    geometry = Geometry.from_hf(stock(family).config)
    gates = load_method(config.name).build(config, geometry, 0)
    model = RoutedModel(stock(family, attn), gates, families.load(geometry.family))
    if config.name == "ddp" and not fresh:
        scatter_strengths(model)
    if gates.calibration_blocks and not fresh:
        gates.prepare(model, text())
    return model


@torch.no_grad()
def scatter_strengths(model: RoutedModel) -> None:
    """DDP as after training: every other group of each layer is gone, the rest between 0.5 and 1.5."""
    generator = torch.Generator().manual_seed(3)
    for rows in model.gates.strengths.values():
        for row in rows:
            row.copy_(torch.rand(row.shape, generator=generator) + 0.5)
            row[1::2] = -0.1
