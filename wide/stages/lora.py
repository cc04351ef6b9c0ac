"""Stage 2, recovery: LoRA on the seven projections, routers trained with it or frozen (arXiv 2607.28418, section 3).

Loss and budget are those of stage 1, at the full target from the first step. `wide.adapter.add_lora` comes before,
`wide.adapter.merge` after; `experiments.lora` prepares the model.
"""

from dataclasses import replace
from typing import Self

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from wide.adapter import lora_names
from wide.model import RoutedModel
from wide.options import MethodConfig, StageConfig
from wide.stages.calibrate import Calibrate
from wide.stages.objective import LanguageOnly, objective_of


class Lora(Calibrate):
    """Trains the LoRA of a model that `add_lora` made, and its gate provider unless `stage.freeze_routers`."""

    name = "lora"

    def __init__(
        self,
        routed: RoutedModel,
        stage: StageConfig,
        method: MethodConfig | LanguageOnly,
        seed: int,
        compiled: bool = False,
    ):
        assert routed.model is not routed.base, "add_lora comes before this stage"
        objective = objective_of(method)
        start = objective.tau_start if stage.restart_temperature else objective.tau_end
        super().__init__(routed, stage, replace(objective, ramp_ratio=0.0, tau_start=start), seed, compiled)

    def freeze(self) -> Self:
        """Exactly LoRA, and the provider's parameters unless frozen, are trained."""
        self.routed.requires_grad_(False)
        declared = lora_names(self.routed)
        found = {name for name, _ in self.routed.named_parameters() if "lora_" in name}
        assert found == declared, f"LoRA is not where it was declared: {sorted(found ^ declared)}"
        for name in declared:
            self.routed.get_parameter(name).requires_grad_(True)
        self.routed.gates.requires_grad_(not self.stage.freeze_routers)
        return self

    def parameter_groups(self) -> list[dict]:
        """LoRA at `learning_rate`; the provider at its own rate."""
        stage = self.stage
        groups: list[dict] = [{"params": [p for p in self.routed.model.parameters() if p.requires_grad]}]
        routers = [p for p in self.routed.gates.parameters() if p.requires_grad]
        if routers:
            rate = stage.learning_rate if stage.router_learning_rate is None else stage.router_learning_rate
            groups.append({"params": routers, "lr": rate})
        return groups

    def on_fit_start(self) -> None:
        super().on_fit_start()
        for module in self.routed.model.modules():
            if isinstance(module, LoraLayer):
                module.lora_dropout.train()

    def on_train_end(self) -> None:
        super().on_train_end()
        self.routed.model.eval()

    def _hidden(self, micro: dict, step: int) -> Tensor:
        """As stage 1, with LoRA's dropout keyed by (seed, step, first place in the global batch).

        That place tells ranks and micro-batches apart, a resumed run drops what a straight run would have dropped,
        and the forward that only counts decisions agrees with the one that learns.
        """
        key = (self.seed * 1_000_003 + step) * 1_000_003 + micro["sample_positions"][0]
        torch.manual_seed((key ^ 0x5DEE_CE66_D1CE_4E5B) & 0x7FFF_FFFF_FFFF_FFFF)  # another stream than gate_noise's
        return super()._hidden(micro, step)
