"""The default action: load, calibrate, fit the dial, evaluate, save everything into one run folder, one row.

Reads top to bottom. Settings that cannot work are refused from the model's config, before any weight is loaded.
"""

import json
import math
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from transformers import PreTrainedTokenizerBase

from experiments import html_report, lora
from experiments.cluster import arrange_channels
from experiments.dials import calibration_batches, curve_scores, fit_dials, scores_at_other_settings
from experiments.evaluate import evaluate, flat_metrics, table, write_report
from experiments.evaluations import other_evaluations
from experiments.figures import curves, dial_curve, layout
from experiments.train import CACHE_ROOT, checkpoint_to_resume, keep_freed_memory, train
from wide import families, methods
from wide.base_model import fingerprint, load_base, load_tokenizer, read_geometry
from wide.checkpoint import save_pretrained
from wide.data.batches import check_boundaries
from wide.data.module import CalibrationData
from wide.evaluation.accuracy import check_tasks
from wide.loggers import build_logger, finish, global_rank, lost_tracker
from wide.model import RoutedModel
from wide.options import Config
from wide.records import write_json
from wide.results import command_line, environment_report
from wide.sharding import place


def check(config: Config) -> None:
    """Refuse what cannot work from files' names and the model's config alone, before any weight is loaded."""
    check_files(config)
    lora.check(config)
    check_tasks(config.eval)
    geometry = read_geometry(config.model)
    method = config.method
    families.check_groups(geometry, *(getattr(method, f"{kind}_group_size", None) for kind in ("attn", "ffn")))
    check_lengths(config, geometry)
    rows = config.stage.micro_batch_size or config.stage.batch_size
    check_boundaries(config.data.document_boundaries, config.model.attn_implementation, rows)
    choose_device(config)


def run(config: Config) -> dict:
    """Run the checked experiment; returns the metrics of its results row."""
    run_dir = Path(config.output_dir)
    L.seed_everything(config.seed, workers=True, verbose=False)
    environment = environment_report()
    write_json(run_dir / "environment.json", environment, indent=2)
    logger = build_logger(config.logger, config.to_dict(), run_dir, config.stage.name)
    failed = True
    try:
        metrics = _run(config, run_dir, logger, environment)
        failed = False
        return metrics
    finally:
        finish(logger, exit_code=int(failed))


def _run(config: Config, run_dir: Path, logger: Logger | None, environment: dict) -> dict:
    device = choose_device(config)
    if device.type == "cpu":
        keep_freed_memory()
    tokenizer = load_tokenizer(config.model)
    check_prompts(config, tokenizer)
    base = load_base(config.model, device, on_host=config.trainer.strategy == "fsdp2")
    base_fingerprint = fingerprint(base)
    geometry = families.Geometry.from_hf(base.config)
    gates = methods.load(config.method.name).build(config.method, geometry, config.seed).to(device)
    routed = RoutedModel(base, gates, families.load(geometry.family))
    data = CalibrationData(
        config.data,
        tokenizer,
        steps=config.stage.steps,
        batch_size=config.stage.batch_size,
        seed=config.seed,
        cache_root=CACHE_ROOT,
        vocab_size=geometry.vocab_size,
        val_blocks=config.stage.val_blocks,
    )
    if config.stage.from_checkpoint is None:
        arrange_channels(config, routed, data)
    if gates.calibration_blocks and config.stage.from_checkpoint is None:
        gates.prepare(routed, calibration_batches(config, data, gates.calibration_blocks, base.device))
    if config.stage.name == "lora":
        routed = lora.start(config, routed, base_fingerprint)
    learns = config.stage.name == "lora" or any(True for _ in gates.parameters())
    history = train(config, routed, data, run_dir, logger) if learns else []
    place(routed.eval(), device)
    point, curve = fit_dials(config, routed, data, device)
    report = evaluate(config, routed, data, tokenizer)
    report["asked_sparsity"] = config.method.sparsity
    report["dial"] = None if point is None else {"target": point.target, "measured_on_training_text": point.measured}
    if curve:
        report["dial_curve"] = curve_scores(config, routed, data, curve)
    report["other_settings"] = scores_at_other_settings(config, routed, data, tokenizer, device, report)
    metrics = flat_metrics(report) | {"other_settings": report["other_settings"]}
    metrics |= other_evaluations(config, routed, data)
    if not math.isfinite(metrics["routed_perplexity"]):
        raise RuntimeError(f"routed perplexity is {metrics['routed_perplexity']}: the run diverged")
    if global_rank() == 0:
        _write(config, run_dir, routed, report, history, curve, metrics, environment, base_fingerprint)
        with lost_tracker():
            log_results(logger, run_dir, metrics)
    return metrics


def _write(config, run_dir, routed, report, history, curve, metrics, environment, base_fingerprint) -> None:
    save_pretrained(  # first: what follows can be made again from it
        routed,
        run_dir / "checkpoint",
        model=config.model,
        method=config.method,
        base_fingerprint=base_fingerprint,
        curve=curve,
        recipe=config.to_dict(),
        metrics=metrics,
        versions=environment["versions"],
    )
    write_report(report, run_dir)
    write_json(run_dir / "history.json", history)
    layout.save(report["held_out"]["routing"], run_dir / "layout.png")
    curves.save(history, config.stage.name, run_dir / "curves.png")
    if "dial_curve" in report:
        dial_curve.save(report["dial_curve"], run_dir / "dial_curve.png")
    html_report.write_run(run_dir, command_line())
    print(table(config, report, run_dir), flush=True)
    by_cost = getattr(config.method, "budget_price", "mean") == "cost"
    warn_if_missed(config.method.sparsity, metrics["skipped_params" if by_cost else "sparsity_total"])


def choose_device(config: Config) -> torch.device:
    """Where the model lives: the GPU when there is one and it was not refused."""
    wants_gpu = config.trainer.accelerator in ("auto", "gpu")
    if config.trainer.accelerator == "gpu" and not torch.cuda.is_available():
        raise ValueError("trainer.accelerator=gpu but no CUDA device is visible; legal here: cpu, auto")
    if wants_gpu and torch.cuda.is_available():
        return torch.device("cuda", global_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def check_files(config: Config) -> None:
    """Files the config names must be there."""
    check_resumed(config)
    named = {"eval.other_text": config.eval.other_text, "data.eval_path": config.data.eval_path}
    if config.data.source == "files":
        named["data.path"] = config.data.path
    if config.model.source in ("local", "gguf"):
        named["model.path"] = config.model.path
    for key, name in named.items():
        if name and not Path(name).exists():
            raise ValueError(f"{key}={name!r} does not exist; legal: an existing file or folder")


def check_resumed(config: Config) -> None:
    """A state to resume from must be there and whole, and of a run that asked for the same model and method."""
    file = checkpoint_to_resume(config.resume)
    left = None if file is None else Path(file).parent.parent / "config.json"
    if left is None or not left.is_file():
        return
    asked = config.to_dict()
    for group, keys in (("model", ("source", "path", "revision", "family")), ("method", tuple(asked["method"]))):
        stored = json.loads(left.read_text()).get(group, {})
        for key in keys:
            if stored.get(key) != asked[group][key]:
                raise ValueError(f"{group}.{key}={asked[group][key]!r}, but the resumed run has {stored.get(key)!r}")


def check_lengths(config: Config, geometry: families.Geometry) -> None:
    """Blocks longer than the model's positions would be silently wrong."""
    limit = min(geometry.max_positions, config.model.max_length)
    if config.data.block_size > limit:
        raise ValueError(f"data.block_size={config.data.block_size} exceeds what the model takes; legal: 2 to {limit}")


def check_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """What the evaluation asks of the tokenizer: found before training, not after."""
    if config.eval.chat_tasks and not tokenizer.chat_template:
        raise ValueError("eval.chat_tasks needs a tokenizer with a chat template; legal here: eval.chat_tasks=[]")
    if config.eval.new_tokens:
        ids, geometry = tokenizer(config.eval.prompt)["input_ids"], read_geometry(config.model)
        limit = min(geometry.max_positions, config.model.max_length)
        if not 0 < len(ids) <= limit - config.eval.new_tokens:
            raise ValueError(
                f"eval.prompt has {len(ids)} tokens and eval.new_tokens={config.eval.new_tokens} come after it; legal: "
                f"at least one token in the prompt, {limit} in all, or eval.new_tokens=0"
            )
        if max(ids) >= geometry.vocab_size:
            raise ValueError(
                f"eval.prompt gives id {max(ids)}, but the model has {geometry.vocab_size} embedding rows; use its own "
                "tokenizer, or eval.new_tokens=0"
            )


def warn_if_missed(asked: float, measured: float, tolerance: float = 0.02) -> None:
    if abs(asked - measured) > tolerance:
        print(f"target missed: asked {asked:.1%}, got {measured:.1%}", flush=True)


def log_results(logger: Logger | None, run_dir: Path, metrics: dict) -> None:
    """Mirror the row into the tracker's summary, with the pictures and the router bundle where it is W&B."""
    if logger is None:
        return
    run = getattr(logger, "experiment", None)
    if run is not None and hasattr(run, "log_artifact"):
        import wandb

        run.summary.update(metrics)
        pictures = {name: wandb.Image(str(run_dir / f"{name}.png")) for name in ("layout", "curves")}
        run.log(pictures | {"report": wandb.Html((run_dir / "report.html").read_text(), inject=False)})
        artifact = wandb.Artifact(f"routers-{run.id}", type="routers")
        folder = run_dir / "checkpoint"
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            artifact.add_file(str(file), name=str(file.relative_to(folder)))
        run.log_artifact(artifact)
    else:
        logger.log_metrics({k: v for k, v in metrics.items() if isinstance(v, int | float)})
