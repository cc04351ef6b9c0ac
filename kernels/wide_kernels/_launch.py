"""Where and how an operator launches: on a GPU or in Triton's interpreter, with or without the bulk copy engine."""

import functools

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


def runs_triton(tensor: torch.Tensor) -> bool:
    """True when a Triton kernel can run on this tensor: a CUDA tensor, or any under TRITON_INTERPRET=1."""
    return tensor.is_cuda or triton.knobs.runtime.interpret


@functools.cache
def _has_bulk_copy(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def row_block_descriptor(matrix: torch.Tensor, block_rows: int, block_cols: int) -> TensorDescriptor | None:
    """A descriptor of [rows, cols] blocks of `matrix` for the bulk copy engine, None where it cannot be used.

    The engine (sm90 and later) needs a 16-byte aligned base and row stride and at least 16 bytes in a block row.
    """
    if matrix.is_cuda and not _has_bulk_copy(matrix.device):
        return None
    size = matrix.element_size()
    aligned = matrix.data_ptr() % 16 == 0 and (matrix.stride(0) * size) % 16 == 0 and matrix.stride(1) == 1
    if not aligned or block_cols * size < 16 or matrix.numel() == 0:
        return None
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [block_rows, block_cols])


def refuse_gradient(operator: str, *tensors: torch.Tensor | None) -> None:
    """Raise when autograd would have to differentiate through the operator: the kernels have no backward."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RuntimeError(
            f"{operator} has no backward and was called with gradients enabled on tensors that require them: "
            "train with the reference path, or call it under torch.no_grad() or torch.inference_mode()"
        )


def last_dim_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself when its last axis is dense (rows may be strided), else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()
