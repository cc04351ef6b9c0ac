"""Operators of token-level dynamic width that skip work: torch and Triton only, importable alone.

One `routing_layout` per keep mask, shared by the operators of a layer; each operator's module holds its reference,
kernel, public function and cases. Axes everywhere: B batch, T tokens, D hidden, H query heads, K kv heads, G groups,
F FFN channels, N output and K input channels of a product. Masks are boolean, True = runs.
"""

from .attention_decode import attention_decode
from .attention_prefill import attention_prefill
from .gemm_k import gemm_k
from .gemm_mn import gate_up, gemm_mn
from .layout import RoutingLayout, routing_layout

__all__ = [
    "RoutingLayout", "attention_decode", "attention_prefill", "gate_up", "gemm_k", "gemm_mn", "routing_layout",
]  # fmt: skip
