"""Latency of the engine, end to end: first token and time per token, beside dense baselines and the card's limit.

Reads top to bottom: correctness gate, model, then every subject (engine routed and dense, transformers) at every
batch and length, then rows, table and plot. Random weights at published sizes with random masks by default; with
`bench.checkpoint` a calibrated model with its learned masks on held-out text.
"""

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from experiments.figures import latency as figure
from experiments.pipeline import choose_device
from experiments.subjects import EngineSubject, Subject, TransformersSubject
from experiments.train import CACHE_ROOT
from wide import families
from wide.base_model import load_tokenizer, read_hf_config, resolve_dtype
from wide.checkpoint import CONFIG, from_pretrained, read_config, stored_base
from wide.config import to_dataclass
from wide.data.blocks import open_blocks
from wide.engine.check import check_engine
from wide.engine.generate import Engine
from wide.engine.limits import Limits, measure_limits
from wide.engine.synthetic import (
    SIZES,
    forced_keep,
    published_config,
    random_model,
    random_routed,
    with_forced_masks,
    with_gates,
)
from wide.engine.weights import take_weights
from wide.methods import load as load_method
from wide.methods.provider import GateProvider
from wide.methods.wide import Config as WideConfig
from wide.model import RoutedModel
from wide.options import Config, ModelConfig

MASK_PERIOD = 1021
SEED = 3


def check(config: Config) -> None:
    """Refuse impossible group widths and lengths before anything is built."""
    if not isinstance(config.method, WideConfig):
        raise ValueError(f"method.name={config.method.name!r} cannot be timed; legal: wide")
    choose_device(config)
    if config.bench.checkpoint:
        checkpoint_folder(config.bench.checkpoint)
        return
    if "reference" in config.bench.baselines or not config.bench.sparsity:
        raise ValueError("bench.baselines=[reference] and bench.sparsity=[] need learned masks: give bench.checkpoint")
    geometry = families.Geometry.from_hf(model_config(config.model))
    for size in group_sizes(config):
        families.check_groups(geometry, config.method.attn_group_size, size)
    longest = max([*config.bench.prefill, *config.bench.decode])
    if longest + config.bench.new_tokens > geometry.max_positions:
        raise ValueError(f"bench: {longest} tokens are too long; legal: {geometry.max_positions}")


def run(config: Config) -> dict:
    """All measurements of one model; returns the run's row, which holds them under `measurements`."""
    device = choose_device(config)
    dtype = resolve_dtype(config.model.dtype, device)
    verdicts = gates_of(config, device, dtype)
    limits = measure_limits(device)
    rows = []
    for subject, tokens in subjects(config, device, dtype):
        for row in measure(subject, tokens, config, limits):
            row["correct"] = all(verdict["correct"] for verdict in verdicts.values())
            rows.append(row)
            print(line(row), flush=True)
        subject.release()
    add_speedups(rows)
    run_dir = Path(config.output_dir)
    report = {"measurements": rows, "correctness": verdicts, "limits": vars(limits)}
    (run_dir / "latency.json").write_text(json.dumps(report, indent=1) + "\n")
    figure.save(rows, config.model.name, run_dir / "latency.png")
    print(table(rows), flush=True)
    return report | {"correct": rows[0]["correct"]}


def checkpoint_folder(name: str) -> Path:
    """The checkpoint folder of a run folder, or itself."""
    for folder in (Path(name), Path(name) / "checkpoint"):
        if (folder / CONFIG).is_file():
            return folder
    raise ValueError(f"bench.checkpoint={name!r} holds no {CONFIG}; legal: a run folder or a checkpoint folder")


def model_config(model: ModelConfig):
    """HF config: of a published size without a download, else the model's own."""
    return published_config(model.name) if model.name in SIZES else read_hf_config(model)


def group_sizes(config: Config) -> list[int]:
    assert isinstance(config.method, WideConfig)
    return list(config.bench.ffn_group_sizes) or [config.method.ffn_group_size]


def gates_of(config: Config, device: torch.device, dtype: torch.dtype) -> dict[str, dict]:
    """The correctness gate at every group width, or that of the checkpoint."""
    if config.bench.checkpoint:
        stored = read_config(checkpoint_folder(config.bench.checkpoint))
        hf_config = model_config(stored_model(config))
        methods = [to_dataclass(stored["method"], load_method("wide").Config, "method")]
    else:
        hf_config = model_config(config.model)
        methods = [with_group(config, size) for size in group_sizes(config)]
    verdicts = {}
    for method in methods:
        sparsity = max(config.bench.sparsity, default=method.sparsity)
        verdict = check_engine(hf_config, method, sparsity, device, dtype, config.bench.check_tokens)
        verdicts[f"G={method.ffn_group_size}"] = verdict
        print(f"correctness at G={method.ffn_group_size}: {verdict}", flush=True)
        free()
    return verdicts


def with_group(config: Config, size: int):
    return load_method("wide").Config(**vars(config.method) | {"ffn_group_size": size, "cluster_channels": False})


def subjects(config: Config, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Subject, Tensor]]:
    """Everything that is timed, each with the tokens it reads, one text [N]; built one after the other."""
    longest = max([*config.bench.prefill, *config.bench.decode])
    if config.bench.checkpoint:
        routed = from_pretrained(checkpoint_folder(config.bench.checkpoint), device=device)
        tokens = held_out(config, routed, longest)
        engines = learned_engines(config, routed)
    else:
        model = random_model(model_config(config.model), device, dtype, config.seed)
        smallest = min(group_sizes(config))  # the most vectors: what is stored behind the projections has room for all
        routed = random_routed(model, with_group(config, smallest), config.seed)
        generator = torch.Generator(device).manual_seed(SEED)
        tokens = torch.randint(3, routed.geometry.vocab_size, (longest,), device=device, generator=generator)
        engines = random_engines(config, routed)
    weights = take_weights(routed)
    yield EngineSubject(Engine(weights, 1.0, routing=False), routed, {"path": "engine dense", "sparsity": 0.0}), tokens
    for gates, keep, labels in engines:
        own = with_gates(weights, gates)
        own = own if keep is None else with_forced_masks(own, keep)
        sizes = {"ffn_group_size": gates.ffn_group_size, "attn_group_size": gates.attn_group_size}
        yield EngineSubject(Engine(own, 1 - labels["sparsity"]), routed, {"path": "engine"} | labels | sizes), tokens
        del own, keep
        free()
    for name in config.bench.baselines:
        yield TransformersSubject(routed, name, own_sparsity(config) if name == "reference" else 0.0), tokens


Gates = Iterator[tuple[GateProvider, dict[str, Tensor] | None, dict]]


def random_engines(config: Config, routed: RoutedModel) -> Gates:
    """Fresh routers at every group width, overruled by random masks of every sparsity."""
    for size in group_sizes(config):
        provider = random_routed(routed.base, with_group(config, size), config.seed)
        provider.detach_masks()
        for sparsity in config.bench.sparsity:
            keep = forced_keep(provider.gates, sparsity, config.seed, MASK_PERIOD)
            yield provider.gates, keep, {"masks": "random", "sparsity": sparsity}


def learned_engines(config: Config, routed: RoutedModel) -> Gates:
    """The checkpoint at its own setting, or dialled to every sparsity asked for."""
    if not config.bench.sparsity:
        yield routed.gates, None, {"masks": "learned", "sparsity": own_sparsity(config)}
    for sparsity in config.bench.sparsity:
        dialled = from_pretrained(checkpoint_folder(config.bench.checkpoint), sparsity=sparsity)
        yield dialled.gates.to(routed.base.device), None, {"masks": "learned", "sparsity": sparsity}


def own_sparsity(config: Config) -> float:
    """What the checkpoint skips on held-out text as it is; what it was asked for where that was not measured."""
    stored = read_config(checkpoint_folder(config.bench.checkpoint))
    return stored["metrics"].get("sparsity_total", stored["method"]["sparsity"])


def stored_model(config: Config) -> ModelConfig:
    """The base that the checkpoint names."""
    folder = checkpoint_folder(config.bench.checkpoint)
    return stored_base(folder, read_config(folder))


def held_out(config: Config, routed: RoutedModel, longest: int) -> Tensor:
    """Held-out text of the data group, [longest] tokens, repeated where it is too short."""
    root = Path(config.data.cache_dir or CACHE_ROOT)
    tokenizer = load_tokenizer(stored_model(config))
    blocks = open_blocks(config.data, tokenizer, root, routed.geometry.vocab_size).eval
    text = torch.from_numpy(blocks[:][0]).long().flatten().to(routed.base.device)
    return text.repeat(-(-longest // len(text)))[:longest]


def measure(subject: Subject, tokens: Tensor, config: Config, limits: Limits) -> Iterator[dict]:
    """Rows of one subject: prefill at every length, then decoding at every context, for every batch."""
    bench = config.bench
    for batch in bench.batch:
        for phase, lengths in (("prefill", bench.prefill), ("decode", bench.decode)):
            for length in lengths:
                texts = tokens[:length].expand(batch, -1).contiguous()
                times = subject.times(phase, texts, bench.new_tokens, bench.repeats)
                row = {"model": config.model.name, "phase": phase, "batch": batch, "tokens": length} | subject.labels
                row |= {"ms": sorted(times)[len(times) // 2], "fastest_ms": min(times), "slowest_ms": max(times)}
                row["limit_ms"] = limits.milliseconds(subject.routed, phase, batch, length, subject.labels["sparsity"])
                row["memory_gb"] = subject.memory_gb()
                if bench.breakdown and batch == 1:
                    row["parts_ms"] = subject.parts(phase, texts)
                yield row


def add_speedups(rows: list[dict]) -> None:
    """Against the engine with routing off, and against the best dense path, at the same point."""
    dense: dict[tuple, dict[str, float]] = {}
    for row in rows:
        if row["sparsity"] == 0 and row.get("masks") is None:
            dense.setdefault(_point(row), {})[row["path"]] = row["ms"]
    for row in rows:
        others = dense.get(_point(row), {})
        if "engine dense" in others:
            row["speedup_over_engine_dense"] = others["engine dense"] / row["ms"]
        if others:
            row["best_dense"], best = min(others.items(), key=lambda item: item[1])
            row["speedup_over_best_dense"] = best / row["ms"]


def _point(row: dict) -> tuple:
    return row["phase"], row["batch"], row["tokens"]


def line(row: dict) -> str:
    what = f"{row['phase']} {row['batch']} x {row['tokens']}"
    setting = f"{row['path']} {row['sparsity']:.0%}" + (
        f" G={row['ffn_group_size']}" if "ffn_group_size" in row else ""
    )
    limit = f" limit {row['limit_ms']:.3f}" if row["limit_ms"] else ""
    return f"{what:<22} {setting:<24} {row['ms']:9.3f} ms [{row['fastest_ms']:.3f}, {row['slowest_ms']:.3f}]{limit}"


def table(rows: list[dict]) -> str:
    """What the run ends with."""
    ends = [f"{r.get('speedup_over_engine_dense', 0):6.2f}x {r.get('speedup_over_best_dense', 0):6.2f}x" for r in rows]
    lines = [f"{line(row)} {end}" for row, end in zip(rows, ends, strict=True)]
    return "\n".join(["speedups: over the engine's dense path, over the best dense path", *lines])


def free() -> None:
    """Give unused memory back between models."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
