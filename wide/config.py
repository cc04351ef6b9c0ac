"""From Hydra's composed config to dataclasses. The only file of `wide` that knows Hydra and OmegaConf.

`build` turns the composed node into a `Config` in one call, before anything heavy is loaded; the caller passes the
method's `Config` class.
"""

import dataclasses
import difflib
import os
import secrets
from datetime import datetime
from typing import Any, TypeVar, cast

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from wide.options import GROUPS, Config, RootConfig

T = TypeVar("T")


def to_dataclass(node: object, cls: type[T], group: str) -> T:
    """Validate one group's node against its dataclass: unknown keys, types, then ranges. The root's group is "".

    Raises:
        ValueError: one line naming the key, its value and the legal ones.
    """
    plain = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    if not isinstance(plain, dict):
        raise ValueError(f"{group}={plain!r} must be a group of options")
    prefix = f"{group}." if group else ""
    legal = [prefix + f.name for f in dataclasses.fields(cast(Any, cls))]
    for key in plain:
        if f"{prefix}{key}" not in legal:
            raise ValueError(unknown_key(f"{prefix}{key}", legal if group else [*legal, *GROUPS, "method"]))
    try:
        return cast(T, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), plain)))
    except OmegaConfBaseException as error:
        cause = str(error).split("\n")[0]
        raise ValueError(f"{prefix}{error.full_key or ''}: {cause}") from None


def unknown_key(key: str, legal: list[str]) -> str:
    """One line for a misspelt key: the nearest ones, then all."""
    close = difflib.get_close_matches(key, legal, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{key} is unknown; {hint}legal: {', '.join(legal)}"


def build(node: DictConfig, method_config: type, output_dir: str) -> Config:
    """Turn the composed config into dataclasses, all checks run. `method_config` is the method's `Config`."""
    classes = {**GROUPS, "method": method_config}
    for name in classes:
        if name not in node:
            raise ValueError(f"{name} is missing; every run needs the groups {', '.join(classes)}")
    groups: dict[str, Any] = {name: to_dataclass(node[name], cls, name) for name, cls in classes.items()}
    root = to_dataclass({key: node[key] for key in node if key not in classes}, RootConfig, "")
    return Config(**groups, **vars(root), output_dir=output_dir)


def register_schemas() -> None:
    """Give Hydra the dataclasses, so that each group knows its legal keys and types at composition."""
    store = ConfigStore.instance()
    for name, cls in GROUPS.items():
        store.store(group=name, name="schema", node=cls)
    OmegaConf.register_new_resolver("run_stamp", run_stamp, use_cache=True, replace=True)


def run_stamp() -> str:
    """Time and a random suffix that name a run's folder: one and the same on all ranks of a run.

    Ranks of one srun step read theirs off the step; of those that torchrun started, rank 0 draws for all.
    """
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return f"slurm-{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    stamp = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(3)}"
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return stamp
    from torch.distributed.rendezvous import rendezvous  # imported here: help and completion answer without torch

    store, rank, _ = next(rendezvous("env://"))
    if rank == 0:
        store.set("wide/run_stamp", stamp)
    return store.get("wide/run_stamp").decode()
