"""The state a run is resumed from (`checkpoints/last.ckpt`): written whole, checked for damage, never unpickled.

Lightning's own writer goes through the system's temporary folder, which on a cluster is another file system: the last
copy is then no single step, and a kill leaves half a file. Here the new file lies beside the old one and replaces it.
"""

import io
import pickle
import zipfile
from pathlib import Path

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from wide.records import write_whole


class WholeCheckpoints(TorchCheckpointIO):
    """Lightning's checkpoint files, each the old one or the new one, and tensors only."""

    def save_checkpoint(self, checkpoint: dict, path: str | Path, storage_options: object = None) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(Path(path), buffer.getvalue())

    def load_checkpoint(self, path: str | Path, map_location=None, weights_only: bool | None = True) -> dict:
        """The checkpoint on the CPU; ValueError for a damaged file, other objects than tensors, or another kind."""
        check_whole(path)
        try:
            checkpoint = torch.load(path, map_location=map_location or "cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            cause = str(error).strip().split("\n")[0]
            raise ValueError(f"{path} holds more than tensors and is not loaded: {cause}") from None
        if not isinstance(checkpoint, dict) or not {"state_dict", "history", "global_step"} <= checkpoint.keys():
            raise ValueError(f"{path} is no resumable checkpoint of this project")
        return checkpoint


def check_whole(path: str | Path) -> None:
    """ValueError unless every part of the file has the checksum it was written with."""
    try:
        with zipfile.ZipFile(path) as parts:
            damaged = parts.testzip()
    except (zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} is incomplete or no checkpoint: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if damaged is not None:
        raise ValueError(f"{path} is damaged: the checksum of {damaged} is wrong")
