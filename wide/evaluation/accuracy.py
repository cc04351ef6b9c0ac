"""Tasks of lm-evaluation-harness, dense and routed by the same code, reduced to one figure a task.

The harness's own results are returned untouched for the run's folder. METHOD: the seven zero-shot tasks of the paper,
each with its metric, and their unweighted mean; WikiText-2 word perplexity. Retention is routed over dense.
"""

import difflib
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from wide.model import RoutedModel
from wide.options import EvalConfig
from wide.routing import KINDS

TASKS = Path(__file__).parent / "tasks"
"""The offline tasks shipped with the project."""

METRICS = {
    "arc_easy": "acc_norm,none",
    "arc_challenge": "acc_norm,none",
    "piqa": "acc_norm,none",
    "openbookqa": "acc_norm,none",
    "hellaswag": "acc_norm,none",
    "boolq": "acc,none",
    "winogrande": "acc,none",
    "wikitext": "word_perplexity,none",
    "gsm8k": "exact_match,flexible-extract",
    "humaneval": "pass@1,create_test",
    "ifeval": "prompt_level_strict_acc,none",
    "sotu_cloze": "acc,none",
    "sotu_continuation": "acc_norm,none",
    "sotu_copy": "exact_match,none",
    "sotu_words": "word_perplexity,none",
}
"""The reported metric of each task; of any other task, the first one the harness lists."""

RUNS_CODE = ("humaneval", "mbpp")
PERPLEXITIES = ("word_perplexity", "byte_perplexity", "bits_per_byte", "perplexity")


def check_tasks(options: EvalConfig) -> None:
    """Refuse task names that the harness does not know and tasks whose data cannot be had, before any weight is loaded.

    Raises:
        ValueError: unknown task, the harness is not installed, a task that runs generated code unasked, or data that
            are neither in the cache nor within reach.
    """
    names = [*options.tasks, *options.chat_tasks]
    if not names:
        return
    if find_spec("lm_eval") is None:
        raise ValueError("eval.tasks needs lm-evaluation-harness: pip install 'wide-pruning[eval]', or eval.tasks=[]")
    for name in names:
        if name.startswith(RUNS_CODE) and not options.run_code:
            raise ValueError(f"eval.tasks: {name!r} runs code that the model wrote; eval.run_code=true allows it")
    manager = task_manager(names)
    known = manager.all_tasks
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            raise ValueError(
                f"eval.tasks: {name!r} is unknown; legal: the tasks listed by `wide-eval ls tasks`"
                + (f", such as {', '.join(close)}" if close else "")
            )
        try:
            manager.load([name])  # builds the task, its data with it
        except OSError as error:
            cause = " ".join(str(error).split())
            raise ValueError(
                f"eval.tasks: the data of {name!r} are not in the cache and cannot be fetched ({cause}); run "
                "`make data` where there is a network, or choose a packaged task (eval=smoke)"
            ) from error


def run_tasks(
    routed: RoutedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: EvalConfig,
    max_length: int,
    bf16: bool,
    earlier: dict | None = None,
) -> tuple[dict, dict[str, dict]]:
    """Every task of `options`, routed and dense.

    `earlier` is such a report of the same model under another dial; the dense figures are taken from it.

    Returns:
        The report {"tasks": {name: figures}, "sparsity": {...}, "batch_size": ...}, and the harness's own results by
        file name.
    """
    from wide.evaluation.lm_eval import WideLM

    quiet()
    settings: dict[str, Any] = {
        "max_length": max_length,
        "precision": "bf16" if bf16 else "fp32",
        "batch_size": options.batch_size,
    }
    figures: dict[str, dict] = {}
    originals: dict[str, dict] = {}
    for mode in ("routed", "dense") if earlier is None else ("routed",):
        lm = WideLM(routed, tokenizer, dense=mode == "dense", **settings)
        for chat, names in ((False, options.tasks), (True, options.chat_tasks)):
            if names:
                results = _evaluate(lm, names, options, chat)
                originals[f"harness_{mode}{'_chat' if chat else ''}"] = results
                for name in names:
                    figures.setdefault(name, {})[mode] = figure(results, name)
        if mode == "routed":
            stats = lm.scored_stats()
    if earlier is not None:
        for name, modes in figures.items():
            modes["dense"] = earlier["tasks"][name]["dense"]
    assert stats is not None, "the routed mode comes first"
    report = {"tasks": figures, "batch_size": options.batch_size, "num_fewshot": options.num_fewshot}
    report["sparsity"] = {"total": float(stats.total)} | {kind: float(stats.sparsity(kind)) for kind in KINDS}
    report["num_scored_tokens"] = int(stats.num_tokens)
    return report, originals


def _evaluate(lm, names: list[str], options: EvalConfig, chat: bool) -> dict:
    from lm_eval import simple_evaluate

    return simple_evaluate(
        lm,
        tasks=list(names),
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        batch_size=options.batch_size,
        bootstrap_iters=1000,
        log_samples=False,
        apply_chat_template=chat,
        confirm_run_unsafe_code=options.run_code,
        task_manager=task_manager(names),
    )


def task_manager(names: list[str]):
    """The harness's index of tasks. Its own ten thousand are read only when one of them is asked for."""
    from lm_eval.tasks import TaskManager

    packaged = {path.stem for path in TASKS.glob("*.yaml")}
    return TaskManager(include_path=str(TASKS), include_defaults=not packaged.issuperset(names))


def quiet() -> None:
    """No advice about settings that are meant, and no progress bar where standard error is a file."""
    for name in ("lm_eval", "lm-eval"):
        logging.getLogger(name).setLevel(logging.ERROR)


def figure(results: dict, name: str) -> dict:
    """One task's figure from the harness's results: {metric, value, stderr, output_type, num_items}."""
    found = results["results"][name]
    metrics = [key for key in found if "," in key and "_stderr," not in key]
    metric = METRICS.get(name, metrics[0])
    base, _, filter_name = metric.partition(",")
    stderr = found.get(f"{base}_stderr,{filter_name}")
    config = results["configs"].get(name, {})
    return {
        "metric": metric,
        "value": float(found[metric]),
        "stderr": float(stderr) if isinstance(stderr, int | float) else None,
        "output_type": config.get("output_type"),
        "num_items": results["n-samples"].get(name, {}).get("effective"),
    }


def flat_tasks(report: dict) -> dict[str, float | None]:
    """Columns of a results row: `task_<name>` and `dense_task_<name>`, means and retention, the scored sparsity.

    `accuracy_mean` is over log-likelihood tasks, `generation_mean` over generated ones; perplexities are in neither.
    """
    row: dict[str, float | None] = {}
    means: dict[str, list[dict]] = {"accuracy": [], "generation": []}
    for name, modes in report["tasks"].items():
        row |= {f"task_{name}": modes["routed"]["value"], f"dense_task_{name}": modes["dense"]["value"]}
        row[f"task_{name}_stderr"] = modes["routed"]["stderr"]
        if not modes["routed"]["metric"].startswith(PERPLEXITIES):
            generated = modes["routed"]["output_type"] == "generate_until"
            means["generation" if generated else "accuracy"].append(modes)
    for kind, tasks in means.items():
        if tasks:
            routed, dense = (sum(modes[mode]["value"] for modes in tasks) / len(tasks) for mode in ("routed", "dense"))
            row |= {f"{kind}_mean": routed, f"dense_{kind}_mean": dense}
            row[f"{kind}_retention"] = routed / dense if dense else None
    row |= {f"task_sparsity_{key}": value for key, value in report["sparsity"].items()}
    return row
