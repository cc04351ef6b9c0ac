"""Which route an operator takes, read from a table of measurements keyed by card (`dispatch_table.json`).

Routes: "dense" (library product, then mask), "skip" (Triton, work only where the mask is on), "one_token" (at most
eight tokens, reads only active weights). A rule holds from a number of tokens, a group width and a weight size on,
and up to an expected keep ratio; the first rule whose sizes fit decides and no rule means dense. Nothing is timed at a
user's call: `python -m wide_kernels.tune` measures another card and writes its entry.
"""

import functools
import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from ._launch import runs_triton
from .layout import RoutingLayout

TABLE_FILE = Path(__file__).with_name("dispatch_table.json")
ROUTES = ("dense", "skip", "one_token")


@dataclass(frozen=True)
class Plan:
    """A route and its tile sizes.

    `config` is, for "skip": block_m, block_n, block_k, token tiles of a band, num_warps, num_stages and, optionally,
    the schedule (see `mn_skip`); for `gemm_k`: groups of a set and bits of a partial sum instead of the band, and no
    schedule; for "one_token": block_n, block_k, num_warps, num_stages; for "dense": empty.
    """

    route: str
    config: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.route not in ROUTES:
            raise ValueError(f"route must be one of {', '.join(ROUTES)}, got {self.route!r}")


DENSE = Plan("dense")


def choose(operator: str, x: torch.Tensor, weight: torch.Tensor, layout: RoutingLayout, group_size: int) -> Plan:
    """The plan for one call, from shapes, dtype and `layout.expected_keep` alone (never from the mask's values)."""
    if not runs_triton(x) or x.dtype == torch.float32:
        return DENSE
    return rule_for(operator, x, x.shape[0], weight.numel(), group_size, layout.expected_keep)


def rule_for(
    operator: str, x: torch.Tensor, num_tokens: int, weight_size: int, group_size: int, expected_keep: float
) -> Plan:
    """What the table of the card that holds `x` says."""
    rules = _rules(torch.cuda.get_device_name(x.device) if x.is_cuda else "interpreter")
    return pick(rules, operator, num_tokens, weight_size, group_size, expected_keep)


def card_rules() -> tuple[dict, ...]:
    """The table of the current card, empty (with a warning) for a card that was not measured."""
    return _rules(torch.cuda.get_device_name())


def pick(
    rules: tuple[dict, ...], operator: str, num_tokens: int, weight_size: int, group_size: int, expected_keep: float
) -> Plan:
    """The first rule of `operator` whose ranges hold; dense when there is none or more groups run than it allows."""
    for rule in rules:
        if (
            rule["operator"] == operator
            and rule["min_tokens"] <= num_tokens <= rule["max_tokens"]
            and rule["min_group_size"] <= group_size
            and rule["min_weight_size"] <= weight_size
        ):
            return Plan(rule["route"], tuple(rule["config"])) if expected_keep <= rule["max_keep"] else DENSE
    return DENSE


@functools.cache
def _rules(card: str) -> tuple[dict, ...]:
    table = json.loads(TABLE_FILE.read_text())
    if card not in table:
        warnings.warn(
            f"wide_kernels has no measurements for {card!r} (it has {', '.join(table)}) and runs dense products; "
            "`python -m wide_kernels.tune` makes its table",
            stacklevel=4,
        )
        return ()
    return tuple(table[card]["rules"])
