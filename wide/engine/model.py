"""The decoder: stock weights, a static cache, and sublayers that skip what the routers say (arXiv 2607.28418).

One file from tokens to logits. A sublayer reads `norm(residual)`, decides its groups from the same residual, computes
the active ones and leaves its output as `delta`, which the next norm adds. What the skipped groups of a sublayer owe,
their compensation vectors, comes out of the output projection itself, whose further input columns are the skipped
groups; for a single token the next norm adds it. Routing off (`routing=False`) is the dense model from the same code.
Axes: B batch, T tokens, M = B x T, D hidden, H query heads, K kv heads, G groups, F FFN channels.
"""

import torch.nn.functional as F
from torch import Tensor
from wide_kernels import RoutingLayout, gate_up, gemm_k, gemm_mn, routing_layout
from wide_kernels._launch import runs_triton
from wide_kernels.dispatch import choose
from wide_kernels.gemm_k import add_vectors_
from wide_kernels.layout import MAX_UNION_TOKENS
from wide_kernels.masking import silu_mul, skipped_columns_

from wide.engine.attention import attend
from wide.engine.cache import Cache
from wide.engine.small import Owed, TokenScratch, add_norm, decide, rotate_and_store, route_token
from wide.engine.weights import Layer, Routed, Weights


class TokenLayout(RoutingLayout):
    """The layout of one token, whose list of active groups the routing kernel wrote already.

    `with_kv`, of an attention sublayer, is the layout over the fused Q, K and V rows: K and V always run.
    """

    def __init__(self, keep_mask: Tensor, expected_keep: float, active: Tensor, num_active: Tensor):
        super().__init__(keep_mask, expected_keep)
        self._active = [active, num_active]
        self.with_kv: TokenLayout | None = None

    def lists(self, route: str, set_size: int = 0) -> list[Tensor]:
        assert route != "skip", "one token has no lists for the many-token operators"
        return [] if route == "dense" else self._active


class Decoder:
    """Weights and the forward over them; no state between calls but working memory.

    `expected_keep` is the share of groups expected to run, a static hint: it chooses operators, never results.
    """

    def __init__(self, weights: Weights, expected_keep: float, routing: bool = True):
        self.weights, self.expected_keep, self.routing = weights, expected_keep, routing
        g = weights.geometry
        self.query_width, self.kv_width = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
        router = weights.layers[0].attention.router
        self.scratch: TokenScratch | None = None
        if router is not None and runs_triton(weights.embedding):
            self.scratch = TokenScratch(g.hidden_size, router.reduce.shape[0], weights.device)

    def hidden(self, tokens: Tensor, cache: Cache) -> Tensor:
        """tokens [B, T] int64, the next of each row -> normed last hidden states [B, T, D]; the cache advances."""
        cache.advance(tokens.shape[1])
        residual = F.embedding(tokens.flatten(), self.weights.embedding)  # [M, D]
        delta, owed = None, None
        for index, layer in enumerate(self.weights.layers):
            residual, x, layout = self._enter(residual, delta, owed, layer.attn_norm, layer.attention, cache)
            delta, owed = self._attention(x, layout, layer, index, cache)
            residual, x, layout = self._enter(residual, delta, owed, layer.ffn_norm, layer.ffn, cache)
            delta, owed = self._ffn(x, layout, layer)
        _, x, _ = add_norm(residual, self._pay(delta, owed), self.weights.norm, self.weights.eps)
        return x.unflatten(0, tokens.shape)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [..., D] -> [..., V] in the model's dtype."""
        return F.linear(hidden, self.weights.head)

    def _enter(
        self, residual: Tensor, delta: Tensor | None, owed: Owed | None, norm: Tensor, routed: Routed,
        cache: Cache,
    ) -> tuple[Tensor, Tensor, RoutingLayout | None]:  # fmt: skip
        """Add what the last sublayer left, norm, and decide: residual, norm [M, D], layout (None: all groups run)."""
        eps = self.weights.eps
        if self.routing and self.scratch is not None and len(residual) == 1:
            always = self._always(routed)
            x, keep, active, counts = route_token(residual, delta, owed, norm, eps, routed, cache, always, self.scratch)
            layout = TokenLayout(keep[:, : routed.num_groups], self.expected_keep, active, counts[:1])
            if always:
                layout.with_kv = TokenLayout(keep, self.expected_keep, active, counts[1:])
            return residual, x, layout
        residual, x, square = add_norm(residual, self._pay(delta, owed), norm, eps)
        if not self.routing:
            return residual, x, None
        keep = self._keep(residual, square, routed, cache)
        return residual, x, routing_layout(keep, self.expected_keep)

    def _keep(self, residual: Tensor, square: Tensor, routed: Routed, cache: Cache) -> Tensor:
        """Decisions of one sublayer, bool [M, G]."""
        if routed.router is None:
            hidden = residual.unflatten(0, (cache.batch, -1))
            step = routed.gates.step
            step.positions = cache.positions(hidden.shape[1]).unflatten(0, hidden.shape[:2])
            step.valid = cache.valid(hidden.shape[1]) if cache.padded else None
            return routed.gates.gate(routed.layer, routed.kind, hidden).flatten(0, 1) > 0.5
        by_position = len(routed.router.bias) > 1
        positions = cache.positions(len(residual) // cache.batch) if by_position else None
        return decide(routed.router, residual, square, positions)

    def _always(self, routed: Routed) -> int:
        """Groups as wide as the query groups that hold the keys and values, when they share the one-token product."""
        return -(-2 * self.kv_width // routed.group_width) if routed.kind == "attention" else 0

    def _owed(self, layout: RoutingLayout | None, routed: Routed) -> Owed | None:
        """Whose vectors are not added, bool [M, G], and the vectors [G, D]; None where there are none."""
        if layout is None or routed.vectors is None:
            return None
        if routed.router is not None:
            return layout.keep_mask, routed.vectors
        return routed.gates.stands_in(layout.keep_mask.float()) < 0.5, routed.vectors

    def _pay(self, delta: Tensor | None, owed: Owed | None) -> Tensor | None:
        """delta [M, D] plus the vectors of the skipped groups, in place."""
        if owed is None:
            return delta
        assert delta is not None
        return add_vectors_(delta, *owed)

    def _form(self, x: Tensor, layout: RoutingLayout | None, weight: Tensor, routed: Routed) -> tuple[str, int]:
        """How the output projection wants its input: what skipped blocks hold, and spare columns behind the rows.

        `x` [M, D] stands for that input, which has the same tokens and dtype. A dense product needs zeros, and takes
        the vectors in spare columns; the operator that skips never reads skipped blocks. The few tokens that the
        one-token operators take have no room to save.
        """
        if layout is None:
            return "undefined", 0
        if choose("gemm_k", x, weight, layout, routed.group_width).route == "skip":
            return "undefined", 0
        if len(x) <= MAX_UNION_TOKENS or routed.extended is None:
            return "zeros", 0
        return "zeros", routed.extended.shape[1] - weight.shape[1]

    def _leave(
        self, inner: Tensor, layout: RoutingLayout | None, weight: Tensor, routed: Routed, skipped: str, spare: int
    ) -> tuple[Tensor, Owed | None]:
        """Output projection of inner [M, width] in the form of `_form` -> delta [M, D] and what is still owed."""
        if layout is None:
            return F.linear(inner, weight), None
        owed, size = self._owed(layout, routed), routed.group_width
        if owed is not None and spare and routed.extended is not None:
            rows = inner.as_strided((len(inner), inner.shape[1] + spare), inner.stride())
            skipped_columns_(rows[:, inner.shape[1] :], owed[0])
            return F.linear(rows, routed.extended), None
        if owed is None or owed[0] is not layout.keep_mask or isinstance(layout, TokenLayout):
            return gemm_k(inner, weight, layout, group_size=size, skipped=skipped), owed
        return gemm_k(inner, weight, layout, group_size=size, skipped=skipped, vectors=owed[1]), None

    def _attention(
        self, x: Tensor, layout: RoutingLayout | None, layer: Layer, index: int, cache: Cache
    ) -> tuple[Tensor, Owed | None]:
        q, kv = self._project(x, layout, layer)
        skipped, spare = self._form(x, layout, layer.o, layer.attention)
        keep = None if layout is None else layout.keep_mask
        q = rotate_and_store(q, kv, layer, index, cache, self.weights.eps, keep)
        keep = None if keep is None else keep.unflatten(0, (cache.batch, -1))
        heads = q.unflatten(0, (cache.batch, -1)).unflatten(-1, (-1, self.weights.geometry.head_dim))
        mixed = attend(heads, keep, cache, index, layer.window, self.expected_keep, skipped, spare)
        inner = mixed.flatten(2).flatten(0, 1)  # [M, H x d]
        return self._leave(inner, layout, layer.o, layer.attention, skipped, spare)

    def _project(self, x: Tensor, layout: RoutingLayout | None, layer: Layer) -> tuple[Tensor, Tensor]:
        """Queries [M, H x d], undefined where skipped, and keys and values [M, 2K x d]."""
        width, group_size = self.query_width, layer.attention.group_width
        together = getattr(layout, "with_kv", None) or layout
        rows = layer.qkv if together is not layout else layer.qkv[:width]
        if layout is None or together is None or choose("gemm_mn", x, rows, together, group_size).route == "dense":
            qkv = F.linear(x, layer.qkv, layer.qkv_bias)
        elif together is not layout:
            qkv = gemm_mn(x, layer.qkv, together, layer.qkv_bias, group_size=group_size)
        else:
            bias = layer.qkv_bias
            q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
            q = gemm_mn(x, rows, layout, q_bias, group_size=group_size)
            return q, F.linear(x, layer.qkv[width:], kv_bias)
        return qkv[:, :width], qkv[:, width:]

    def _ffn(self, x: Tensor, layout: RoutingLayout | None, layer: Layer) -> tuple[Tensor, Owed | None]:
        skipped, spare = self._form(x, layout, layer.down, layer.ffn)
        group_size, half = layer.ffn.group_width, len(layer.gate_up) // 2
        gate, up = layer.gate_up[:half], layer.gate_up[half:]
        if layout is None or choose("gate_up", x, gate, layout, group_size).route == "dense":
            both = F.linear(x, layer.gate_up)
            keep = None if layout is None else layout.keep_mask
            out = x.new_empty(len(x), half + spare)[:, :half] if spare else None
            inner = silu_mul(both[:, :half], both[:, half:], keep, group_size, out)
        else:
            inner = gate_up(x, gate, up, layout, group_size=group_size, skipped=skipped, spare=spare)
        return self._leave(inner, layout, layer.down, layer.ffn, skipped, spare)
