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


def row_pair_descriptor(
    first: torch.Tensor, second: torch.Tensor, block_rows: int, block_cols: int
) -> tuple[TensorDescriptor | None, bool]:
    """A descriptor of [2, rows, cols] blocks, the same block of two matrices, and whether `second` comes first in it.

    The matrices may lie anywhere: the outer stride is the distance of their addresses, which the copy engine takes
    as any multiple of 16 bytes below 2^40. One wide tile then feeds one wide matrix instruction.
    """
    lower, upper = sorted((first, second), key=lambda matrix: matrix.data_ptr())
    parts = [row_block_descriptor(matrix, block_rows, block_cols) for matrix in (lower, upper)]
    distance = upper.data_ptr() - lower.data_ptr()
    if None in parts or lower.stride() != upper.stride() or not 0 < distance < 2**40:
        return None, False
    strides = [distance // lower.element_size(), *lower.stride()]
    return TensorDescriptor(lower, [2, *lower.shape], strides, [2, block_rows, block_cols]), lower is not first


def can_chain(x: torch.Tensor) -> bool:
    """Whether a second kernel may start while the first one drains (programmatic dependent launch, sm90 and later)."""
    return x.is_cuda and _has_bulk_copy(x.device)


def chain_option(chained: bool) -> dict[str, bool]:
    """Launch option of the dependent kernel; the interpreter knows none."""
    return {"launch_pdl": True} if chained else {}


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
