"""Lightning callbacks: progress that suits where it is read. Schedules live in the stage, keyed by global step."""

import sys
import time
from typing import Protocol, cast

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from tqdm import tqdm


class Calibrating(Protocol):
    """What the bar reads of a stage: the figures of every step so far."""

    history: list[dict[str, Tensor]]


class Progress(Callback):
    """A bar when standard output is a terminal, else one short line every `log_every` optimiser steps."""

    def __init__(self, stage: str, steps: int, log_every: int):
        self.stage, self.steps, self.log_every = stage, steps, log_every
        self.bar: tqdm | None = None
        self.started = 0.0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.started, self.first = time.monotonic(), trainer.global_step
        if trainer.is_global_zero and sys.stdout.isatty():
            self.bar = tqdm(total=self.steps, initial=trainer.global_step, desc=self.stage, mininterval=1.0)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs, batch, batch_idx) -> None:
        step = trainer.global_step
        if not trainer.is_global_zero or (step % self.log_every and step != self.steps):
            return
        row = {key: float(value) for key, value in cast(Calibrating, module).history[-1].items()}
        text = (
            f"loss {row['loss']:.3f}  ce {row['cross_entropy']:.3f}  sparsity {row['sparsity']:.3f} "
            f"(target {row['target']:.3f})"
        )
        if self.bar is not None:
            self.bar.update(step - self.bar.n)
            self.bar.set_postfix_str(text)
            return
        pace = (time.monotonic() - self.started) / max(step - self.first, 1)
        print(f"{self.stage} {step}/{self.steps}  {text}  {pace:.2f} s/step", flush=True)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.bar is not None:
            self.bar.close()
