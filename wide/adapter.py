"""LoRA inside a routed model: put in, folded into the weights, saved and loaded in peft's own format.

The order is what matters. LoRA goes into the finished model first and masks are attached last, so that a mask covers
a projection together with its LoRA branch; merging throws LoRA's modules away and the hooks with them, so masks are
attached again after it. Used by `wide.stages.lora` (training) and `wide.checkpoint` (folder `adapter/`).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraModel
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from wide.model import RoutedModel
from wide.options import ModelConfig, StageConfig

FOLDER, TENSORS = "adapter", "adapter_model.safetensors"


class LoraRoutedModel(RoutedModel):
    """A routed model with LoRA inside. `dense` is the stock model: neither masks nor LoRA."""

    @contextmanager
    def dense(self) -> Iterator[None]:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        try:
            with super().dense(), cast(PeftModel, self.model).disable_adapter():
                yield
        finally:
            self.model.requires_grad_(False)  # peft unfreezes whatever it enables again
            for parameter in trained:
                parameter.requires_grad_(True)


def add_lora(routed: RoutedModel, stage: StageConfig, seed: int = 0) -> LoraRoutedModel:
    """Fresh LoRA on all seven projections of every layer, float32 whatever the base is stored in; masks last.

    The base model is modified in place, so `routed` itself is spent. A is drawn from `seed` on the CPU (the same on
    every device and rank), B is zero: the model computes what it computed before.
    """
    assert routed.model is routed.base, "the model has LoRA already"
    routed.detach_masks()
    options = LoraConfig(
        r=stage.lora_rank,
        lora_alpha=stage.lora_alpha,
        lora_dropout=stage.lora_dropout,
        target_modules=list(routed.layout.projections),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = LoraRoutedModel(cast(PeftModel, get_peft_model(routed.base, options)), routed.gates, routed.layout)
    _check_masks(wrapped)
    return wrapped.eval()


def merge(routed: RoutedModel) -> RoutedModel:
    """LoRA folded into the base weights, its modules gone, masks on the plain projections again.

    Save before merging: a checkpoint folder holds LoRA, never base weights. `routed` is spent.
    """
    routed.detach_masks()
    plain = cast(LoraModel, routed.model.base_model).merge_and_unload(safe_merge=True)
    merged = RoutedModel(cast(PreTrainedModel, plain), routed.gates, routed.layout)
    _check_masks(merged)
    return merged.eval()


def lora_names(routed: RoutedModel) -> set[str]:
    """Parameters of `routed` that LoRA brings: A and B of seven projections in every layer."""
    paths = [path for name, path in vars(routed.layout).items() if name.endswith("_proj")]
    return {
        f"model.base_model.model.{routed.layout.layers}.{layer}.{path}.lora_{side}.default.weight"
        for layer in range(routed.geometry.num_layers)
        for path in paths
        for side in "AB"
    }


def save_adapter(routed: RoutedModel, folder: Path, model: ModelConfig) -> None:
    """Write `adapter/` into `folder`: peft's config, card and safetensors; the base is named as the user named it."""
    assert isinstance(routed.model, PeftModel)
    for options in routed.model.peft_config.values():
        options.base_model_name_or_path = model.path or model.name
        vars(options)["revision"] = model.revision
    routed.model.save_pretrained(str(folder / FOLDER), save_embedding_layers=False)


def load_adapter(base: PreTrainedModel, folder: Path) -> PeftModel:
    """The stock model with the frozen LoRA of `folder`/adapter. The caller attaches masks afterwards.

    Raises:
        ValueError: names tensors that LoRA needs and the file lacks, or the other way round (peft only warns).
    """
    path = folder / FOLDER / TENSORS
    if not path.is_file():
        raise ValueError(f"{path} is missing: the checkpoint is incomplete")
    try:
        found = load_file(path).keys()
        options = json.loads((folder / FOLDER / "adapter_config.json").read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"the adapter of {folder} is incomplete: {error}") from None
    if options.get("peft_type") != "LORA" or options.get("megatron_config"):  # for those peft imports what a file names
        odd = "megatron_config" if options.get("megatron_config") else options.get("peft_type")
        raise ValueError(f"the adapter of {folder} is no plain LoRA: {odd}")
    model = PeftModel.from_pretrained(base, folder / FOLDER, torch_device=str(base.device))
    wanted = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    if wanted != found:
        raise ValueError(f"{path}: missing {sorted(wanted - found)}, unexpected {sorted(found - wanted)}")
    return model.requires_grad_(False)


def _check_masks(routed: RoutedModel) -> None:
    wanted, found = 2 * routed.geometry.num_layers, routed.num_attached_masks()
    assert found == wanted, f"{found} masks are attached to the projections in use, not {wanted}"
