"""FLAP and Wanda-sp: heads and channels removed by statistics of what o_proj and down_proj read, without training.

FLAP (AAAI 2024, 2312.11983): the variance of each input times the squared norm of its weight column, standardised in
each module so that one threshold serves the whole model, and removed inputs replaced by their mean (the bias
compensation). Wanda-sp: |weight| times the input's norm, an equal share from every module, nothing in its place.
Groups of a KV head's query heads (`attn_group_size` = query heads per KV head) take its key and value along.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wide import families
from wide.families import Geometry
from wide.methods.provider import StaticProvider, check_options, group_prices, keep_highest
from wide.routing import KINDS
from wide.statistics import watch_inputs

if TYPE_CHECKING:
    from wide.model import RoutedModel


@dataclass
class Config:
    name: str = "flap"
    sparsity: float = 0.25
    attn_group_size: int = 3
    ffn_group_size: int = 1
    score: str = "fluctuation"
    """fluctuation (FLAP) or magnitude (Wanda-sp)."""
    spread: str = "global"
    """global: one threshold over standardised scores. layer: the same share of every module."""
    compensation: bool = True
    """Removed inputs are replaced by their mean on the calibration text."""
    budget_price: str = "cost"
    """What `sparsity` is a share of: parameters ("cost"), or attention and FFN groups alike ("mean")."""
    blocks: int = 64
    """Blocks of training text."""

    def __post_init__(self) -> None:
        check_options(
            self,
            shares=("sparsity",),
            counts=("attn_group_size", "ffn_group_size", "blocks"),
            choices={
                "score": ("fluctuation", "magnitude"),
                "spread": ("global", "layer"),
                "budget_price": ("mean", "cost"),
            },
        )


class FlapProvider(StaticProvider):
    """Buffers of decisions, and `mean_attention`, `mean_ffn` [L, width] when compensation is on."""

    def __init__(self, config: Config, geometry: Geometry):
        super().__init__(geometry, config.attn_group_size, config.ffn_group_size)
        self.config, self.calibration_blocks = config, config.blocks
        for kind in KINDS if config.compensation else ():
            width = self.num_groups[kind] * self.group_width(kind)
            self.register_buffer(f"mean_{kind}", torch.zeros(geometry.num_layers, width))

    def substitute(self, layer: int, kind: str) -> Tensor | None:
        return self.get_buffer(f"mean_{kind}")[layer] if self.config.compensation else None

    @torch.no_grad()
    def prepare(self, routed: "RoutedModel", batches: list[dict[str, Tensor]]) -> None:
        """Score every group on the dense model's activations and remove the lowest."""
        means, squares = input_moments(routed, batches)
        for kind in KINDS if self.config.compensation else ():
            self.get_buffer(f"mean_{kind}").copy_(means[kind])
        scores = {kind: self.scores(routed, kind, means[kind], squares[kind]) for kind in KINDS}
        if self.config.spread == "global":
            prices = group_prices(self, self.config.budget_price)
            keep = keep_highest(scores, prices, self.config.sparsity)
        else:
            keep = {kind: keep_share(rows, self.config.sparsity) for kind, rows in scores.items()}
        for kind in KINDS:
            self.get_buffer(f"keep_{kind}").copy_(keep[kind])

    def scores(self, routed: "RoutedModel", kind: str, means: Tensor, squares: Tensor) -> Tensor:
        """Importance of every group, [L, G] float64, from the first two moments of its inputs [L, width]."""
        path = routed.layout.o_proj if kind == "attention" else routed.layout.down_proj
        weights = [families.get_weight(layer, path).double() for layer in routed.decoder_layers()]  # [D, width]
        if self.config.score == "magnitude":
            columns = torch.stack([weight.abs().mean(0) for weight in weights]) * squares.sqrt()
        else:
            columns = (squares - means.square()) * torch.stack([weight.square().sum(0) for weight in weights])
            columns = columns.square() if kind == "attention" else columns  # so in the authors' recipe
        if self.config.spread == "global":
            columns = (columns - columns.mean(1, keepdim=True)) / columns.std(1, keepdim=True)
        return columns.unflatten(1, (self.num_groups[kind], -1)).mean(-1)


@torch.no_grad()
def input_moments(
    routed: "RoutedModel", batches: list[dict[str, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Mean and mean square of every input of o_proj ("attention") and down_proj ("ffn"): {kind: [L, width]} float64."""
    layers = range(routed.geometry.num_layers)
    sums: dict[tuple[str, int], Tensor] = {}
    count = 0
    for batch in batches:
        valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()

        def add(kind: str, layer: int, inputs: Tensor, valid: Tensor = valid) -> None:
            rows = inputs[valid].double()
            moments = torch.stack([rows.sum(0), rows.square().sum(0)])
            sums[kind, layer] = sums[kind, layer] + moments if (kind, layer) in sums else moments

        with watch_inputs(routed, add), routed.dense():
            routed.hidden_states(**batch)
        count += int(valid.sum())
    first, second = ({k: torch.stack([sums[k, i][row] for i in layers]) / count for k in KINDS} for row in (0, 1))
    return first, second


def keep_share(scores: Tensor, sparsity: float) -> Tensor:
    """Decisions [L, G] that remove the same number of lowest scores from every layer."""
    count = round(sparsity * scores.shape[1])
    keep = torch.ones_like(scores)
    return keep.scatter_(1, scores.argsort(dim=1)[:, :count], 0.0)


def build(config: Config, geometry: Geometry, seed: int = 0) -> FlapProvider:
    return FlapProvider(config, geometry)
