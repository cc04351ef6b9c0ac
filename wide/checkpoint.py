"""The checkpoint folder: `routers.safetensors`, `wide_config.json`, `README.md` (model card), `adapter/` after LoRA.

It holds what was trained and what it belongs to, never the base weights: base source and fingerprint, geometry,
method, dial curve, recipe, metrics, versions, and a sha256 of the tensors. Written into a sibling folder and moved
into place, so a killed save leaves the previous checkpoint. Loading insists on the right base, a whole file and
exactly the expected keys; there is no path on which a dense model is returned silently.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from wide import families
from wide.base_model import fingerprint, load_base
from wide.config import ModelConfig, to_dataclass
from wide.dial import DialPoint, dial_for
from wide.methods import load as load_method
from wide.model import RoutedModel

FORMAT_VERSION = 1
TENSORS, CONFIG, CARD = "routers.safetensors", "wide_config.json", "README.md"


def save_pretrained(
    routed: RoutedModel,
    folder: str | Path,
    *,
    model: ModelConfig,
    method: object,
    base_fingerprint: str,
    curve: list[DialPoint] = (),
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
        curve: fitted dial points, for `sparsity=` at load time.
        recipe, metrics, versions: JSON-ready, kept for the reader.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / CONFIG).exists():
        raise ValueError(f"{folder} is not empty and holds no {CONFIG}; choose an empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_file(_tensors(routed, curve), staging / TENSORS)
        if routed.model is not routed.base:
            routed.model.save_pretrained(staging / "adapter")
        config = {
            "format_version": FORMAT_VERSION,
            "base": dataclasses.asdict(model) | {"fingerprint": base_fingerprint},
            "geometry": dataclasses.asdict(routed.geometry),
            "method": dataclasses.asdict(method),
            "dial_curve": [{"target": p.target, "measured": p.measured} for p in curve],
            "recipe": recipe or {},
            "metrics": metrics or {},
            "versions": versions or {},
            "sha256": {TENSORS: _sha256(staging / TENSORS)},
        }
        (staging / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        (staging / CARD).write_text(model_card(config))
        _sync(staging)
        _replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _tensors(routed: RoutedModel, curve: list[DialPoint]) -> dict[str, torch.Tensor]:
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
    """Move `staging` to `folder`; an old checkpoint is moved aside first and removed last."""
    if not folder.exists():
        os.rename(staging, folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
    os.rename(folder, old / folder.name)
    os.rename(staging, folder)
    shutil.rmtree(old)


def read_config(folder: str | Path) -> dict:
    """The checkpoint's JSON, checked for version and for whole tensors.

    Raises:
        ValueError: no checkpoint, another format, or a tensor file that is missing, incomplete or altered.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} is no WIDE checkpoint: {CONFIG} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder / CONFIG} is incomplete or not JSON: {error}") from None
    if config.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{folder / CONFIG}: format_version {config.get('format_version')!r}; legal: {FORMAT_VERSION}")
    path = folder / TENSORS
    if not path.exists():
        raise ValueError(f"{path} is missing: the checkpoint is incomplete")
    if _sha256(path) != config["sha256"][TENSORS]:
        raise ValueError(f"{path} is incomplete or altered: its sha256 differs from the one in {CONFIG}")
    return config


def from_pretrained(
    folder: str | Path,
    *,
    sparsity: float | None = None,
    device: str | torch.device = "cpu",
    base: ModelConfig | None = None,
) -> RoutedModel:
    """Load base and routers; the routed model in eval mode on `device`.

    Args:
        folder: a checkpoint folder, or a hub id of one.
        sparsity: dial it to this total sparsity (needs a stored curve); None keeps the trained setting.
        base: where to take the base from, when it is not where the checkpoint says.

    Raises:
        ValueError: damaged folder, wrong base, missing or unexpected tensors, sparsity outside the curve.
    """
    folder = _local_folder(folder)
    config = read_config(folder)
    stored = {k: v for k, v in config["base"].items() if k != "fingerprint"}
    model_config = base or to_dataclass(stored, ModelConfig, "base")
    model = load_base(model_config, torch.device(device))
    if fingerprint(model) != config["base"]["fingerprint"]:
        raise ValueError(f"{folder} was trained on another base than {model_config.path or model_config.source!r}")
    method = load_method(config["method"]["name"])
    geometry = families.Geometry(**config["geometry"])
    method_config = to_dataclass(config["method"], method.Config, "method")
    gates = method.build(method_config, geometry)
    tensors = _read_tensors(folder / TENSORS)
    dials = tensors.pop("dial_curve", None)
    wanted, found = set(gates.state_dict()), set(tensors)
    if wanted != found:
        raise ValueError(f"{folder / TENSORS}: missing {sorted(wanted - found)}, unexpected {sorted(found - wanted)}")
    gates.load_state_dict(tensors)
    if (folder / "adapter").exists():
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder / "adapter")).requires_grad_(False)
    routed = RoutedModel(model, gates.to(device), families.load(geometry.family)).eval()
    if sparsity is not None:
        points = [
            DialPoint(p["target"], p["measured"], dial)
            for p, dial in zip(config["dial_curve"], dials if dials is not None else [], strict=True)
        ]
        routed.gates.dial.copy_(dial_for(points, sparsity))
    return routed


def push_to_hub(folder: str | Path, repo_id: str, private: bool = True) -> str:
    """Upload a checkpoint folder; returns its address. Needs a logged-in Hugging Face account."""
    from huggingface_hub import HfApi

    read_config(folder)
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    return str(api.upload_folder(repo_id=repo_id, folder_path=str(folder)))


def model_card(config: dict) -> str:
    """README of the checkpoint: what it is, what was measured, how to load it."""
    base = config["base"]
    method = config["method"]
    rows = "\n".join(f"| {key} | {value} |" for key, value in sorted(config["metrics"].items()))
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


def _local_folder(folder: str | Path) -> Path:
    path = Path(folder)
    if path.is_dir():
        return path
    name = str(folder)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name))
    raise ValueError(f"checkpoint folder {name!r} does not exist")


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is incomplete or no safetensors file: {error}") from None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
