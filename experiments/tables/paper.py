"""What the tables of the paper share: metrics as the paper counts them, its methods and models, one row's cells."""

import pandas as pd

from experiments.tables.cells import Cell, Column, figure
from experiments.tables.published import TASKS, published
from experiments.tables.rows import Spec, paper_recipe, presets, select

NAMES = {
    "dense": "Dense",
    "shortened_ppl": "Shortened-ppl",
    "shortened_taylor": "Shortened-taylor",
    "cooppruner": "CoopPruner",
    "slicegpt": "SliceGPT",
    "tyr": "Tyr-the-Pruner",
    "ddp": "DDP",
    "dllm": "D-LLM",
    "skipgpt": "SkipGPT",
    "wide": "WIDE",
}
MODELS = {"llama8b": "Llama-3.1-8B", "llama3b": "Llama-3.2-3B"}
ATTN_GROUP = {"llama8b": 4, "llama3b": 3}
"""Query heads over one KV head: the paper's attention group."""
STAGES = {"calibrate": "calibration", "lora": "LoRA"}
PERPLEXITY = Column("word perplexity", "word_perplexity")
AVERAGE = Column("average", "accuracy_mean")
TASK_COLUMNS = [Column(name, name) for name in TASKS]
SHARES = (
    *("sparsity_total", "sparsity_attention", "sparsity_ffn", "skipped_params"),
    *("accuracy_retention", "generation_retention"),
)
NOTE = (
    "In brackets the published value, then ours minus it, and whether that lies in the band of "
    "`experiments/tables/published.py`. ± is the standard deviation over seeds. `missing`: no row; `failed`: only "
    "failed runs."
)


def with_paper_metrics(rows: pd.DataFrame) -> pd.DataFrame:
    """Adds the paper's metrics in percent: the seven tasks, their unweighted mean, WikiText-2 word perplexity.

    A dense figure is measured in every run; `dense:` columns hold it.
    """
    rows, figures = rows.copy(), {}
    for prefix in ("", "dense:"):
        source = "task_" if not prefix else "dense_task_"
        for task in TASKS:
            figures[prefix + task] = 100 * _numbers(rows, source + task)
        figures[f"{prefix}word_perplexity"] = _numbers(rows, f"{source}wikitext")
        tasks = pd.DataFrame({task: figures[prefix + task] for task in TASKS}, index=rows.index)
        figures[f"{prefix}accuracy_mean"] = tasks.mean(axis=1, skipna=False)
    for key in SHARES:
        figures[f"percent_{key}"] = 100 * _numbers(rows, key)
    return pd.concat([rows.drop(columns=[name for name in figures if name in rows]), pd.DataFrame(figures)], axis=1)


def _numbers(rows: pd.DataFrame, name: str) -> pd.Series:
    if name not in rows:
        return pd.Series(float("nan"), index=rows.index, dtype=float)
    return pd.to_numeric(rows[name], errors="coerce")


def cells(rows: pd.DataFrame, spec: Spec, columns: list[Column]) -> list[Cell]:
    """One row's cells of a paper table; `spec.method` is the paper's name. Dense without LoRA is what any run of that
    model measured beside itself.
    """
    recipe = paper_recipe(spec.method)
    if recipe is None:
        return [Cell(status="not implemented", published=published(spec, column.metric)) for column in columns]
    if spec.method == "dense" and spec.stage == "calibrate":
        found = rows[(rows["model"] == spec.model) & (rows["status"] == "finished") & (rows["stage"] == "calibrate")]
        return [_dense(found, column, spec) for column in columns]
    found = select(rows, spec.where(recipe=recipe, method=presets()[recipe]["name"]))
    return [figure(found, column, published(spec, column.metric.removeprefix("percent_"))) for column in columns]


def _dense(found: pd.DataFrame, column: Column, spec: Spec) -> Cell:
    """The last measured dense figure: the same weights and the same code give the same number."""
    column = Column(column.name, f"dense:{column.metric}", column.scale, column.digits)
    measured = found[found[column.metric].notna()] if column.metric in found else found[:0]
    return figure(measured[-1:], column, published(spec, column.metric.removeprefix("dense:")))
