"""The contract between a pruning method and the routed model.

`GateProvider.gate(layer, kind, hidden)` is asked once per sublayer with the residual stream before the norm and
answers keep decisions [B, T, G]; `compensation(layer, kind)` may give a vector per group that stands in for a
skipped one. Whatever a step needs beyond the hidden states (noise, temperature, which tokens are real) is set on
`GateProvider.step` before the forward, so that a recomputed forward decides the same.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from wide.families import Geometry
from wide.routing import KINDS

if TYPE_CHECKING:
    from wide.model import RoutedModel


@dataclass
class GateStep:
    """One training step's settings. `noise[kind]` [L, B, T, G]; None means deterministic gates.

    `positions` [1 or B, T] and `valid` [B, T] (None: all tokens are real) belong to the forward in progress.
    """

    noise: dict[str, Tensor] | None = None
    tau: float | Tensor = 1.0
    positions: Tensor | None = None
    valid: Tensor | None = None

    @property
    def known_positions(self) -> Tensor:
        assert self.positions is not None, "positions are set by a forward of the routed model"
        return self.positions


class GateProvider(nn.Module):
    """Base of all methods. Subclasses implement `gate`; `num_groups` gives G of each kind (layout of the masks)."""

    supports_dial = False
    """Whether `logits` exist, so that a bias on them can meet a target after training."""
    reads = {"attention": "residual", "ffn": "residual"}
    """What `gate` is given. residual: the stream before the norm. product: the input of o_proj or down_proj. gate (FFN
    only): the activated output of gate_proj."""
    saved = {"attention": 1.0, "ffn": 1.0}
    """Share of a skipped group's multiply-adds that is saved; less where deciding needs part of the work done."""
    kv = "kept"
    """kept: keys and values of every token are computed and cached. evicted: a token that skips attention leaves none,
    and later queries do not see it. removed: heads that are off for all tokens need none."""
    calibration_blocks = 0
    """Training blocks that `prepare` reads before anything is trained; 0: the method needs none."""
    evaluations: tuple[str, ...] = ()
    """Further ways of deciding, beside the deployed one, on which the run reports (see `evaluated`)."""
    remembers: tuple[str, ...] = ()
    """Names of dictionaries that `gate` fills during a forward, with keys `layer` or `(kind, layer)`."""
    dial: Tensor
    """[L, 2] buffer: bias on the logits of each layer and kind."""
    channel_order: Tensor | None
    """[L, F] int64 buffer of a method that reorders FFN channels: stock index of each channel (see `wide.cluster`)."""

    def __init__(self, geometry: Geometry, attn_group_size: int | None = None, ffn_group_size: int | None = None):
        """Without a size the whole sublayer is one group."""
        super().__init__()
        self.geometry = geometry
        attn_group_size, ffn_group_size = attn_group_size or geometry.num_heads, ffn_group_size or geometry.ffn_size
        self.attn_group_size, self.ffn_group_size = attn_group_size, ffn_group_size
        self.num_groups = {
            "attention": geometry.num_heads // attn_group_size,
            "ffn": geometry.ffn_size // ffn_group_size,
        }
        self.step = GateStep()
        dial = torch.zeros(geometry.num_layers, 2)
        self.register_buffer("dial", dial)
        self.register_buffer("channel_order", None)

    def group_width(self, kind: str) -> int:
        """Columns of the o_proj (head group times head size) or down_proj (channels) input that one gate covers."""
        return self.attn_group_size * self.geometry.head_dim if kind == "attention" else self.ffn_group_size

    def logits(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        """Execute minus skip [B, T, G] float32, before noise and dial; only where `supports_dial`."""
        raise NotImplementedError

    def gate(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        """Keep decisions in {0, 1}, float32 [B, T, G], from `hidden` [B, T, D]; differentiable in training."""
        raise NotImplementedError

    @property
    def num_noise(self) -> dict[str, int]:
        """Noise values a token needs in each layer for training."""
        return self.num_groups

    def prepare(self, routed: "RoutedModel", batches: list[dict[str, Tensor]]) -> None:
        """Fit what needs no training, from `routed` on model inputs of training text."""
        raise NotImplementedError

    def penalty(self, targets: dict[str, float], step: int, num_steps: int) -> Tensor | None:
        """The method's own loss beside the language one, for the last forward; None: the common budget loss."""
        return None

    def evaluated(self, way: str) -> AbstractContextManager[None]:
        """Decide in one of the `evaluations` for a while."""
        raise NotImplementedError

    def factors(self, layer: int, kind: str, keep: Tensor) -> Tensor:
        """What a group's activations are multiplied by, [B, T, G]: its decision, unless the method scales them."""
        return keep

    def substitute(self, layer: int, kind: str) -> Tensor | None:
        """Values that stand in for the activations of skipped groups, [width of the projection's input], or None."""
        return None

    def static_keep(self) -> dict[str, Tensor] | None:
        """Decisions {kind: [L, G]} when they are the same for every token, else None."""
        return None

    def compensation(self, layer: int, kind: str) -> Tensor | None:
        """Vectors [G, D], or None; each is added in the share that `stands_in` says."""
        return None

    def stands_in(self, keep: Tensor) -> Tensor:
        """How much of each group's compensation vector is added, given its keep decisions [B, T, G]."""
        return 1 - keep

    def separation(self) -> Tensor:
        """Mean of keep probability times skip probability in the last forward: 0 when every gate is saturated."""
        return torch.zeros(())

    def router_parameters_per_layer(self) -> int:
        """Parameters that deciding costs in one layer, charged against the savings."""
        return 0


def per_layer() -> dict[str, nn.ModuleList]:
    """An empty `nn.ModuleDict`, {kind: a module for each layer}, as what it is used as."""
    return cast("dict[str, nn.ModuleList]", nn.ModuleDict())


def parameters_per_layer() -> dict[str, nn.ParameterList]:
    """The same for {kind: a parameter for each layer}."""
    return cast("dict[str, nn.ParameterList]", nn.ModuleDict())


def check_options(
    config: object,
    shares: tuple[str, ...] = (),
    counts: tuple[str, ...] = (),
    positive: tuple[str, ...] = (),
    not_negative: tuple[str, ...] = (),
    choices: dict[str, tuple[str, ...]] | None = None,
) -> None:
    """Ranges of a method's options: shares 0 to 1 (None allowed), counts from 1, numbers, names out of a list.

    Raises:
        ValueError: one line naming key, value and legal values.
    """
    ranges = [(shares, 0, 1, "0 to 1"), (counts, 1, None, "1 or more"), (not_negative, 0, None, "0 or more")]
    for keys, low, high, words in ranges:
        for key in keys:
            value = getattr(config, key)
            if value is not None and not (value >= low and (high is None or value <= high)):
                raise ValueError(f"method.{key}={value} is out of range; legal: {words}")
    for key in positive:
        if not getattr(config, key) > 0:
            raise ValueError(f"method.{key}={getattr(config, key)} is out of range; legal: above 0")
    for key, legal in (choices or {}).items():
        if getattr(config, key) not in legal:
            raise ValueError(f"method.{key}={getattr(config, key)!r} is unknown; legal: {', '.join(legal)}")


class StaticProvider(GateProvider):
    """Decisions that hold for every token: buffers `keep_attention` and `keep_ffn`, [L, G] of 0 and 1."""

    kv = "removed"

    def __init__(self, geometry: Geometry, attn_group_size: int | None = None, ffn_group_size: int | None = None):
        super().__init__(geometry, attn_group_size, ffn_group_size)
        for kind in KINDS:
            self.register_buffer(f"keep_{kind}", torch.ones(geometry.num_layers, self.num_groups[kind]))

    @property
    def num_noise(self) -> dict[str, int]:
        return dict.fromkeys(KINDS, 0)

    def gate(self, layer: int, kind: str, hidden: Tensor) -> Tensor:
        return self.get_buffer(f"keep_{kind}")[layer].expand(*hidden.shape[:-1], -1)

    def static_keep(self) -> dict[str, Tensor] | None:
        return {kind: self.get_buffer(f"keep_{kind}") for kind in KINDS}


def keep_highest(scores: dict[str, Tensor], prices: dict[str, float], target: float) -> dict[str, Tensor]:
    """Decisions {kind: [L, G]}: over the whole model, the lowest scores go first until `target` is removed.

    Args:
        scores: {kind: [L, G]}, comparable between kinds.
        prices: what one group of a kind counts; all groups together need not come to 1.
        target: share of the price to remove; met to within half the price of one group.
    """
    flat = torch.cat([scores[kind].flatten().double() for kind in KINDS])
    price = torch.cat([torch.full((scores[kind].numel(),), float(prices[kind])) for kind in KINDS]).double()
    order = flat.cpu().argsort(stable=True)
    removed = torch.cat([torch.zeros(1).double(), price[order].cumsum(0)]) / price.sum()
    count = int((removed - target).abs().argmin())
    keep = torch.ones(len(flat))
    keep[order[:count]] = 0
    parts = keep.split([scores[kind].numel() for kind in KINDS])
    return {kind: part.view_as(scores[kind]) for kind, part in zip(KINDS, parts, strict=True)}


def group_prices(provider: GateProvider, budget_price: str) -> dict[str, float]:
    """What one group counts. "mean": each kind is half of the total (the paper's sparsity). "cost": its parameters."""
    if budget_price == "mean":
        return {kind: 1 / groups for kind, groups in provider.num_groups.items()}
    matrices = {"attention": 2, "ffn": 3}
    return {kind: float(matrices[kind] * provider.group_width(kind)) for kind in KINDS}
