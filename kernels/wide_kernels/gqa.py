"""What both attention operators share: head-group geometry, the span of keys of a row, and the dense reference.

A head group is `group_size = H / G` consecutive query heads; it divides the query heads of one KV head or is a
multiple of them. A kernel tile holds the group's heads that share one KV head (`heads`), and a group has `units`
such KV heads. Row b of the batch sees the keys `key_start[b] <= j < key_length[b]`, and its Tq queries are the last
positions of that span: query t sits at `key_length[b] - Tq + t`, so left padding, chunked prefill and a static
cache are one rule. Axes: B batch, Tq query tokens, Tk keys, H query heads, K kv heads, G head groups, D head size.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LOG2_E = 1.4426950408889634
INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class HeadGroups:
    """Sizes of one call, checked.

    Attributes:
        heads: query heads in a tile, all on one KV head.
        units: KV heads a group spans.
        heads_per_kv: query heads of one KV head.
    """

    batch: int
    num_tokens: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    num_groups: int
    head_size: int

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_groups

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def heads(self) -> int:
        return min(self.group_size, self.heads_per_kv)

    @property
    def units(self) -> int:
        return self.group_size // self.heads

    @property
    def num_items(self) -> int:
        """(batch row, group, KV head) triples, the unit of work of both kernels."""
        return self.batch * self.num_groups * self.units

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, keep_mask: Tensor) -> "HeadGroups":
        """Check the shapes q [B, Tq, H, D], k and v [B, Tk, K, D], keep_mask [B, Tq, G] against each other."""
        if not (q.ndim == k.ndim == 4 and keep_mask.ndim == 3):
            raise ValueError(
                f"q and k need 4 axes and keep_mask 3, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(keep_mask.shape)}"
            )
        batch, num_tokens, num_heads, head_size = q.shape
        _, num_keys, num_kv_heads, _ = k.shape
        num_groups = keep_mask.shape[-1]
        if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_size:
            raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must be [{batch}, Tk, K, {head_size}]")
        if keep_mask.shape[:2] != (batch, num_tokens) or keep_mask.dtype != torch.bool:
            raise ValueError(
                f"keep_mask must be bool [{batch}, {num_tokens}, G], got {keep_mask.dtype} {tuple(keep_mask.shape)}"
            )
        if num_kv_heads == 0 or num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads")
        if num_groups == 0 or num_heads % num_groups:
            raise ValueError(f"{num_heads} query heads do not split into {num_groups} groups")
        size, per_kv = num_heads // num_groups, num_heads // num_kv_heads
        if per_kv % size and size % per_kv:
            raise ValueError(
                f"groups of {size} heads neither divide nor multiply the {per_kv} query heads of a KV head"
            )
        if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
            raise ValueError(f"q, k, v must share one dtype of {DTYPES}, got {q.dtype}, {k.dtype}, {v.dtype}")
        return HeadGroups(batch, num_tokens, num_keys, num_heads, num_kv_heads, num_groups, head_size)


def check_call(q: Tensor, key_start: Tensor | None, key_length: Tensor | None, window: int | None) -> None:
    """Refuse what the operators do not do: other index types, mixed devices, an empty window."""
    for name, rows in (("key_start", key_start), ("key_length", key_length)):
        if rows is not None and (rows.dtype != torch.int32 or rows.shape != q.shape[:1] or rows.device != q.device):
            raise ValueError(
                f"{name} must be int32 [{q.shape[0]}] on {q.device}, "
                f"got {rows.dtype} {tuple(rows.shape)} on {rows.device}"
            )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 key, got {window}")


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep_mask: Tensor,
    key_start: Tensor | None = None,
    key_length: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Dense masked attention in float32 (float64 for float64 inputs), [B, Tq, H, D] in the dtype of `q`.

    Inactive (token, group) rows and rows with no key to see are exact zeros; keys outside a row's span are never
    multiplied, whatever they hold.
    """
    batch, num_tokens, num_heads, head_size = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    start = torch.zeros(batch, device=q.device) if key_start is None else key_start
    length = torch.full((batch,), num_keys, device=q.device) if key_length is None else key_length
    key = torch.arange(num_keys, device=q.device)
    spanned = (key >= start[:, None]) & (key < length[:, None])  # [B, Tk]
    position = length[:, None] - num_tokens + torch.arange(num_tokens, device=q.device)  # [B, Tq]
    seen = spanned[:, None] & (key <= position[..., None])  # [B, Tq, Tk]
    if window is not None:
        seen &= key > position[..., None] - window
    k, v = (torch.where(spanned[..., None, None], x, 0).to(wide) for x in (k, v))
    queries = q.to(wide).unflatten(2, (num_kv_heads, -1))  # [B, Tq, K, heads_per_kv, D]
    scores = torch.einsum("btkhd,bskd->bkhts", queries, k) * (scale or 1 / math.sqrt(head_size))
    scores = scores.masked_fill(~seen[:, None, None], -math.inf)
    peak = scores.amax(-1, keepdim=True) if num_keys else scores.new_zeros(*scores.shape[:-1], 1)
    weights = (scores - peak.masked_fill(peak == -math.inf, 0)).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1)
    out = torch.einsum("bkhts,bskd->btkhd", weights, v).flatten(2, 3)  # [B, Tq, H, D]
    heads = keep_mask.repeat_interleave(num_heads // keep_mask.shape[-1], dim=-1)[..., None]
    return torch.where(heads, out, 0).to(q.dtype)


@triton.jit
def mma(a, b, acc, PRECISION: tl.constexpr):
    """a @ b + acc in float32; the interpreter holds bfloat16 as integers and must be given float32 operands.

    For float32 operands the block is summed on its own and then added. The compiler would merge the addition into
    the product, which makes one chain of additions as long as K and 2 to 3 times the library's error; it does not
    merge a subtraction.
    """
    if a.dtype == tl.float32 and PRECISION == "ieee":
        return acc - tl.dot(-a, b, input_precision=PRECISION)
    else:
        if INTERPRET:
            a, b = a.to(tl.float32), b.to(tl.float32)
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def wait_and_release(CHAINED: tl.constexpr):
    """Under programmatic dependent launch: wait for the kernel before, then let the next one's programs be placed.

    In this order whatever was written two kernels ago is complete, so the next kernel may read it before its own wait.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """float32 to DTYPE, to nearest even; the interpreter alone would truncate towards bfloat16."""
    if INTERPRET and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)
