"""Training runs that several processes do together. `torchrun tests/distributed_worker.py FOLDER` does them all;
`test_distributed` does the same in one process by the same functions and compares what they leave.
"""

import json
import sys
from pathlib import Path

import torch
from lora_models import randomise
from tiny import routed, tokens
from torch.distributed.tensor import DTensor
from training import tiny_run_config, trained_tensors

from experiments.train import build_trainer
from wide.adapter import add_lora
from wide.options import Config, TrainerConfig
from wide.stages.calibrate import Calibrate
from wide.stages.lora import Lora

STEPS, ROWS, LEARNING_RATE = 7, 4, 0.01
STRATEGIES = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2"},
    "offload": {"strategy": "fsdp2", "cpu_offload": True},
}
CASES = {
    "calibrate": {"stage": {"grad_clip": 0.5}},
    "calibrate_micro": {"stage": {"micro_batch_size": 1}, "method": {"budget_scope": "micro"}},
    "calibrate_checkpointing": {"stage": {"activation_checkpointing": True, "micro_batch_size": 1}},
    "lora": {"stage": {"name": "lora", "lora_dropout": 0.0}},
    "lora_dropout": {"stage": {"name": "lora", "lora_dropout": 0.1, "micro_batch_size": 1}},
}
"""Dropout is drawn per micro-batch and the `micro` budget taken per micro-batch: both need the same micro-batches."""

KILLED = ("calibrate_micro", "lora_dropout")
"""Cases that are also killed at step 5 and resumed from the checkpoint of step 3."""


def cases_of(strategy: str) -> tuple[str, ...]:
    return ("calibrate", *KILLED) if strategy == "offload" else tuple(CASES)


class SharedBatches:
    """Item `step` is this rank's rows of the step's texts; the first rank's are short and padded, the second's long."""

    def __init__(self, trainer):
        self.trainer = trainer

    def __len__(self) -> int:
        return STEPS

    def __iter__(self):
        for step in range(self.trainer.global_step, STEPS):
            ids = tokens(ROWS, 16, seed=step)
            lengths = torch.tensor([3, 16, 5, 14])
            mask = (torch.arange(16) >= 16 - lengths[:, None]).long()  # padding on the left
            rows = torch.arange(self.trainer.global_rank, ROWS, self.trainer.world_size)
            yield {"input_ids": ids[rows], "attention_mask": mask[rows], "sample_positions": rows}


def make(folder: Path, case: str, strategy: str | None) -> tuple[Config, Calibrate]:
    """Config and module of one case; `strategy` None is one process.

    LoRA starts with B away from zero. At zero A's gradient is rounding alone, which Adam divides by its own size: a sum
    over ranks then differs from a single one by up to 4e-5 in A after 7 steps (1e-14 in float64, 7e-9 under SGD).
    """
    options = CASES[case]
    stage = {"steps": STEPS, "batch_size": ROWS, "save_every": 3, "learning_rate": LEARNING_RATE} | options["stage"]
    method = {"compensation": True, "sparsity": 0.4, "init_gap": 0.5} | options.get("method", {})
    config = tiny_run_config(folder, stage, method)
    if strategy is not None:
        config.trainer = TrainerConfig(accelerator="cpu", precision="fp32", devices=2, **STRATEGIES[strategy])
    model = routed("llama", **{key: value for key, value in vars(config.method).items() if key != "name"})
    if config.stage.name == "lora":
        return config, Lora(randomise(add_lora(model, config.stage)), config.stage, config.method, config.seed)
    return config, Calibrate(model, config.stage, config.method, config.seed)


def run(folder: Path, case: str, strategy: str | None, kill_at: int | None = None, resume: Path | None = None) -> None:
    """Train and leave `rank*.json` and `rank*.pt` in `folder`, beside Lightning's checkpoints."""
    config, module = make(folder, case, strategy)
    if kill_at is not None:
        _die(module, kill_at)
    trainer = build_trainer(config, folder, None, module.name)
    checkpoint = resume and str(resume / "checkpoints" / "last.ckpt")
    try:
        trainer.fit(module, SharedBatches(trainer), ckpt_path=checkpoint)
    except (KeyboardInterrupt, SystemExit):
        return
    layers = [p for p in module.routed.decoder_layers().parameters() if not p.requires_grad]
    facts = {
        "history": module.history_rows(),
        "held": sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in layers),
        "masks": module.routed.num_attached_masks(),
    }
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(facts))
    torch.save(trained_tensors(module.routed), folder / f"rank{trainer.global_rank}.pt")


def _die(module: Calibrate, step: int) -> None:
    original = module.training_step

    def training_step(batch, batch_idx):
        if module.global_step == step:
            raise KeyboardInterrupt
        original(batch, batch_idx)

    module.training_step = training_step


def main(root: Path) -> None:
    for strategy in STRATEGIES:
        for case in cases_of(strategy):
            run(root / strategy / case, case, strategy)
        for case in KILLED:
            killed = root / strategy / f"{case}_killed"
            run(killed, case, strategy, kill_at=5)
            run(root / strategy / f"{case}_resumed", case, strategy, resume=killed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
