"""Reading a checkpoint folder: found here or on the hub, whole, unaltered, and holding nothing beside what it lists.

Every fault is a `ValueError` that names the file. Nothing is unpickled: tensors are safetensors, the rest is JSON.
`wide.checkpoint` writes the folder and builds the model.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from wide.hub import is_hub_id

FORMAT_VERSION = 2
TENSORS, CONFIG, CARD = "routers.safetensors", "wide_config.json", "README.md"


def read_config(folder: str | Path) -> dict:
    """The checkpoint's JSON, checked for version and for whole files.

    Raises:
        ValueError: no checkpoint, another format, or a file that is missing, incomplete or altered.
    """
    folder = Path(folder)
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} is no WIDE checkpoint: {CONFIG} is missing") from None
    except (ValueError, RecursionError) as error:  # also bytes that are no text, numbers of thousands of digits
        raise ValueError(f"{path} is incomplete or not JSON: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    version = config.get("format_version") if isinstance(config, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: format_version {version!r}; legal: {FORMAT_VERSION}")
    _check_config(path, config)
    for name, digest in config["sha256"].items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing: the checkpoint is incomplete")
        if sha256(folder / name) != digest:
            raise ValueError(f"{folder / name} is incomplete or altered: its sha256 differs from the one in {CONFIG}")
    unlisted = [name for name in digests(folder) if name not in config["sha256"] and name != CONFIG]
    if unlisted:
        raise ValueError(f"{folder / unlisted[0]} is no part of the checkpoint: {CONFIG} does not list it")
    return config


def _check_config(path: Path, config: dict) -> None:
    """ValueError unless every part that loading reads is there, and of its kind."""
    kinds = {"base": dict, "geometry": dict, "method": dict, "dial_curve": list, "sha256": dict}
    lost = [key for key in kinds if key not in config]
    if lost:
        raise ValueError(f"{path} is incomplete: it says nothing of {', '.join(lost)}")
    wrong = [key for key, kind in kinds.items() if not isinstance(config[key], kind)]
    if wrong or not all(isinstance(p, dict) and {"target", "measured"} <= p.keys() for p in config["dial_curve"]):
        raise ValueError(f"{path} is no checkpoint's: {', '.join(wrong) or 'dial_curve'} is of another kind")
    parts = {"base": "fingerprint", "method": "name", "sha256": TENSORS}
    lost = [f"{key}.{part}" for key, part in parts.items() if part not in config[key]]
    if lost:
        raise ValueError(f"{path} is incomplete: it says nothing of {', '.join(lost)}")
    for name in config["sha256"]:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path}: {name!r} lies outside the checkpoint")


def local_folder(folder: str | Path) -> Path:
    """A checkpoint folder as it is, or the downloaded one of a hub id `OWNER/NAME`.

    The network is asked only where no folder OWNER is here: else NAME is taken for a mistyped path. Of the hub's
    folder nothing but tensors, JSON and the card is fetched.

    Raises:
        ValueError: neither a folder nor a hub id, or a hub that does not answer or has no such checkpoint.
    """
    path, name = Path(folder), str(folder)
    if path.is_dir():
        return path
    if not is_hub_id(name) or path.exists() or path.parent.exists():
        raise ValueError(f"checkpoint folder {name!r} does not exist; legal: a folder, or a hub id OWNER/NAME")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.md"]))
    except (OSError, ValueError) as error:  # no network, no such repository, no access
        cause = str(error).strip().split("\n")[0]
        raise ValueError(f"{name!r} is no folder here, and the hub did not give it: {cause}") from error


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is incomplete or no safetensors file: {error}") from None


def check_tensors(path: Path, wanted: dict[str, torch.Size], tensors: dict[str, torch.Tensor]) -> None:
    """ValueError unless `tensors` are exactly the wanted ones, by name and shape."""
    missing, unexpected = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unexpected:
        raise ValueError(f"{path}: missing {missing}, unexpected {unexpected}")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{path}: {name} is {list(tensors[name].shape)}, the config asks for {list(shape)}")


def digests(folder: Path) -> dict[str, str]:
    """sha256 of the tensors and of the adapter's files, by their path inside the folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".safetensors", ".json")]
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
