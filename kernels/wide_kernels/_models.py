"""Shapes of the benchmarked models (public configurations): hidden size, FFN width, query and KV heads, head size."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """The sizes a layer's operators follow from; groups of query heads align with KV heads."""

    name: str
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def q_width(self) -> int:
        """Channels of the Q projection: query heads x head size."""
        return self.num_heads * self.head_size

    @property
    def head_group(self) -> int:
        """Channels of one attention group: the query heads of one KV head."""
        return self.q_width // self.num_kv_heads


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", 4096, 14336, 32, 8, 128),
        ModelShape("llama-3.2-3b", 3072, 8192, 24, 8, 128),
        ModelShape("qwen3-8b", 4096, 12288, 32, 8, 128),
        ModelShape("qwen3-14b", 5120, 17408, 40, 8, 128),
        ModelShape("smollm2-135m", 576, 1536, 9, 3, 64),
    )
}
FFN_GROUPS = (32, 128, 256, 512)


def _ffn_groups(shape: ModelShape) -> list[int]:
    return [size for size in FFN_GROUPS if shape.ffn % size == 0]


def mn_shapes() -> list[dict]:
    """Every Q projection (one group width) and every gate/up projection (each FFN group width)."""
    rows = []
    for shape in MODELS.values():
        rows.append({"model": shape.name, "site": "q", "N": shape.q_width, "K": shape.hidden, "G": shape.head_group})
        rows += [
            {"model": shape.name, "site": "gate", "N": shape.ffn, "K": shape.hidden, "G": size}
            for size in _ffn_groups(shape)
        ]
    return rows


def k_shapes() -> list[dict]:
    """Every O projection (one group width) and every down projection (each FFN group width)."""
    rows = []
    for shape in MODELS.values():
        rows.append({"model": shape.name, "site": "o", "N": shape.hidden, "K": shape.q_width, "G": shape.head_group})
        rows += [
            {"model": shape.name, "site": "down", "N": shape.hidden, "K": shape.ffn, "G": size}
            for size in _ffn_groups(shape)
        ]
    return rows


def ffn_shapes() -> list[dict]:
    """Whole FFNs: hidden K, width N, each FFN group width."""
    return [
        {"model": shape.name, "site": "ffn", "N": shape.ffn, "K": shape.hidden, "G": size}
        for shape in MODELS.values()
        for size in _ffn_groups(shape)
    ]


# queries and keys of a prompt or chunk; batch and keys of a cache
PROMPTS = ((128, 128), (512, 512), (1024, 1024), (4096, 4096), (16384, 16384), (512, 4096), (2048, 16384))
CACHES = ((1, 1024), (1, 4096), (1, 32768), (4, 8192), (16, 2048), (16, 16384))


def attention_shapes(operator: str) -> list[dict]:
    """Batch, queries, keys, heads, kv heads and head size of every model's attention calls."""
    calls = [(1, *prompt) for prompt in PROMPTS]
    if operator == "attention_decode":
        calls = [(batch, 1, keys) for batch, keys in CACHES]
    return [
        {"model": shape.name, "batch": batch, "queries": queries, "keys": keys, "H": shape.num_heads,
         "K": shape.num_kv_heads, "D": shape.head_size}
        for shape in MODELS.values() for batch, queries, keys in calls
    ]  # fmt: skip
