"""Static depth: whole layers, or attention and FFN one by one, removed for every token, without training.

Scores: `influence`, one minus the cosine of a unit's input and output (ShortGPT, 2403.03853); `perplexity` of the text
without the unit (Shortened LLaMA, 2402.02834); `taylor`, the sum of |weight x gradient| (same paper). With `greedy` the
perplexities are measured anew after each removal: SLEB (2402.09025) for layers, BlockPruner (2406.10594) for sublayers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from wide import families
from wide.families import Geometry
from wide.methods.provider import StaticProvider, check_options, group_prices
from wide.routing import KINDS

if TYPE_CHECKING:
    from wide.model import RoutedModel

Unit = tuple[tuple[str, int], ...]
"""The sublayers (kind, layer) that go together."""


@dataclass
class Config:
    name: str = "depth"
    sparsity: float = 0.25
    unit: str = "sublayer"
    score: str = "perplexity"
    greedy: bool = True
    keep_first: int = 0
    keep_last: int = 0
    """Layers at the two ends that stay."""
    budget_price: str = "mean"
    """What `sparsity` is a share of: sublayers ("mean"), or parameters ("cost")."""
    blocks: int = 16
    """Blocks of training text."""

    def __post_init__(self) -> None:
        check_options(
            self,
            shares=("sparsity",),
            counts=("blocks",),
            not_negative=("keep_first", "keep_last"),
            choices={
                "unit": ("layer", "sublayer"),
                "score": ("influence", "perplexity", "taylor"),
                "budget_price": ("mean", "cost"),
            },
        )
        if self.greedy and self.score != "perplexity":
            raise ValueError(f"method.greedy=true measures perplexity, not {self.score}; legal: method.greedy=false")


class DepthProvider(StaticProvider):
    """One group per sublayer."""

    def __init__(self, config: Config, geometry: Geometry):
        super().__init__(geometry)
        self.config, self.calibration_blocks = config, config.blocks
        self.removal_order: list[Unit] = []
        movable = geometry.num_layers - config.keep_first - config.keep_last
        if config.sparsity * geometry.num_layers > max(movable, 0):
            raise ValueError(
                f"method.keep_first={config.keep_first} and method.keep_last={config.keep_last} leave {movable} of "
                f"{geometry.num_layers} layers, too few for method.sparsity={config.sparsity}"
            )

    def units(self) -> list[Unit]:
        """What may be removed, in order of depth."""
        layers = range(self.config.keep_first, self.geometry.num_layers - self.config.keep_last)
        if self.config.unit == "layer":
            return [tuple((kind, layer) for kind in KINDS) for layer in layers]
        return [((kind, layer),) for layer in layers for kind in KINDS]

    def prepare(self, routed: "RoutedModel", batches: list[dict[str, Tensor]]) -> None:
        """Remove units, least important first, until the removed price is as close to the target as can be."""
        prices = group_prices(self, self.config.budget_price)
        total = sum(prices.values()) * self.geometry.num_layers
        self.removal_order, removed, left = [], 0.0, self.units()
        scores = self.scores(routed, batches, left)
        while left:
            worst = min(left, key=scores.__getitem__)
            price = sum(prices[kind] for kind, _ in worst) / total
            if abs(removed + price - self.config.sparsity) >= abs(removed - self.config.sparsity):
                break
            self._switch(worst, 0.0)
            self.removal_order.append(worst)
            left.remove(worst)
            removed += price
            if self.config.greedy:
                scores = self.scores(routed, batches, left)

    def scores(self, routed: "RoutedModel", batches: list[dict[str, Tensor]], units: list[Unit]) -> dict[Unit, float]:
        """Importance of each unit under the present decisions; the lowest goes first."""
        if self.config.score == "influence":
            return influence(routed, batches, units)
        if self.config.score == "taylor":
            return taylor(routed, batches, units)
        scores = {}
        for unit in units:
            self._switch(unit, 0.0)
            with torch.no_grad():
                scores[unit] = float(sum(text_loss(routed, batch) for batch in batches)) / len(batches)
            self._switch(unit, 1.0)
        return scores

    def _switch(self, unit: Unit, keep: float) -> None:
        for kind, layer in unit:
            self.get_buffer(f"keep_{kind}")[layer] = keep


def text_loss(routed: "RoutedModel", batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the next token, by the stock model's own loss."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return routed(**batch, labels=batch["input_ids"].masked_fill(mask == 0, -100)).loss


@torch.no_grad()
def influence(routed: "RoutedModel", batches: list[dict[str, Tensor]], units: list[Unit]) -> dict[Unit, float]:
    """1 - mean cosine between the residual stream before and after each unit, in the dense model."""
    streams: dict[int, Tensor] = {}
    handles = []
    for index, layer in enumerate(routed.decoder_layers()):
        for place, path in ((2 * index, routed.layout.attn_norm), (2 * index + 1, routed.layout.ffn_norm)):
            norm = families.get_path(layer, path)
            handles.append(norm.register_forward_pre_hook(lambda m, args, at=place: streams.update({at: args[0]})))
    last = routed.decoder_layers()[-1]
    end = 2 * routed.geometry.num_layers
    handles.append(
        last.register_forward_hook(
            lambda m, args, out: streams.update({end: out[0] if isinstance(out, tuple) else out})
        )
    )
    sums, count = dict.fromkeys(units, 0.0), 0
    for batch in batches:
        with routed.dense():
            routed.hidden_states(**batch)
        valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        count += int(valid.sum())
        for unit in units:
            places = [2 * layer + KINDS.index(kind) for kind, layer in unit]
            before, after = streams[min(places)], streams[max(places) + 1]
            cosine = F.cosine_similarity(before.double(), after.double(), dim=-1)
            sums[unit] += float((1 - cosine)[valid].sum())
    for handle in handles:
        handle.remove()
    return {unit: total / count for unit, total in sums.items()}


def _moved(weight: Tensor) -> float:
    assert weight.grad is not None
    return float((weight.detach() * weight.grad).abs().double().sum())


def taylor(routed: "RoutedModel", batches: list[dict[str, Tensor]], units: list[Unit]) -> dict[Unit, float]:
    """Sum over a unit's linear weights of |weight x gradient of the text's loss|, in the dense model."""
    layout = routed.layout
    paths = {
        "attention": (layout.q_proj, layout.k_proj, layout.v_proj, layout.o_proj),
        "ffn": (layout.gate_proj, layout.up_proj, layout.down_proj),
    }
    layers = routed.decoder_layers()
    weights = {
        unit: [families.get_weight(layers[layer], path) for kind, layer in unit for path in paths[kind]]
        for unit in units
    }
    every = [weight for rows in weights.values() for weight in rows]
    for weight in every:
        weight.requires_grad_(True)
    with routed.dense(), torch.enable_grad():
        for batch in batches:
            (text_loss(routed, batch) / len(batches)).backward()
    scores = {unit: sum(_moved(weight) for weight in rows) for unit, rows in weights.items()}
    for weight in every:
        weight.requires_grad_(False)
        weight.grad = None
    return scores


def build(config: Config, geometry: Geometry, seed: int = 0) -> DepthProvider:
    return DepthProvider(config, geometry)
