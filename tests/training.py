"""Tiny training runs for the tests: a stage on a random model over fixed random blocks, on the CPU in float32."""

from pathlib import Path

import lightning as L
import torch
from tiny import routed, tokens
from torch import Tensor

from experiments.train import build_trainer
from wide.methods import load as load_method
from wide.model import RoutedModel
from wide.options import Config, DataConfig, EvalConfig, LoggerConfig, ModelConfig, StageConfig, TrainerConfig
from wide.stages.calibrate import Calibrate


class FixedBlocks:
    """A loader in the shape of the data module's: item `step` is the step's global batch, starting at `start()`."""

    def __init__(self, blocks: Tensor, steps: int, batch_size: int, start=lambda: 0):
        self.blocks, self.steps, self.batch_size, self.start = blocks, steps, batch_size, start

    def __len__(self) -> int:
        return self.steps

    def __iter__(self):
        for step in range(self.start(), self.steps):
            rows = torch.arange(step * self.batch_size, (step + 1) * self.batch_size) % len(self.blocks)
            ids = self.blocks[rows]
            yield {"input_ids": ids, "labels": ids.clone(), "sample_positions": torch.arange(self.batch_size)}


def tiny_run_config(run_dir: Path, stage: dict, method: dict | None = None) -> Config:
    options = {"attn_group_size": 2, "ffn_group_size": 32, "router_rank": 4, "init_gap": 1.0} | (method or {})
    return Config(
        model=ModelConfig(name="tiny", source="tiny", family="llama"),
        method=load_method("wide").Config(**options),
        data=DataConfig(),
        stage=StageConfig(**stage),
        trainer=TrainerConfig(accelerator="cpu", precision="fp32"),
        logger=LoggerConfig(name="none"),
        eval=EvalConfig(),
        output_dir=str(run_dir),
    )


def build_module(config: Config, family: str = "llama", seed: int = 0) -> Calibrate:
    method = {key: value for key, value in vars(config.method).items() if key != "name"}
    return Calibrate(routed(family, seed=seed, **method), config.stage, config.method, config.seed)


def fit(config: Config, module: Calibrate, blocks: Tensor | None = None, resume: str | None = None) -> L.Trainer:
    """Run the stage to its end (or to `trainer.should_stop`)."""
    blocks = tokens(24, 16, seed=5) if blocks is None else blocks
    trainer = build_trainer(config, Path(config.output_dir), None, module.name)
    loader = FixedBlocks(blocks, config.stage.steps, config.stage.batch_size, lambda: trainer.global_step)
    trainer.fit(module, loader, ckpt_path=resume)
    return trainer


def trained_tensors(model: RoutedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
