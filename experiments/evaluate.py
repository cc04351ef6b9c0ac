"""Evaluate a routed model on held-out text: dense and routed perplexity, routing report, samples, figures.

Called by `experiments.pipeline` after training.
"""

import math
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from experiments.train import CACHE_ROOT, held_batches
from wide.data.batches import Batch
from wide.data.blocks import open_text
from wide.data.module import CalibrationData
from wide.evaluation.accuracy import flat_tasks, run_tasks
from wide.evaluation.perplexity import score
from wide.evaluation.report import routing_report
from wide.evaluation.sample import sample_texts
from wide.evaluation.token_widths import token_widths
from wide.model import RoutedModel
from wide.options import Config
from wide.records import write_json
from wide.routing import KINDS

SHOWN_TOKENS = 256
"""Held-out tokens whose width the report shows one by one."""


def evaluate(config: Config, routed: RoutedModel, data: CalibrationData, tokenizer: PreTrainedTokenizerBase) -> dict:
    """The report: held-out figures of the routed and of the dense model from the same blocks and code."""
    report = text_scores(config, routed, data, tokenizer)
    bf16 = config.trainer.precision != "fp32"
    first_block = held_batches(data.eval_blocks, 1, config)[0]["input_ids"][0]
    report["tokens"] = token_widths(routed, tokenizer, first_block[:SHOWN_TOKENS], bf16)
    if config.eval.tasks or config.eval.chat_tasks:
        report["accuracy"] = task_scores(config, routed, tokenizer)
    if config.eval.new_tokens:
        report["sample"] = sample_texts(routed, tokenizer, config.eval.prompt, config.eval.new_tokens)
    return report


def task_scores(
    config: Config,
    routed: RoutedModel,
    tokenizer: PreTrainedTokenizerBase,
    earlier: dict | None = None,
    suffix: str = "",
) -> dict:
    """The part of the report that is about tasks; the harness's own results go untouched into the run's folder.

    `earlier` is such a part of the same model under another dial; `suffix` keeps the files of both apart.
    """
    bf16 = config.trainer.precision != "fp32"
    report, originals = run_tasks(routed, tokenizer, config.eval, config.model.max_length, bf16, earlier)
    for name, results in originals.items():
        write_json(Path(config.output_dir) / f"{name}{suffix}.json", results, indent=2, default=str)
    return report


def text_scores(
    config: Config,
    routed: RoutedModel,
    data: CalibrationData,
    tokenizer: PreTrainedTokenizerBase,
    earlier: dict | None = None,
) -> dict:
    """The part of the report that is about perplexity: `held_out` and, if asked for, `other_text`.

    `earlier` is such a report of the same model under another dial; the dense figures are taken from it.
    """
    blocks = data.eval_blocks
    num_blocks = min(config.eval.blocks or len(blocks), len(blocks))
    texts = {"held_out": held_batches(blocks, num_blocks, config)}
    if config.eval.other_text:
        texts["other_text"] = _other_text(config, routed, tokenizer)
    report = {}
    for name, batches in texts.items():
        dense = None if earlier is None else earlier[name]["dense_perplexity"]
        report[name] = _scores(config, routed, batches, dense)
        report[name]["num_blocks"] = sum(len(batch["input_ids"]) for batch in batches)
    return report


def _scores(config: Config, routed: RoutedModel, batches: list[Batch], dense_perplexity: float | None) -> dict:
    bf16 = config.trainer.precision != "fp32"
    if dense_perplexity is None:
        dense_perplexity = score(routed, batches, dense=True, bf16=bf16).perplexity
    pruned = score(routed, batches, dense=False, bf16=bf16)
    assert pruned.stats is not None
    return {
        "dense_perplexity": dense_perplexity,
        "routed_perplexity": pruned.perplexity,
        "log_perplexity_gap": pruned.loss - math.log(dense_perplexity),
        "num_predicted": pruned.num_predicted,
        "routing": routing_report(routed, pruned.stats, config.data.block_size),
    }


def _other_text(config: Config, routed: RoutedModel, tokenizer: PreTrainedTokenizerBase) -> list[Batch]:
    """Blocks of a text of another kind, under the same begin and end policy."""
    root = Path(config.data.cache_dir or CACHE_ROOT)
    blocks = open_text(config.eval.other_text, config.data, tokenizer, root, routed.geometry.vocab_size)
    if not len(blocks):
        raise ValueError(
            f"eval.other_text={config.eval.other_text!r} is shorter than one block of {config.data.block_size} tokens"
        )
    return held_batches(blocks, min(config.eval.blocks or len(blocks), len(blocks)), config)


def flat_metrics(report: dict) -> dict:
    """The report's figures as flat columns of a results row."""
    row: dict[str, Any] = {}
    for text in ("held_out", "other_text"):
        if text not in report:
            continue
        part = report[text]
        prefix = "" if text == "held_out" else "other_"
        for key in ("dense_perplexity", "routed_perplexity", "log_perplexity_gap"):
            row[prefix + key] = part[key]
        routing = part["routing"]
        row |= {f"{prefix}sparsity_{key}": routing["sparsity"][key] for key in ("total", "attention", "ffn")}
        row |= {f"{prefix}skipped_{key}": value for key, value in routing["skipped"].items()}
        row[prefix + "is_static"] = routing["is_static"]
        if not prefix:
            layers = routing["sparsity"]["layers"]
            row["kv"] = routing["kv"]
            row["layout"] = {kind: [round(layer[i], 4) for layer in layers] for i, kind in enumerate(KINDS)}
    return row | (flat_tasks(report["accuracy"]) if "accuracy" in report else {})


def write_report(report: dict, folder: Path) -> None:
    """`report.json`, and the text sample as Markdown for reading."""
    write_json(folder / "report.json", report, indent=2)
    if "sample" in report:
        sample = report["sample"]
        text = f"# {sample['prompt']}\n\n## Dense\n\n{sample['dense']}\n\n## Routed\n\n{sample['routed']}\n"
        (folder / "sample.md").write_text(text, encoding="utf-8")


def table(config: Config, report: dict, folder: Path) -> str:
    """The table a run ends with."""
    part = report["held_out"]
    routing = part["routing"]
    skipped, sparsity = routing["skipped"], routing["sparsity"]
    rows = [
        ("dense perplexity", f"{part['dense_perplexity']:.2f}"),
        ("routed perplexity", f"{part['routed_perplexity']:.2f}"),
        ("asked sparsity", f"{config.method.sparsity:.1%}"),
        ("measured sparsity (hard, held out)", f"{sparsity['total']:.1%}"),
        ("  attention / FFN", f"{sparsity['attention']:.1%} / {sparsity['ffn']:.1%}"),
        ("skipped prunable parameters", f"{skipped['params']:.1%}"),
        ("keys and values", f"{routing['kv']}, {skipped['kv']:.1%} skipped"),
        (f"skipped FLOPs at {routing['length']} tokens", f"{skipped['flops']:.1%}"),
        ("skipped weight bytes, one-token decode", f"{skipped['bytes']:.1%}"),
        *_task_rows(report),
        ("outputs", str(folder)),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _task_rows(report: dict) -> list[tuple[str, str]]:
    tasks = report.get("accuracy", {}).get("tasks", {})
    return [(f"{name} (dense)", f"{m['routed']['value']:.4g} ({m['dense']['value']:.4g})") for name, m in tasks.items()]
