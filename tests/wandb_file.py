"""Reads a W&B offline file back: a log of length-prefixed protobuf records in blocks of 32 KiB (LevelDB's format)."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from wandb.proto import wandb_internal_pb2

BLOCK, FILE_HEADER, RECORD_HEADER = 32768, 7, 7
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[wandb_internal_pb2.Record]:
    data = path.read_bytes()
    assert data.startswith(b":W&B")
    position, parts = FILE_HEADER, b""
    while position + RECORD_HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < RECORD_HEADER:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if position + RECORD_HEADER + length > len(data):  # still being written
            return
        parts += data[position + RECORD_HEADER : position + RECORD_HEADER + length]
        position += RECORD_HEADER + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def records_of_ended_run(path: Path, patience_s: float = 20.0) -> list[wandb_internal_pb2.Record]:
    """All records once the exit record is on disk: W&B's writer is a process of its own and may lag behind `finish`."""
    end = time.monotonic() + patience_s
    while True:
        found = list(records(path))
        if time.monotonic() > end or any(record.HasField("exit") for record in found):
            return found
        time.sleep(0.1)


class OfflineRun:
    """`history` rows, `config`, step axes and exit code of the one ended run under `folder`."""

    def __init__(self, folder: Path):
        (path,) = folder.glob("wandb/offline-run-*/*.wandb")
        self.history: list[dict] = []
        self.config: dict = {}
        self.step_axes: dict[str, str] = {}
        self.exit_code: int | None = None
        for record in records_of_ended_run(path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                self.history.append({_key(item): json.loads(item.value_json) for item in record.history.item})
            elif kind == "run":
                self.run = record.run
                self.config |= {_key(item): json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "metric":
                self.step_axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
            elif kind == "exit":
                self.exit_code = record.exit.exit_code


def _key(item) -> str:
    return item.key or ".".join(item.nested_key)
