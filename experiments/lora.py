"""Stage 2 for the pipeline: from stage 1's routers to a model with LoRA in it, ready for `wide.stages.lora.Lora`."""

import warnings
from dataclasses import asdict
from pathlib import Path

from wide.adapter import LoraRoutedModel, add_lora
from wide.checkpoint import load_gates, read_config
from wide.cluster import permute_channels
from wide.model import RoutedModel
from wide.options import Config

OBJECTIVE = (
    "init_gap",
    "ramp_ratio",
    "tau_start",
    "tau_end",
    "budget_weight",
    "budget_price",
    "budget_scope",
    "distill_weight",
    "separation_weight",
    "dial",
)
"""Options of a method that stage 2 may choose anew; all others must be those the routers were trained with."""


def check(config: Config) -> Path | None:
    """Folder of stage 1's checkpoint, its method compared with the run's; None for a method without routers, and for
    one whose routers and LoRA may learn together.

    Raises:
        ValueError: no checkpoint there, a damaged one, or one of another method; all before any weight is loaded.
    """
    if config.stage.name != "lora":
        return None
    if config.stage.from_checkpoint is None:
        if hasattr(config.method, "targets") and not getattr(config.method, "trains_with_lora", False):
            raise ValueError("stage=lora needs stage.from_checkpoint=FOLDER, a run or checkpoint folder of stage 1")
        return None
    folder = Path(config.stage.from_checkpoint)
    folder = folder / "checkpoint" if (folder / "checkpoint").is_dir() else folder
    trained, asked = read_config(folder)["method"], asdict(config.method)
    for key in sorted(trained.keys() | asked.keys()):
        if key not in OBJECTIVE and trained.get(key) != asked.get(key):
            raise ValueError(
                f"method.{key}={asked.get(key)!r} but the routers in {folder} have {trained.get(key)!r}; "
                "legal: the method options of stage 1"
            )
    return folder


def start(config: Config, routed: RoutedModel, base_fingerprint: str) -> LoraRoutedModel:
    """Put stage 1's routers (if a checkpoint is named) and fresh LoRA into a routed stock model.

    Args:
        routed: the stock base with the run's provider, fresh or just calibrated; spent afterwards.
        base_fingerprint: that of the stock base.
    """
    folder = check(config)
    if folder is not None:
        if read_config(folder)["base"]["fingerprint"] != base_fingerprint:
            raise ValueError(f"stage.from_checkpoint={str(folder)!r} was trained on another base than this run's")
        load_gates(routed.gates, folder)
        if routed.gates.channel_order is not None:
            permute_channels(routed, routed.gates.channel_order)
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # peft 0.21 under transformers 5.24
    return add_lora(routed, config.stage, config.seed)
