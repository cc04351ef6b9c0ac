"""Turn a mistake in the command line or a config into one line that names the legal values.

Hydra's own errors are long and name no alternatives for a misspelt key; ours are `ValueError`s with the answer in
them. Anything else is a failure of the run and keeps its traceback.
"""

import dataclasses
import difflib
import errno
import re
import traceback
from collections import Counter
from pathlib import Path

from hydra.errors import ConfigCompositionException, HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from wide.config import unknown_key
from wide.options import GROUPS, Config
from wide.records import redact

ROOT = Path(__file__).parent.parent
ENVIRONMENT = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
)
"""Errors of the system that say what is wrong by themselves: a full disk, a folder that may not be written."""


def explain(error: BaseException) -> str | None:
    """One line for a user's mistake, without secrets; None when it is no mistake of the user's."""
    line = _explain(error)
    return None if line is None else redact(line)


def _explain(error: BaseException) -> str | None:
    if isinstance(error, ConfigCompositionException | HydraException | OmegaConfBaseException):
        return _explain_hydra(error)
    if isinstance(error, ValueError) and _is_ours(error):
        return str(error)
    if isinstance(error, OSError) and error.errno in ENVIRONMENT:
        return f"{error.strerror}: {error.filename or 'while writing'}; what was saved before is whole"
    if isinstance(error, ValueError) and "Config group override must be" in str(error):  # Hydra's, for `model=null`
        return f"a group cannot be null; write GROUP=OPTION for {', '.join([*GROUPS, 'method'])}"
    return None


def _is_ours(error: BaseException) -> bool:
    """Whether the error was raised by a line of this project, not by a library it called."""
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return any(last.is_relative_to(ROOT / part) for part in ("wide", "experiments", "kernels"))


def _explain_hydra(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} cannot be read ({text.splitlines()[0]}); legal: KEY=VALUE, +KEY=VALUE, ~KEY"
    plugin = re.search(r"Could not find 'hydra/(launcher|sweeper)/([^']+)'", text)
    if plugin:
        extra = "ray" if plugin[2].startswith("ray") else "sweep"
        return f"hydra/{plugin[1]}={plugin[2]} is not installed here; pip install -e '.[{extra}]' brings it"
    missing = re.search(r"Could not find '([^'/]+)/([^']+)'", text)
    if missing:
        options = [o for o in re.findall(r"^\t(\w+)$", text, re.M) if o != "schema"]
        return _unknown_option(missing[1], missing[2], options)
    key = re.search(r"Could not override '([^']+)'", text)
    if key and key[1] == "experiment":
        return "experiment has no default to override: write +experiment=NAME"
    if key and key[1].startswith("hydra."):
        return f"{key[1]} is no setting of Hydra's"
    if key:
        return unknown_key(key[1], _legal_keys(key[1]))
    append = re.search(r"Could not append to config.*?'([^']+)'", text, re.S)
    if append:
        return f"{append[1]} exists already: write {append[1]}=VALUE without the plus"
    twice = re.match(r"Multiple values for (\w+)", text)
    if twice:
        return f"{twice[1]} has a value already: write {twice[1]}=OPTION, once and without the plus"
    cause = error.__cause__ or error
    line = " ".join(str(cause).split("\n")[0].split())
    full_key = getattr(cause, "full_key", None)
    return f"{full_key}: {line}" if full_key else line or type(error).__name__


def _unknown_option(group: str, option: str, options: list[str]) -> str:
    close = difflib.get_close_matches(option, options, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{group}={option} is unknown; {hint}legal: {', '.join(options)}"


def _legal_keys(key: str) -> list[str]:
    group = key.split(".")[0]
    if group in GROUPS and "." in key:
        return [f"{group}.{field.name}" for field in dataclasses.fields(GROUPS[group])]
    if group == "method" and "." in key:
        from wide import methods

        fields = {f.name for name in methods.names() for f in dataclasses.fields(methods.load(name).Config)}
        return [f"method.{name}" for name in sorted(fields)]
    return [field.name for field in dataclasses.fields(Config) if field.name != "output_dir"]


def check_sweep(arguments: list[str], jobs: Counter[str]) -> None:
    """A sweep whose glob matched nothing must not look like success."""
    sweeps = "-m" in arguments or "--multirun" in arguments
    if sweeps and not jobs["started"]:
        raise ValueError("the sweep launched no job: does a glob in it match nothing?")
