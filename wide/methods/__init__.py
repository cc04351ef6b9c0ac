"""Pruning methods: one file each, the file name is the key in the config. A method is a *gate provider*.

A method file holds `Config` (its options, range-checked) and `build(config, geometry) -> GateProvider`. The provider
says, per layer and token, which head groups and which channel groups run; everything else (masks, statistics,
training, checkpoints, evaluation) is shared. A method never mentions a model family.
"""

import difflib
import importlib
import pkgutil
from types import ModuleType


def names() -> list[str]:
    """Every method: the file names of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "provider")


def load(name: str) -> ModuleType:
    """Module of a method; ValueError listing the known ones and the closest otherwise."""
    if name not in names():
        close = difflib.get_close_matches(str(name), names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"method.name={name!r} is unknown; known: {', '.join(names())}{hint}")
    return importlib.import_module(f"{__name__}.{name}")
