"""Train one stage: data, routed model, stage, Lightning Trainer; then fit the dial on training text.

Called by `experiments.pipeline`. Everything a resumed run needs lies in `<run folder>/checkpoints/last.ckpt`.
"""

import ctypes
import logging
import sys
import warnings
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import Strategy

from experiments.termination import SaveWhenTerminated, finish_the_step
from wide.callbacks import Progress
from wide.data.batches import Batch, make_batch
from wide.data.blocks import TokenBlocks
from wide.data.module import CalibrationData
from wide.model import RoutedModel
from wide.options import Config, TrainerConfig
from wide.resume import WholeCheckpoints, check_whole
from wide.sharding import ShardedBackbone
from wide.stages.calibrate import Calibrate
from wide.stages.lora import Lora

STAGES = {stage.name: stage for stage in (Calibrate, Lora)}

CACHE_ROOT = Path("outputs/cache")
"""Where tokenised corpora are kept, unless `data.cache_dir` says otherwise."""


def quiet_lightning() -> None:
    """Drop Lightning's tips and its warnings about choices made here on purpose."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (
        ".*isinstance.treespec, LeafSpec.*",  # Lightning 2.6 under torch 2.13
        ".*in eval mode at the start of training.*",  # the frozen backbone is in eval mode on purpose
        ".*overridden `on_before_batch_transfer`.*",
        ".*Using ModelCheckpoint with manual optimization.*",  # resuming needs the state after the step
        ".*does not have many workers.*",
    ):
        warnings.filterwarnings("ignore", message=message)


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks instead of returning them to the system after every operation.

    On a CPU a step allocates and frees thousands of tensors of some megabytes; faulting their pages in again took
    three quarters of a SmolLM2 step on two cores (11.9 s against 2.9 s).
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):  # glibc; other C libraries have their own ways
        m_trim_threshold, m_mmap_max = -1, -4
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def build_trainer(config: Config, run_dir: Path, logger: Logger | None, stage_name: str) -> L.Trainer:
    """The Lightning Trainer of one stage; `fit` runs exactly `stage.steps` optimiser steps."""
    quiet_lightning()
    stage = config.stage
    folder = run_dir / "checkpoints"
    last = ModelCheckpoint(
        dirpath=folder,
        filename="last",
        every_n_train_steps=stage.save_every or stage.steps,
        save_top_k=1,
        enable_version_counter=False,
    )
    callbacks = [
        Progress(stage_name, stage.steps, stage.log_every),
        last,
        SaveWhenTerminated(str(folder / "last.ckpt")),
    ]
    if stage.val_every:
        callbacks.append(
            ModelCheckpoint(
                dirpath=folder,
                filename="best",
                monitor=f"{stage_name}/val_cross_entropy",
                enable_version_counter=False,
            )
        )
    return L.Trainer(
        accelerator=config.trainer.accelerator,
        devices=config.trainer.devices,
        num_nodes=config.trainer.num_nodes,
        strategy=build_strategy(config.trainer),
        precision="32-true" if config.trainer.precision == "fp32" else "bf16-mixed",
        max_steps=stage.steps,
        max_epochs=-1,
        val_check_interval=stage.val_every or None,
        check_val_every_n_epoch=None,
        limit_val_batches=None if stage.val_every else 0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        log_every_n_steps=min(stage.log_every, stage.steps),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run_dir,
        logger=logger or False,
        callbacks=callbacks,
        plugins=build_plugins(),
    )


def build_plugins() -> list:
    """Whole checkpoint files; and under Slurm no requeueing by Lightning, whose new job would start from nothing."""
    slurm = [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []
    return [WholeCheckpoints(), *slurm]


def build_strategy(options: TrainerConfig) -> str | Strategy:
    """Lightning's own by name, or the one that shards the backbone."""
    if options.strategy == "fsdp2":
        return ShardedBackbone(options.devices * options.num_nodes, options.cpu_offload)
    return options.strategy


def train(
    config: Config, routed: RoutedModel, data: CalibrationData, run_dir: Path, logger: Logger | None
) -> list[dict[str, float]]:
    """Run the stage to its end, from `config.resume` if given; returns the history, one row per step."""
    module = STAGES[config.stage.name](routed, config.stage, config.method, config.seed, config.trainer.compile)
    trainer = build_trainer(config, run_dir, logger, module.name)
    count = sum(p.numel() for p in module.parameters() if p.requires_grad)
    total = sum(p.numel() for p in routed.base.parameters() if not p.requires_grad)
    if trainer.is_global_zero:
        print(f"{module.name}: {count:,} trained parameters beside {total:,} frozen ones ({count / total:.2%})")
    with finish_the_step(run_dir):
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint_to_resume(config.resume), weights_only=True)
    return module.history_rows()


def checkpoint_to_resume(resume: str | None) -> str | None:
    """The `.ckpt` file of a run folder (or the file itself); ValueError when there is none, or a damaged one."""
    if resume is None:
        return None
    path = Path(resume)
    path = path / "checkpoints" / "last.ckpt" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"resume={resume!r}: {path} does not exist; legal: a run folder or its checkpoints/last.ckpt")
    check_whole(path)
    return str(path)


def held_batches(blocks: TokenBlocks, num_blocks: int, config: Config) -> list[Batch]:
    """Blocks spread evenly over the split, in order, `eval.batch_size` a batch."""
    chosen = [i * len(blocks) // num_blocks for i in range(num_blocks)]
    size = config.eval.batch_size
    return [
        make_batch(blocks, chosen[start : start + size], config.data.document_boundaries)
        for start in range(0, num_blocks, size)
    ]
