"""Results rows as the tables read them: the derived columns, and the selection of one cell's rows."""

import functools
import hashlib
import json
import math
import warnings
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from wide.options import GROUPS
from wide.results import read_rows

ROOT = Path(__file__).parent.parent.parent
DEFAULT_ROWS = ROOT / "experiments" / "results" / "*.jsonl"
SIZES = ("sparsity", "attention_sparsity", "ffn_sparsity", "attn_group_size", "ffn_group_size", "budget_price")
"""Options of a method that place a run in a table; the others make its recipe."""
ASIDE = ("seed", "eval", "logger", "output_dir", "results_file", "experiment_name", "trainer", "resume", "bench")
"""Parts of a config that do not make two runs different ones."""
PLACES = ("from_checkpoint", "cache_dir", "save_every", "log_every", "val_every")
"""The same inside a group."""


@dataclass(frozen=True)
class Spec:
    """What a cell asks for. None matches anything; `recipe` is a file of conf/method; `matched` is what was held equal,
    "mean", "cost" or "equal" (separate budgets).
    """

    model: str
    method: str
    percent: int | None = None
    recipe: str | None = None
    attn_group: int | None = None
    ffn_group: int | None = None
    matched: str = "mean"
    stage: str | None = "calibrate"

    def where(self, **changes: Any) -> "Spec":
        return replace(self, **changes)


def load(paths: str | Path | list[str] = DEFAULT_ROWS) -> pd.DataFrame:
    """All pipeline rows and, under the same run, one more for each setting its dial was also fitted to.

    Runs repeated with the same config count once: the last finished one, or the last one where none finished.
    """
    rows = read_rows(paths).to_dict("records")
    latest: dict[str, dict] = {}
    for row in rows:
        if not all(isinstance(row.get(key), str) for key in ("run_id", "status", "config_hash")):
            warnings.warn(
                f"a row without run_id, status or config_hash is no run's and was skipped ({paths})", stacklevel=2
            )
            continue
        old = latest.get(row["config_hash"])
        if old is None or row["status"] == "finished" or old["status"] == "failed":
            latest[row["config_hash"]] = row
    found = [derived for row in latest.values() for derived in _derive(row)]
    frame = pd.DataFrame(found)
    return frame if len(frame) else pd.DataFrame(columns=[*(field.name for field in fields(Spec)), *_ALWAYS])


_ALWAYS = (
    "status",
    "variant",
    "changes",
    "finished",
    "run",
    "command",
    "action",
    "experiment",
    "seed",
    "trained_percent",
)


def _derive(row: dict) -> list[dict]:
    """The row with the columns of a `Spec`, and its `other_settings` as rows of their own."""
    config = row.get("config") or {}
    method, stage = config.get("method") or {}, config.get("stage") or {}
    recipe, changes = recipe_of(method)
    equal = method.get("attention_sparsity") is not None and method.get("attention_sparsity") == method["ffn_sparsity"]
    dtype = config.get("model", {}).get("dtype", "auto")
    common = {
        "recipe": recipe,
        "changes": ", ".join([*changes, *([f"{dtype} weights"] if dtype == "float32" else [])]),
        "attn_group": method.get("attn_group_size"),
        "ffn_group": method.get("ffn_group_size"),
        "stage": stage.get("name"),
        "variant": variant(config),
        "run": f"{row['run_id']}, {row['config_hash']}",  # jobs of two sweeps may have the same id
        "matched": "equal" if equal else method.get("budget_price", "mean"),
        "percent": _percent(0.0 if row.get("method") == "dense" else row.get("asked_sparsity")),
        "trained_percent": _percent(row.get("asked_sparsity")),
    }
    main = row | common
    others = row.get("other_settings")
    dialled = []
    for other in others if isinstance(others, list) else []:
        figures = {key: value for key, value in other.items() if key not in ("price", "asked")}
        known = {key: value for key, value in main.items() if key not in _FIGURES and not key.startswith(_PREFIXES)}
        place = {"matched": other["price"], "percent": _percent(other["asked"]), "dialled": True}
        dialled.append(known | figures | place)
    return [main, *_matched_twice(main), *dialled]


def _matched_twice(row: dict) -> list[dict]:
    """The row again as matched by cost, where it skips the same share of decisions and of parameters: whole layers, an
    equal share of every module.
    """
    decisions, parameters = (row.get(key) for key in ("sparsity_total", "skipped_params"))
    if decisions is None or parameters is None or not abs(decisions - parameters) <= SAME:  # also where it is NaN
        return []
    return [row | {"matched": "cost", "dialled": True}] if row["matched"] == "mean" else []


SAME = 0.005
"""Skipped shares of decisions and parameters closer than this are one."""
_FIGURES = ("dense_perplexity", "routed_perplexity", "log_perplexity_gap", "is_static", "other_settings")
_PREFIXES = ("sparsity_", "skipped_", "task_", "dense_task_", "accuracy_", "generation_", "other_")


def _percent(share: object) -> int | None:
    """Whole percent; None for what a refused job was asked for and is no number."""
    return round(100 * share) if isinstance(share, int | float) and math.isfinite(share) else None


def variant(config: dict) -> str:
    """Equal for runs that differ in seed and place only: their figures are averaged.

    Options at their default are left out, so that one added later does not part older runs from newer ones.
    """
    asked = {key: value for key, value in config.items() if key not in ASIDE}
    for group, cls in GROUPS.items():
        defaults = {field.name: field.default for field in fields(cls)}
        options = asked.get(group) or {}
        kept = {key: value for key, value in options.items() if defaults.get(key) != value}
        asked[group] = {key: value for key, value in kept.items() if key not in PLACES}
    method = asked.pop("method", None) or {}
    asked["method"] = [*recipe_of(method), [method.get(key) for key in SIZES]]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]


@functools.cache
def presets() -> dict[str, dict]:
    """The recipes of conf/method."""
    files = sorted((ROOT / "conf" / "method").glob("*.yaml"))
    return {path.stem: yaml.safe_load(path.read_text()) for path in files}


def recipe_of(method: dict) -> tuple[str | None, list[str]]:
    """The nearest recipe for a method's options, and where they depart from it. Options newer than the row are free."""
    best: tuple[str | None, list[str]] = (None, [])
    for stem, preset in presets().items():
        if preset.get("name") == method.get("name"):
            keys = [key for key in method if key in preset and key not in SIZES]
            changes = [f"{key}={method[key]}" for key in keys if method[key] != preset[key]]
            if best[0] is None or len(changes) < len(best[1]):
                best = (stem, changes)
    return best


def paper_recipe(method: str) -> str | None:
    """The file of conf/method that follows the paper for one of its methods; None where we have none."""
    names = ("paper",) if method == "wide" else (f"{method}_paper", method)
    return next((name for name in names if name in presets()), None)


def select(rows: pd.DataFrame, spec: Spec) -> pd.DataFrame:
    """The rows of one cell: everything the spec names agrees, and all are of one variant (seeds differ).

    Runs trained at the asked setting go before dialled ones, then recipes as published, more seeds, later runs. Failed
    rows are returned only where no run finished.
    """
    keep = pd.Series(True, index=rows.index)
    for field in fields(Spec):
        wanted = getattr(spec, field.name)
        if wanted is not None:
            keep &= rows[field.name] == wanted
        if not keep.any():
            return rows[:0]
    found = rows[keep]
    if found.empty:
        return found
    done = found[found["status"] == "finished"]
    if done.empty:
        return found
    done = done.assign(dialled=done["dialled"].eq(True) if "dialled" in done else False, custom=done["changes"] != "")
    groups = [group for _, group in done.groupby(["variant", "dialled"])]
    first = min(groups, key=lambda g: (g["dialled"].iloc[0], g["custom"].iloc[0], -len(g), _age(g)))
    return first


def _age(group: pd.DataFrame) -> float:
    """Lower is newer."""
    return -pd.to_datetime(group["finished"]).max().timestamp()
