"""Models larger than one device: the frozen backbone sharded over the ranks (FSDP2), everything trained whole on each.

What is trained (routers, compensation vectors, LoRA) is some hundred megabytes at most, so each rank keeps all of it
and its optimiser state, and gradients are averaged once per step. A checkpoint of a sharded run is therefore that of
a single process, file by file. Embedding and output projection stay whole too: they are read outside the decoder, are
one tensor in tied models, and a sharded root would gather them for the whole step anyway.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from wide import families
from wide.model import RoutedModel


class ShardedBackbone(ModelParallelStrategy):
    """Lightning's FSDP2 strategy, with checkpoints of what is trained, as plain tensors written by rank 0.

    Args:
        num_processes: ranks, all of them data-parallel.
        cpu_offload: keep each rank's shards in host memory and copy a layer to the device when it runs.
    """

    def __init__(self, num_processes: int, cpu_offload: bool = False):
        super().__init__(num_processes, tensor_parallel_size=1, save_distributed_checkpoint=False)
        self.cpu_offload = cpu_offload
        self._exchange = True

    # What a checkpoint holds is whole on every rank: no gathering, as in a strategy of one process.
    lightning_restore_optimizer = Strategy.lightning_restore_optimizer
    lightning_module_state_dict = Strategy.lightning_module_state_dict
    optimizer_state = Strategy.optimizer_state
    save_checkpoint = Strategy.save_checkpoint
    load_checkpoint = Strategy.load_checkpoint
    load_model_state_dict = Strategy.load_model_state_dict
    load_optimizer_state_dict = Strategy.load_optimizer_state_dict

    def shard(self, routed: RoutedModel) -> None:
        """Called from the stage's `configure_model`, when the ranks know each other."""
        check_order(routed)
        pin = self.root_device.type == "cuda"
        policy = CPUOffloadPolicy(pin_memory=pin) if self.cpu_offload else OffloadPolicy()
        shard_backbone(routed, self.device_mesh["data_parallel"], policy)

    def model_to_device(self) -> None:
        assert self.model is not None
        place(self.model, self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """As in Lightning's DDP: backwards inside leave gradients to be exchanged by a later one."""
        self._exchange = False
        try:
            yield
        finally:
            self._exchange = True

    def post_backward(self, closure_loss: Tensor) -> None:
        if self._exchange:
            assert self.model is not None
            average_gradients([p for p in self.model.parameters() if p.requires_grad])


def shard_backbone(routed: RoutedModel, mesh: DeviceMesh, policy: OffloadPolicy) -> None:
    """Shard the frozen parameters of every decoder layer, in place; the decoder is FSDP's root. Once only."""
    decoder, layers = families.get_path(routed.base, routed.layout.decoder), routed.decoder_layers()
    if isinstance(decoder, FSDPModule):
        return
    frozen = {p for p in layers.parameters() if not p.requires_grad}
    whole = set(decoder.parameters()) - frozen
    for module in (*layers, decoder):
        fully_shard(module, mesh=mesh, ignored_params=whole, offload_policy=policy)


def check_order(routed: RoutedModel) -> None:
    """Each rank gives its shard of its own copy, so all must have put the FFN channels into the same order."""
    order = routed.gates.channel_order
    if order is not None:
        low, high = order.clone(), order.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        if not torch.equal(low, high):
            raise RuntimeError("ranks found different orders of the FFN channels; train with trainer.strategy=ddp")


def place(module: nn.Module, device: torch.device) -> None:
    """Move everything to `device` but sharded parameters, which FSDP keeps where its policy says."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(device)
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            setattr(child, name, buffer.to(device))


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters())


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Mean over all ranks, in one exchange; a parameter without gradient counts as zero."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, mean in zip(parameters, flat.split([g.numel() for g in gradients]), strict=True):
        parameter.grad = mean.view_as(parameter)
