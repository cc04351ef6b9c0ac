"""FFN channels into their new order, before anything else is fitted; a resumed run takes the order it had."""

import torch

from experiments.dials import calibration_batches
from experiments.train import checkpoint_to_resume
from wide.cluster import find_order, permute_channels
from wide.data.module import CalibrationData
from wide.model import RoutedModel
from wide.options import Config

NUM_BLOCKS = 64
"""Training blocks offered; `wide.cluster` stops reading when it has seen enough tokens."""

BUFFER = "routed.gates.channel_order"


def arrange_channels(config: Config, routed: RoutedModel, data: CalibrationData) -> None:
    """Permute the model where its method asks for it (`method.cluster_channels`); the order stays in the provider."""
    order = routed.gates.channel_order
    if order is None:
        return
    resumed = checkpoint_to_resume(config.resume)
    if resumed is None:
        batches = calibration_batches(config, data, NUM_BLOCKS, next(routed.model.parameters()).device)
        found = find_order(routed, batches, config.seed)
    else:
        found = torch.load(resumed, map_location="cpu", weights_only=True)["state_dict"].get(BUFFER)
        if found is None:
            raise ValueError(f"resume={config.resume!r} has its channels in stock order, method.cluster_channels=true")
    order.copy_(found)
    permute_channels(routed, order)
