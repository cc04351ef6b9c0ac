"""Training throughput: tokens per second and peak memory of both stages, with and without activation checkpointing.

The model has random weights at its real sizes and is built on the device, so nothing is loaded. Every figure stands
beside the arithmetic limit, `bench.peak_tflops` over the FLOPs a token needs (`flops_per_token`). Recomputation,
by checkpointing or by the loss, takes time and counts as no work.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from experiments.latency import free, model_config
from experiments.pipeline import choose_device
from experiments.train import STAGES, build_trainer
from wide import families
from wide.adapter import add_lora, lora_names
from wide.base_model import resolve_dtype
from wide.engine.synthetic import random_model, random_routed
from wide.methods.wide import Config as WideConfig
from wide.model import RoutedModel
from wide.options import Config

WARM_UP = 2
"""Steps before the timed ones, compilation among them."""


def check(config: Config) -> None:
    """Refuse what cannot be timed before anything is built."""
    if not isinstance(config.method, WideConfig) or config.method.distill_weight > 0:
        raise ValueError("throughput counts the steps of method.name=wide with method.distill_weight=0; legal: these")
    if config.trainer.devices * config.trainer.num_nodes > 1:
        raise ValueError(f"trainer.devices={config.trainer.devices} cannot be timed; legal: 1")
    choose_device(config)
    geometry = families.Geometry.from_hf(model_config(config.model))
    families.check_groups(geometry, config.method.attn_group_size, config.method.ffn_group_size)
    if config.data.block_size > geometry.max_positions:
        raise ValueError(f"data.block_size={config.data.block_size} is too long; legal: 2 to {geometry.max_positions}")


def run(config: Config) -> dict:
    """All measurements of one model; returns the run's row, which holds them under `measurements`."""
    assert isinstance(config.method, WideConfig)
    device = choose_device(config)
    dtype = resolve_dtype(config.model.dtype, device)
    routed = random_routed(random_model(model_config(config.model), device, dtype), config.method, config.seed)
    rows = []
    for stage in STAGES:
        routed = add_lora(routed, config.stage, config.seed) if stage == "lora" else routed
        for checkpointing in (False, True):
            rows.append(measure(config, routed, stage, checkpointing))
            print(line(rows[-1]), flush=True)
            free()
    path = Path(config.output_dir) / "throughput.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"measurements": rows, "parameters": sum(p.numel() for p in routed.base.parameters())}


def measure(config: Config, routed: RoutedModel, stage: str, checkpointing: bool) -> dict:
    """One row: `bench.repeats` optimiser steps of `stage.batch_size` blocks, after WARM_UP."""
    steps = WARM_UP + config.bench.repeats
    options = replace(config.stage, name=stage, activation_checkpointing=checkpointing, steps=steps, save_every=0)
    config = replace(config, stage=options)
    module = STAGES[stage](routed, options, config.method, config.seed, config.trainer.compile)
    trainer = build_trainer(config, Path(config.output_dir), None, stage)
    clock = Clock()
    kept = [callback for callback in cast(Any, trainer).callbacks if not isinstance(callback, ModelCheckpoint)]
    cast(Any, trainer).callbacks = [*kept, clock]
    row = {"model": config.model.name, "stage": stage, "activation_checkpointing": checkpointing}
    row |= {"block_size": config.data.block_size, "batch_size": options.batch_size}
    row |= {"micro_batch_size": options.micro_batch_size, "compile": config.trainer.compile}
    try:
        trainer.fit(module, RandomBlocks(config, routed.geometry.vocab_size))
    except torch.cuda.OutOfMemoryError:
        return row | {"status": "out of memory"}
    seconds = sorted(clock.seconds[WARM_UP:])[config.bench.repeats // 2]
    flops = flops_per_token(routed, config.data.block_size, stage)
    speed = options.batch_size * config.data.block_size / seconds
    limit = 1e12 * config.bench.peak_tflops / flops
    row |= {"status": "finished", "seconds_per_step": seconds, "tokens_per_second": speed, "peak_gb": clock.peak_gb()}
    row |= {"flops_per_token": flops, "peak_tflops": config.bench.peak_tflops}
    return row | {"limit_tokens_per_second": limit, "share_of_limit": speed / limit}


def flops_per_token(routed: RoutedModel, length: int, stage: str) -> float:
    """FLOPs that training on a token of a causal block of `length` needs, a multiply-add being two.

    Forward 2 N, N being the weights of the projections and the output layer. Backward 2 N: gradients of activations
    alone, since the backbone is frozen, and none for the inputs of the first layer's attention, below which nothing
    learns. Attention's two products over the (length + 1) / 2 keys a token sees on average: once forward, twice
    backward. What is trained, routers and in stage 2 LoRA, costs 6 a parameter: forward, input, weight. Masking
    saves nothing here: skipped groups are computed and multiplied by zero.
    """
    cost = routed.cost(length)
    weights = cost.num_layers * (cost.attention + cost.ffn + cost.other) + cost.head
    first = cost.attention / 2 + cost.other  # q, k and v of the first layer
    core = cost.num_layers * cost.core + 2 * (cost.num_layers - 1) * cost.core
    trained = cost.num_layers * cost.router
    if stage == "lora":
        trained += sum(routed.get_parameter(name).numel() for name in lora_names(routed))
    return 2 * (2 * weights - first + core + 3 * trained)


class RandomBlocks:
    """As many steps as the stage has, each of random tokens."""

    def __init__(self, config: Config, vocab_size: int):
        self.config, self.vocab_size = config, vocab_size

    def __len__(self) -> int:
        return self.config.stage.steps

    def __iter__(self) -> Iterator[dict]:
        size = self.config.stage.batch_size
        generator = torch.Generator().manual_seed(self.config.seed)
        for _ in range(len(self)):
            ids = torch.randint(3, self.vocab_size, (size, self.config.data.block_size), generator=generator)
            yield {"input_ids": ids, "sample_positions": torch.arange(size)}


class Clock(L.Callback):
    """Seconds of every optimiser step, the device idle before and after, and the peak memory after the warm-up."""

    def __init__(self):
        self.seconds: list[float] = []
        self.start = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *args: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if trainer.global_step == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()

    def on_train_batch_end(self, *args: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.start)

    def peak_gb(self) -> float | None:
        return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None


def line(row: dict) -> str:
    what = f"{row['model']} {row['stage']:<9} checkpointing {'on ' if row['activation_checkpointing'] else 'off'}"
    if row["status"] != "finished":
        return f"{what} {row['status']}"
    memory = "" if row["peak_gb"] is None else f"  {row['peak_gb']:.1f} GB"
    share = f"{row['share_of_limit']:.1%} of the limit {row['limit_tokens_per_second']:,.0f}"
    return f"{what} {row['tokens_per_second']:,.0f} tokens/s, {share}{memory}"
