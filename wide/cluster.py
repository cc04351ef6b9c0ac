"""FFN channels in a new order, so that those that fire together form a group. The dense model computes the same.

A group of consecutive channels is skipped as one, and in a trained model consecutive channels have nothing in common.
Permuting a layer's channels (rows of gate and up, columns of down) changes nothing but their grouping. Here channels
are clustered into groups of equal size by balanced k-means on how strongly each of them contributes to each token of
a calibration text (MoEfication, arXiv 2110.01786, groups by co-activation and by weights in the same balanced way).
The order is a buffer of the gate provider, so it travels with every checkpoint; the base weights stay stock on disk.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from wide import families
from wide.model import RoutedModel

MAX_TOKENS = 4096
"""Tokens whose contributions are kept, [F, tokens] bfloat16 per layer on the host."""


@torch.no_grad()
def find_order(routed: RoutedModel, batches: Iterable[dict[str, Tensor]], seed: int = 0) -> Tensor:
    """Channel order [L, F] int64, stock index of each new place: groups of the model's FFN group size, by firing.

    Args:
        routed: the model with its channels in stock order; runs dense.
        batches: model inputs of calibration text; reading stops at `MAX_TOKENS` valid tokens.
    """
    device = next(routed.parameters()).device
    firing = measure_firing(routed, batches)
    size = routed.gates.ffn_group_size
    return torch.stack([order_of(balanced_clusters(rows.to(device).float(), size, seed)).cpu() for rows in firing])


def measure_firing(routed: RoutedModel, batches: Iterable[dict[str, Tensor]]) -> list[Tensor]:
    """Per layer [F, N] bfloat16 on the host: length of what the channel adds to the residual at each token."""
    seen: list[list[Tensor]] = [[] for _ in routed.decoder_layers()]
    valid = torch.empty(0)

    def record(layer: int):
        def hook(module: nn.Module, args: tuple) -> None:
            scale = families.get_weight(module, "").norm(dim=0)  # [F]
            fired = (args[0].abs() * scale)[valid]
            seen[layer].append(fired.T.bfloat16().cpu())

        return hook

    handles = [
        families.get_path(layer, routed.layout.down_proj).register_forward_pre_hook(record(index))
        for index, layer in enumerate(routed.decoder_layers())
    ]
    try:
        with routed.dense():
            for batch in batches:
                valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
                routed.hidden_states(**batch)
                if sum(part.shape[1] for part in seen[0]) >= MAX_TOKENS:
                    break
    finally:
        for handle in handles:
            handle.remove()
    return [torch.cat(parts, dim=1)[:, :MAX_TOKENS] for parts in seen]


def balanced_clusters(firing: Tensor, size: int, seed: int = 0, rounds: int = 20, restarts: int = 4) -> Tensor:
    """Cluster index [F] of each channel, `size` channels in every cluster: k-means with full clusters closed.

    Channels are compared by correlation over tokens. Of several random starts the one with the highest mean
    correlation of a channel to its cluster's mean is kept.

    Args:
        firing: [F, N], F a multiple of `size`.
    """
    points = nn.functional.normalize(firing - firing.mean(dim=1, keepdim=True), dim=1)
    count = len(points) // size
    generator = torch.Generator().manual_seed(seed)
    best, best_score = torch.arange(len(points), device=points.device) // size, -float("inf")
    for _ in range(restarts):
        centres = points[_spread_out(points, count, generator)]
        clusters = None
        for _ in range(rounds):
            found = assign(points @ centres.T, size)
            if clusters is not None and torch.equal(found, clusters):
                break
            clusters = found
            centres = nn.functional.normalize(
                points[clusters.argsort(stable=True)].view(count, size, -1).mean(1), dim=1
            )
        assert clusters is not None, "rounds must be 1 or more"
        score = float((points * centres[clusters]).sum(1).mean())
        if score > best_score:
            best, best_score = clusters, score
    return best


def assign(likeness: Tensor, size: int) -> Tensor:
    """Cluster of each channel, `size` to each: deferred acceptance, as many rounds as it takes.

    Channels ask at the cluster they like best; a cluster keeps the `size` most alike that ever asked and turns the
    others away to their next choice. The outcome is that of taking all pairs in falling order of likeness.

    Args:
        likeness: [F, K] with F = K * size.
    """
    num_channels, num_clusters = likeness.shape
    open_to = likeness.clone()
    while True:
        choice = open_to.argmax(dim=1)
        asked = torch.full_like(likeness, -float("inf"))
        asked[torch.arange(num_channels), choice] = likeness[torch.arange(num_channels), choice]
        ranks = asked.argsort(dim=0, descending=True, stable=True)  # [F, K], best first
        turned_away = ranks[size:]  # [F - size, K]
        columns = torch.arange(num_clusters, device=likeness.device).expand_as(turned_away)
        really = asked[turned_away, columns] > -float("inf")
        if not really.any():
            return choice
        open_to[turned_away[really], columns[really]] = -float("inf")


def order_of(clusters: Tensor) -> Tensor:
    """Stock indices [F], cluster after cluster: clusters by their lowest channel, channels within one ascending."""
    first = torch.full_like(clusters, len(clusters)).scatter_reduce(
        0, clusters, torch.arange(len(clusters), device=clusters.device), "amin"
    )
    return first[clusters].argsort(stable=True)


def permute_channels(routed: RoutedModel, order: Tensor, adapter_only: bool = False) -> None:
    """Put each layer's channels into `order` [L, F], in place: new channel i is the old `order[layer, i]`.

    LoRA on the three projections, where there is one, goes with them.
    """
    for layer, row in zip(routed.decoder_layers(), order, strict=True):
        for path, dim, unaffected in (
            (routed.layout.gate_proj, 0, "lora_A"),
            (routed.layout.up_proj, 0, "lora_A"),
            (routed.layout.down_proj, 1, "lora_B"),
        ):
            for name, parameter in families.get_path(layer, path).named_parameters():
                is_output_bias = dim == 1 and parameter.dim() == 1
                if unaffected in name or is_output_bias or (adapter_only and "lora_" not in name):
                    continue
                parameter.data = parameter.data.index_select(dim, row.to(parameter.device))


@contextmanager
def stock_order(routed: RoutedModel, adapter_only: bool = False) -> Iterator[None]:
    """Channels back in the order of the files inside the block; nothing to do for a method that never moved them."""
    order = routed.gates.channel_order
    if order is None:
        yield
        return
    permute_channels(routed, order.argsort(dim=1), adapter_only)
    try:
        yield
    finally:
        permute_channels(routed, order, adapter_only)


def _spread_out(points: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """k-means++: each next start with probability proportional to its squared distance from the nearest one."""
    chosen = [int(torch.randint(len(points), (1,), generator=generator))]
    nearest = torch.full((len(points),), float("inf"), device=points.device)
    while len(chosen) < count:
        nearest = torch.minimum(nearest, (points - points[chosen[-1]]).square().sum(1))
        weights = nearest.cpu() if float(nearest.sum()) > 0 else torch.ones(len(points))
        chosen.append(int(torch.multinomial(weights, 1, generator=generator)))
    return chosen
