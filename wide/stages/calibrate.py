"""Stage 1, router calibration: the backbone is frozen, only the gate provider's parameters learn.

loss = cross-entropy of the next token + budget_weight * |target - sparsity|   (arXiv 2607.28418, section 3)
One `training_step` is one optimiser step: the batch is this rank's share of the step, cut into micro-batches here,
so that token counts and budgets are those of the whole step whatever the cut. `wide.stages.lora` builds on it.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from wide import families
from wide.compiled import CompiledLayers
from wide.loss import check_finite, next_token_labels, token_losses
from wide.model import RoutedModel
from wide.options import MethodConfig, StageConfig
from wide.routing import KINDS, RoutingStats, gate_noise, ramped_target, sparsity_distance, temperature
from wide.sharding import ShardedBackbone
from wide.stages.objective import LanguageOnly, objective_of

MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")


class Calibrate(L.LightningModule):
    """Trains `routed.gates` with the objective in the method's config.

    Args:
        routed: the routed model; everything outside `gates` is frozen here.
        stage: steps, rates, schedule.
        method: config of the method (budget, temperature, targets).
        seed: root seed; gate noise derives from (seed, step, place in the global batch).
        compiled: run the training forwards and losses through `torch.compile`; evaluation stays eager.
    """

    name = "calibrate"

    def __init__(
        self,
        routed: RoutedModel,
        stage: StageConfig,
        method: MethodConfig | LanguageOnly,
        seed: int,
        compiled: bool = False,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False
        self.routed, self.stage, self.method, self.seed = routed, stage, objective_of(method), seed
        self.freeze()
        if stage.activation_checkpointing:
            families.enable_activation_checkpointing(routed.base)
        self.compiled = compiled
        self._layers: CompiledLayers | None = None
        self._attention_weight = routed.cost(length=1).attention_weight
        self.history: list[dict[str, Tensor]] = []

    def freeze(self) -> Self:
        """Declare what learns in this stage."""
        self.routed.model.requires_grad_(False)
        self.routed.gates.requires_grad_(True)
        return self

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ShardedBackbone):
            self.trainer.strategy.shard(self.routed)

    def trainable_names(self) -> list[str]:
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        stage = self.stage
        optimiser = torch.optim.AdamW(
            self.parameter_groups(),
            lr=stage.learning_rate,
            weight_decay=stage.weight_decay,
            fused=self.device.type == "cuda" or None,
        )
        warmup = round(stage.warmup_ratio * stage.steps)
        name = "constant_with_warmup" if stage.scheduler == "constant" else stage.scheduler
        schedule = get_scheduler(name, optimiser, num_warmup_steps=warmup, num_training_steps=stage.steps)
        return {"optimizer": optimiser, "lr_scheduler": schedule}

    def parameter_groups(self) -> list[dict]:
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def on_fit_start(self) -> None:
        self.routed.model.eval()
        if self.stage.activation_checkpointing:
            for layer in self.routed.decoder_layers():
                layer.training = True  # stock layers checkpoint only in training mode; their children stay in eval

        if self.compiled:
            self._layers = CompiledLayers(self.routed)

    def on_train_end(self) -> None:
        self.routed.gates.step.noise = None
        if self._layers is not None:
            self._layers.remove()

    def on_before_batch_transfer(self, batch: dict, dataloader_idx: int) -> dict:
        if isinstance(batch.get("sample_positions"), Tensor):  # kept on the host: it seeds generators
            batch["sample_positions"] = batch["sample_positions"].tolist()
        return batch

    def training_step(self, batch: dict, batch_idx: int) -> None:
        step = self.global_step
        optimiser, schedule = self.optimizers(), self._schedule()
        assert isinstance(optimiser, LightningOptimizer)
        micro_batches = list(self.micro_batches(batch))
        num_labels = self._reduce(sum((m["shifted_labels"] != -100).sum() for m in micro_batches)).clamp(min=1)
        targets = self.targets(step)
        others = self._rates_of_other_micro_batches(micro_batches, step)
        optimiser.zero_grad()
        logged: dict[str, Tensor] = {}
        for index, micro in enumerate(micro_batches):
            with self._accumulate(last=index == len(micro_batches) - 1):
                losses = self.losses(micro, step, num_labels, targets, others[index], len(micro_batches))
                self.manual_backward(losses.pop("loss") * self.trainer.world_size)
            for key, value in losses.items():
                logged[key] = logged.get(key, 0) + value.detach()
        if self.stage.grad_clip > 0:
            trained = [p for p in self.parameters() if p.requires_grad]
            torch.nn.utils.clip_grad_norm_(trained, self.stage.grad_clip)  # Lightning's own refuses fused optimisers
        optimiser.step()
        schedule.step()
        self._log_step(logged, len(micro_batches), targets)

    def losses(
        self,
        micro: dict,
        step: int,
        num_labels: Tensor,
        targets: dict[str, float],
        others: RoutingStats | None,
        num_micro: int,
    ) -> dict[str, Tensor]:
        """One micro-batch's share of the step's loss; shares add up to the big batch's loss."""
        method = self.method
        hidden, teacher = self._hidden(micro, step), None
        stats = self.routed.last_stats()
        separation = self.routed.gates.separation() if method.separation_weight > 0 else None
        if method.distill_weight > 0:
            with torch.no_grad(), self.routed.dense():
                teacher = self.routed.hidden_states(**_model_inputs(micro))
        head = self.routed.base.get_output_embeddings()
        cross_entropy, divergence = token_losses(hidden, head, micro["shifted_labels"], teacher, self.compiled)
        language = ((1 - method.distill_weight) * cross_entropy + method.distill_weight * divergence) / num_labels
        scope = stats if others is None else stats + others
        distance = sparsity_distance(scope, targets, method.budget_price, self._attention_weight)
        share = num_micro * self.trainer.world_size
        own = self.routed.gates.penalty(targets, step, self.stage.steps)
        budget = (method.budget_weight * distance if own is None else own) / share
        loss = language + (budget if others is None or own is not None else budget * share)
        if separation is not None:
            loss = loss + method.separation_weight * step / self.stage.steps * separation / share
        rates = {f"sparsity_{kind}": scope.sparsity(kind) / share for kind in KINDS}
        return {
            "loss": loss,
            "reported_loss": language + budget,
            "cross_entropy": cross_entropy / num_labels,
            **rates,
        }

    def targets(self, step: int) -> dict[str, float]:
        """The step's targets: the method's, times the ramp."""
        ramp = self.method.ramp_ratio
        return {key: ramped_target(step, self.stage.steps, value, ramp) for key, value in self.method.targets().items()}

    def micro_batches(self, batch: dict) -> Iterator[dict]:
        """Cut this rank's share of the step into forwards of `micro_batch_size` sequences."""
        total = len(batch["input_ids"])
        size = self.stage.micro_batch_size or total
        for start in range(0, total, size):
            micro = {key: value[start : start + size] for key, value in batch.items()}
            micro["shifted_labels"] = next_token_labels(micro)
            yield micro

    def _hidden(self, micro: dict, step: int) -> Tensor:
        """Routed forward with this step's sampled gates."""
        gates, length = self.routed.gates, micro["input_ids"].shape[1]
        sizes = [gates.num_noise[kind] for kind in KINDS]
        shape = (self.routed.geometry.num_layers, length, sum(sizes))
        noise = gate_noise(self.seed, step, micro["sample_positions"], shape, self.device).transpose(0, 1)
        gates.step.noise = dict(zip(KINDS, noise.split(sizes, dim=-1), strict=True))  # [L, B, T, G] each
        tau = temperature(step, self.stage.steps, self.method.tau_start, self.method.tau_end)
        gates.step.tau = torch.full((), tau, device=self.device)  # a number would be compiled in, anew at every step
        return self.routed.hidden_states(**_model_inputs(micro))

    def _rates_of_other_micro_batches(self, micro_batches: list[dict], step: int) -> list[RoutingStats | None]:
        """For a budget over the whole step: counts of all other micro-batches of all ranks, for each micro-batch.

        With several micro-batches this costs one forward without gradient each: the distance's sign depends on all.
        None asks for the micro-batch's own rate (the published loss).
        """
        alone = len(micro_batches) == 1 and self.trainer.world_size == 1
        if self.method.budget_scope == "micro" or alone:
            return [None] * len(micro_batches)
        own = []
        for micro in micro_batches:
            with torch.no_grad():
                self._hidden(micro, step)
                own.append(self.routed.last_stats())
        total = own[0]
        for stats in own[1:]:
            total = total + stats
        total = RoutingStats({k: self._reduce(v) for k, v in total.kept.items()}, self._reduce(total.num_tokens))
        return [
            RoutingStats({k: total.kept[k] - stats.kept[k] for k in KINDS}, total.num_tokens - stats.num_tokens)
            for stats in own
        ]

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        self.routed.gates.step.noise = None
        hidden = self.routed.hidden_states(**_model_inputs(batch))
        stats = self.routed.last_stats(batch["counted"])
        labels = next_token_labels(batch)
        cross_entropy, _ = token_losses(hidden, self.routed.base.get_output_embeddings(), labels)
        count = (labels != -100).sum()
        name = f"{self.name}/val_cross_entropy"
        self.log(name, cross_entropy / count.clamp(min=1), batch_size=max(int(count), 1), sync_dist=True)
        self.log(f"{self.name}/val_sparsity", stats.total, batch_size=int(stats.num_tokens), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Keep trainable tensors and buffers of the gates; the frozen backbone is the user's own file."""
        check_finite(self.history[-1:], self.parameters())
        keep = set(self.trainable_names()) | {f"routed.gates.{name}" for name, _ in self.routed.gates.named_buffers()}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in keep}
        checkpoint["history"] = self.history_rows()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.history = [{key: torch.tensor(v) for key, v in row.items()} for row in checkpoint["history"]]
        here, there = self.routed.gates.channel_order, checkpoint["state_dict"].get("routed.gates.channel_order")
        if (here is None) != (there is None) or (here is not None and not torch.equal(here.cpu(), there)):
            raise ValueError("the resumed run has the FFN channels in another order than this one")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = False, assign: bool = False):
        """Load non-strictly, then insist that exactly the frozen tensors were absent."""
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        missing = [name for name in self.trainable_names() if name in result.missing_keys]
        if missing or result.unexpected_keys:
            raise ValueError(
                f"checkpoint does not fit this run: missing {missing}, unexpected {result.unexpected_keys}"
            )
        return result

    def _schedule(self) -> LRScheduler:
        schedule = self.lr_schedulers()
        assert isinstance(schedule, LRScheduler)
        return schedule

    def _reduce(self, value: Tensor) -> Tensor:
        """Sum over ranks (a copy; no gradient)."""
        value = value.detach().clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(value)
        return value

    def _accumulate(self, last: bool) -> AbstractContextManager:
        """Hold back gradient exchange between ranks until the step's last micro-batch."""
        strategy = self.trainer.strategy
        if last or not hasattr(strategy, "block_backward_sync"):
            return nullcontext()
        return strategy.block_backward_sync()

    def _log_step(self, logged: dict[str, Tensor], num_micro: int, targets: dict[str, float]) -> None:
        logged["loss"] = logged.pop("reported_loss")
        reduced = self._reduce(torch.stack(list(logged.values())))
        logged = dict(zip(logged, reduced, strict=True))
        logged["target"] = torch.tensor(sum(targets.values()) / len(targets))
        logged["sparsity"] = (logged["sparsity_attention"] + logged["sparsity_ffn"]) / 2
        logged["learning_rate"] = torch.tensor(self._schedule().get_last_lr()[0])
        logged["step"] = torch.tensor(float(self.global_step))
        self.history.append({key: value.detach() for key, value in logged.items()})
        self.log_dict({f"{self.name}/{key}": value for key, value in logged.items()})
        if self.global_step % self.stage.log_every == 0:  # each look waits for the device
            check_finite(self.history[-1:], self.parameters())

    def history_rows(self) -> list[dict[str, float]]:
        """One row per optimiser step since the start of the stage, resumed runs included."""
        return [{key: float(value) for key, value in row.items()} for row in self.history]


def _model_inputs(batch: dict) -> dict[str, Tensor]:
    return {key: batch[key] for key in MODEL_INPUTS if key in batch}
