"""The routed model: a stock transformers causal LM with masks attached. The reference path of the project.

`load_base` -> `RoutedModel(base, provider)` -> (LoRA) -> `attach_masks`, always last and idempotent: a hook put on a
projection before LoRA wraps it would mask only half of it, and unloading LoRA drops hooks silently.
Per layer four hooks: the two norms' inputs are the residual stream that the routers read; the inputs of o_proj and
down_proj are masked by group; their outputs receive the compensation vectors. Attention code is never touched, so
`generate`, caches, PEFT and every attention implementation keep working. Methods that decide on other activations, or
that evict keys and values, hang further hooks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN

from wide import eviction, families, hooks
from wide.families import Geometry, Layout
from wide.hooks import LayerState, Pass
from wide.methods.provider import GateProvider
from wide.routing import KINDS, Cost, RoutingStats

if TYPE_CHECKING:
    from peft import PeftModel


class RoutedModel(nn.Module):
    """A stock model, its gate provider, and the hooks between them.

    `model` is the `PreTrainedModel` or a `PeftModel` around it; its state-dict keys stay the stock ones.
    """

    def __init__(self, model: "PreTrainedModel | PeftModel", gates: GateProvider, layout: Layout):
        super().__init__()
        self.model, self.gates, self.layout = model, gates, layout
        self.geometry: Geometry = gates.geometry
        self.shared = Pass()
        self.layers: list[LayerState] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._box: list[RoutingStats] | None = None
        self.attach_masks()

    @property
    def base(self) -> PreTrainedModel:
        """The stock model inside any LoRA wrapper."""
        unwrap = getattr(self.model, "get_base_model", None)
        return cast(PreTrainedModel, self.model if unwrap is None else unwrap())

    def decoder_layers(self) -> nn.ModuleList:
        layers = families.get_path(self.base, self.layout.layers)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def forward(self, **inputs: Tensor):
        """The stock forward; `inputs` and the output are transformers' own."""
        return self.model(**inputs)

    def hidden_states(self, **inputs: Tensor) -> Tensor:
        """Normed last hidden states [B, T, D], what the output projection reads."""
        return families.get_path(self.base, self.layout.decoder)(use_cache=False, **inputs)[0]

    def generate(self, **inputs):
        """The stock generate, under whatever routing mode is active."""
        return cast(GenerationMixin, self.model).generate(**inputs)

    def attach_masks(self) -> None:
        """(Re)hang all hooks on the outermost projection modules. Call after every structural change."""
        self.detach_masks()
        decoder = families.get_path(self.base, self.layout.decoder)
        self._handles.append(decoder.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._handles.append(decoder.register_forward_hook(self._end))
        if self.gates.kv == "evicted":
            eviction.check_attention(self.base.config._attn_implementation)
        activation = ACT2FN[self.base.config.hidden_act]
        self.layers = []
        for index, layer in enumerate(self.decoder_layers()):
            self.layers.append(LayerState(self.shared, index, self.gates, index, activation))
            self._handles += hooks.hang(layer, self.layout, self.layers[-1])

    def detach_masks(self) -> None:
        for handle in self._handles:
            handle.remove()
        for layer in self.decoder_layers():
            hooks.release(layer)
        self._handles = []

    def num_attached_masks(self) -> int:
        """Masks that really hang on the projections in use; 2 x layers when the model is whole."""
        ids = {handle.id for handle in self._handles}
        projections = [
            families.get_path(layer, out)
            for layer in self.decoder_layers()
            for out in (self.layout.o_proj, self.layout.down_proj)
        ]
        return sum(bool(ids & module._forward_pre_hooks.keys()) for module in projections)

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Every group runs and no compensation is added: the stock model."""
        previous, self.shared.routing = self.shared.routing, False
        try:
            yield
        finally:
            self.shared.routing = previous

    @contextmanager
    def forced(self, attention: Tensor, ffn: Tensor) -> Iterator[None]:
        """Gates given from outside, [L, B, T, G] each; T is matched from the right for cached decoding."""
        self.shared.forced = {"attention": attention, "ffn": ffn}
        try:
            yield
        finally:
            self.shared.forced = None

    @contextmanager
    def collect(self) -> Iterator[list[RoutingStats]]:
        """Add up the statistics of every forward inside: `with routed.collect() as box: ...; box[0]`."""
        box: list[RoutingStats] = []
        self._box = box
        try:
            yield box
        finally:
            self._box = None

    def last_gates(self, kind: str) -> Tensor:
        """Gates of the last forward, [L, B, T, G] float32."""
        assert self.layers[-1].keep, "no routed forward has run"
        return torch.stack([layer.keep[kind] for layer in self.layers])

    def last_stats(self, counted: Tensor | None = None) -> RoutingStats:
        """Statistics of the last forward over its valid tokens, with gradient; read it before backward.

        `counted` [B] bool leaves out whole rows (fillers that make ranks equally long).
        """
        assert self.layers[-1].keep, "no routed forward has run"
        valid, first = self.shared.valid, self.layers[0].keep["attention"]
        if counted is not None:
            rows = counted.to(first.device)[:, None].expand(first.shape[:2])
            valid = rows if valid is None else valid & rows
        kept = {}
        for kind in KINDS:
            gates = [layer.keep[kind] for layer in self.layers]
            if valid is not None:
                gates = [torch.where(valid[..., None], keep, 0.0) for keep in gates]
            kept[kind] = torch.stack([keep.sum((0, 1)) for keep in gates])
        count = first.shape[0] * first.shape[1] if valid is None else valid.sum()
        return RoutingStats(kept, torch.as_tensor(count, device=first.device))

    def cost(self, length: int) -> Cost:
        """What this model's decisions cost, at causal forwards of `length` tokens."""
        g = self.geometry
        query_width = g.num_heads * g.head_dim
        return Cost(
            num_layers=g.num_layers,
            attention=2 * g.hidden_size * query_width,
            ffn=3 * g.hidden_size * g.ffn_size,
            other=2 * g.hidden_size * g.num_kv_heads * g.head_dim,
            head=g.hidden_size * g.vocab_size,
            core=query_width * (length + 1),
            router=self.gates.router_parameters_per_layer(),
            length=length,
        )

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Note which tokens are real, and number positions from the first real one (left padding)."""
        tokens = kwargs.get("input_ids", args[0] if args else None)
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        length = tokens.shape[1]
        attention_mask = kwargs.get("attention_mask")
        self.shared.valid = None
        for layer in self.layers:
            layer.keep.clear()
        if attention_mask is not None and attention_mask.dim() == 2:
            self.shared.valid = attention_mask[:, -length:].bool()
            if kwargs.get("position_ids") is None:
                positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
                kwargs["position_ids"] = positions[:, -length:]
        positions = kwargs.get("position_ids")
        if positions is None:
            cache = eviction.cache_in(kwargs)
            past = 0 if cache is None else cache.get_seq_length()
            positions = torch.arange(length, device=tokens.device)[None] + past
        self.gates.step.positions, self.gates.step.valid = positions, self.shared.valid
        if self.shared.before is not None:
            self.shared.before()
        return args, kwargs

    def _end(self, module: nn.Module, args: tuple, output: object) -> None:
        if self.shared.after is not None and self.shared.routing:
            self.shared.after()
        if self._box is None or not self.shared.routing:
            return
        stats = self.last_stats()
        kept = {kind: counts.detach().double() for kind, counts in stats.kept.items()}
        stats = RoutingStats(kept, stats.num_tokens.double())
        self._box[:] = [self._box[0] + stats] if self._box else [stats]
