"""The checkpoint folder: `routers.safetensors`, `wide_config.json`, `README.md` (model card), `adapter/` after LoRA.

It holds what was trained and what it belongs to, never the base weights: base source and fingerprint, geometry,
method, dial curve, recipe, metrics, versions, and a sha256 of every file that is loaded. Written into a sibling folder
and moved into place, so a killed save leaves the previous checkpoint. Loading insists on the right base, whole files
and exactly the expected keys; there is no path on which a dense model is returned silently.
"""

import ctypes
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from wide import families
from wide.adapter import FOLDER as ADAPTER
from wide.adapter import LoraRoutedModel, load_adapter, save_adapter
from wide.base_model import fingerprint, load_base
from wide.checkpoint_files import (
    CARD,
    CONFIG,
    FORMAT_VERSION,
    TENSORS,
    check_tensors,
    digests,
    local_folder,
    read_config,
    read_tensors,
)
from wide.cluster import permute_channels, stock_order
from wide.config import to_dataclass
from wide.dial import DialPoint, dial_for
from wide.hub import is_hub_id
from wide.methods import load as load_method
from wide.methods.provider import GateProvider
from wide.model import RoutedModel
from wide.options import MethodConfig, ModelConfig
from wide.records import write_json
from wide.sharding import is_sharded


def save_pretrained(
    routed: RoutedModel,
    folder: str | Path,
    *,
    model: ModelConfig,
    method: MethodConfig,
    base_fingerprint: str,
    curve: Sequence[DialPoint] = (),
    recipe: dict | None = None,
    metrics: dict | None = None,
    versions: dict | None = None,
) -> Path:
    """Write the checkpoint folder atomically and return its path.

    Args:
        routed: the trained model; its gate provider's parameters and buffers are stored in their own dtype.
        folder: target; an existing checkpoint there is replaced, any other non-empty folder is refused.
        model, method: the configs that rebuild base and provider.
        base_fingerprint: `wide.base_model.fingerprint` of the stock model before anything was attached to it.
        curve: fitted dial points, for `sparsity=` at load time. The rest is JSON, kept for the reader.
    """
    folder = Path(folder)
    _check_target(routed, folder, base_fingerprint)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_tensors(_tensors(routed, curve), staging / TENSORS)
        if routed.model is not routed.base:
            with stock_order(routed, adapter_only=True):  # so that peft alone can put it on the stock model
                save_adapter(routed, staging, model)
        config = {
            "format_version": FORMAT_VERSION,
            "base": dataclasses.asdict(model) | {"fingerprint": base_fingerprint},
            "geometry": dataclasses.asdict(routed.geometry),
            "method": dataclasses.asdict(method),
            "dial_curve": [{"target": p.target, "measured": p.measured} for p in curve],
            "recipe": recipe or {},
            "metrics": metrics or {},
            "versions": versions or {},
            "sha256": digests(staging),
        }
        write_json(staging / CONFIG, config, indent=2, sort_keys=True)
        (staging / CARD).write_text(model_card(config))
        _sync(staging)
        _replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _check_target(routed: RoutedModel, folder: Path, base_fingerprint: str) -> None:
    """ValueError for a base that is no longer the stock one, and for a folder that holds something else."""
    if routed.model is routed.base and not is_sharded(routed.base):  # of a sharded base each rank has a part
        with stock_order(routed):
            found = fingerprint(routed.base)
        if found != base_fingerprint:
            raise ValueError("the base weights have changed (LoRA merged into them?); save the checkpoint before that")
    if folder.exists() and any(folder.iterdir()) and not (folder / CONFIG).exists():
        raise ValueError(f"{folder} is not empty and holds no {CONFIG}; choose an empty folder")


def _write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """OSError for a disk that is full, as for every other file."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def _tensors(routed: RoutedModel, curve: Sequence[DialPoint]) -> dict[str, torch.Tensor]:
    tensors = {name: t.detach().cpu().contiguous() for name, t in routed.gates.state_dict().items()}
    if curve:
        tensors["dial_curve"] = torch.stack([point.dial for point in curve])
    return tensors


def _sync(folder: Path) -> None:
    """On disk before it is moved into place, and readable by others as any other output."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    folder.chmod(0o755)


def _replace(staging: Path, folder: Path) -> None:
    """Move `staging` to `folder`. An old checkpoint there ends up at `staging`: swapped in one step where the system
    can, else moved aside first and moved back if that fails.
    """
    if not folder.exists():
        os.rename(staging, folder)
    elif not _swap(staging, folder):
        aside = staging.with_name(f"{staging.name}-old")
        os.rename(folder, aside)
        try:
            os.rename(staging, folder)
        except OSError:
            os.rename(aside, folder)
            raise
        os.rename(aside, staging)


def _swap(one: Path, other: Path) -> bool:
    """Exchange two folders atomically (renameat2 of Linux); False where system or file system cannot."""
    if sys.platform != "linux":
        return False
    here, exchange = -100, 2
    try:
        return ctypes.CDLL(None).renameat2(here, bytes(one), here, bytes(other), exchange) == 0
    except AttributeError:  # a C library without it
        return False


def from_pretrained(
    folder: str | Path,
    *,
    sparsity: float | None = None,
    device: str | torch.device = "cpu",
    base: ModelConfig | None = None,
) -> RoutedModel:
    """Load base and routers; the routed model in eval mode on `device`.

    What a checkpoint says is never enough to run code that comes with a base: that needs `base`.

    Args:
        folder: a checkpoint folder, or a hub id of one.
        sparsity: dial it to this total sparsity (needs a stored curve); None keeps the trained setting.
        base: where to take the base from, when it is not where the checkpoint says.

    Raises:
        ValueError: damaged folder, wrong base, missing or unexpected tensors, sparsity outside the curve, a stored
            geometry that is not the base's.
    """
    folder = local_folder(folder)
    config = read_config(folder)
    model_config = base or stored_base(folder, config)
    model = load_base(model_config, torch.device(device))
    if fingerprint(model) != config["base"]["fingerprint"]:
        raise ValueError(f"{folder} was trained on another base than {model_config.path or model_config.source!r}")
    method = load_method(config["method"]["name"])
    geometry = families.Geometry.from_hf(model.config)
    check_geometry(folder, config, geometry)
    method_config = to_dataclass(config["method"], method.Config, "method")
    gates = method.build(method_config, geometry)
    dials = load_gates(gates, folder)
    whole: PreTrainedModel | PeftModel = model
    with_masks = RoutedModel
    if any(name.startswith(f"{ADAPTER}/") for name in config["sha256"]):
        whole, with_masks = load_adapter(model, folder), LoraRoutedModel
    routed = with_masks(whole, gates.to(device), families.load(geometry.family)).eval()
    if gates.channel_order is not None:
        permute_channels(routed, gates.channel_order)
    if sparsity is not None:
        routed.gates.dial.copy_(dial_for(_curve(folder, config, dials), sparsity))
    return routed


def _curve(folder: Path, config: dict, dials: torch.Tensor) -> list[DialPoint]:
    stored = config["dial_curve"]
    if len(stored) != len(dials):
        raise ValueError(f"{folder / CONFIG} lists {len(stored)} dial points, {TENSORS} holds {len(dials)}")
    return [DialPoint(p["target"], p["measured"], dial) for p, dial in zip(stored, dials, strict=True)]


def stored_base(folder: Path, config: dict) -> ModelConfig:
    """Where the checkpoint says its base is.

    Raises:
        ValueError: a base that brings its own code, which only the caller may allow.
    """
    stored = {key: value for key, value in config["base"].items() if key != "fingerprint"}
    model = to_dataclass(stored, ModelConfig, "base")
    if model.trust_remote_code:
        raise ValueError(
            f"{folder} asks for the code that comes with its base {model.path!r}; if you trust it, say so by "
            "base=ModelConfig(..., trust_remote_code=True)"
        )
    return model


def check_geometry(folder: Path, config: dict, geometry: families.Geometry) -> None:
    """ValueError where the sizes that the checkpoint stores are not those of the base."""
    stored, found = config["geometry"], dataclasses.asdict(geometry)
    for key in sorted(stored.keys() | found.keys()):
        if stored.get(key) != found.get(key):
            raise ValueError(
                f"{folder / CONFIG}: geometry.{key} is {stored.get(key)!r}, that of the base is {found.get(key)!r}"
            )


def load_gates(gates: GateProvider, folder: Path) -> torch.Tensor:
    """Fill a provider from a checkpoint folder, exactly its tensors; returns the rows of the dial curve, if any."""
    tensors = read_tensors(folder / TENSORS)
    dials = tensors.pop("dial_curve", torch.empty(0))
    check_tensors(folder / TENSORS, {name: t.shape for name, t in gates.state_dict().items()}, tensors)
    gates.load_state_dict(tensors)
    return dials


def push_to_hub(folder: str | Path, repo_id: str, private: bool = True) -> str:
    """Upload a checkpoint folder; returns its address. Needs a logged-in Hugging Face account."""
    from huggingface_hub import HfApi

    if not is_hub_id(repo_id):
        raise ValueError(f"repo_id={repo_id!r} is no hub id; legal: OWNER/NAME of letters, digits and _ . -")
    read_config(folder)
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    return str(api.upload_folder(repo_id=repo_id, folder_path=str(folder)))


def model_card(config: dict) -> str:
    """README of the checkpoint: what it is, what was measured, how to load it."""
    base = config["base"]
    method = config["method"]
    figures = {key: value for key, value in config["metrics"].items() if isinstance(value, int | float)}
    rows = "\n".join(f"| {key} | {value} |" for key, value in sorted(figures.items()))
    return f"""---
library_name: wide
base_model: {base["path"] or base["name"]}
tags: [wide, dynamic-width, pruning]
---
# {base["name"]} with {method["name"]} routing, {method["sparsity"]:.0%} asked

Routers for token-level dynamic width. The base weights are not in this folder.

| measured on held-out text | |
| --- | --- |
{rows}

```python
from wide.checkpoint import from_pretrained

model = from_pretrained("path/of/this/folder")
```
"""
