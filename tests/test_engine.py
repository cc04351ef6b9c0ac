"""The engine on a CPU, float32: its logits and texts against the reference path (stock transformers with masks)."""

import pytest
import torch
from tiny import FAMILIES, routed, stock, tokens

import wide
from wide.adapter import add_lora
from wide.base_model import fingerprint, tiny_config
from wide.checkpoint import save_pretrained
from wide.dial import DialPoint
from wide.engine import Engine, from_routed
from wide.engine.synthetic import forced_keep, with_forced_masks, with_gates
from wide.engine.weights import split_bfloat16, take_weights
from wide.methods import load as load_method
from wide.model import RoutedModel
from wide.options import ModelConfig, StageConfig

TOLERANCE = 1e-4
"""Largest difference of logits over the largest logit."""

ROUTERS = ({}, {"compensation": True, "router_norm": True, "router_activation": "silu"})


def model_of(family: str, **options) -> RoutedModel:
    """A routed model whose compensation vectors, if any, matter."""
    model = routed(family, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameters in (model.gates.vectors or {}).values():
            for parameter in parameters:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def reference(model: RoutedModel, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits


def batch(side: str, lengths=(3, 11, 7)) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of unequal length in one batch, padded on one side."""
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        span = slice(width - length, width) if side == "left" else slice(0, length)
        ids[row, span], mask[row, span] = tokens(1, length, seed=length)[0], 1
    return ids, mask


@pytest.mark.parametrize("options", ROUTERS, ids=("plain", "compensated"))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_reference_however_the_prompt_is_cut(family, options):
    model, ids = model_of(family, **options), tokens(2, 40)
    expected = reference(model, ids)
    with model.dense():
        assert difference(reference(model, ids), expected) > 0.1, "routing must matter"
    for chunk in (64, 7, 1):
        assert difference(from_routed(model, prefill_chunk=chunk)(ids), expected) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_routing_off_equals_transformers(family):
    model, ids = model_of(family, compensation=True), tokens(2, 40)
    engine = from_routed(model, routing=False, prefill_chunk=13)
    assert difference(engine(ids), stock(family)(input_ids=ids).logits) < TOLERANCE


@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("family", FAMILIES)
def test_unequal_texts_equal_each_alone(family, side):
    model = model_of(family, compensation=True)
    engine = from_routed(model, prefill_chunk=4)
    ids, mask = batch(side)
    together = engine(ids, mask)
    for row in range(len(ids)):
        real = mask[row].bool()
        alone = reference(model, ids[row, real][None])[0]
        assert difference(together[row, real], alone) < TOLERANCE
        assert difference(engine(ids[row, real][None])[0], alone) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_reference_paths(family):
    model = model_of(family, compensation=True)
    engine = from_routed(model, pad_token=0)
    ids, mask = batch("left")
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    for stop in (None, int(engine.generate(ids, mask, max_new_tokens=8, stop_tokens=())[1, 15])):
        expected = model.generate(input_ids=ids, attention_mask=mask, eos_token_id=stop, **settings)
        found = engine.generate(ids, mask, max_new_tokens=24, stop_tokens=() if stop is None else (stop,))
        assert torch.equal(found, expected)
    steps = list(engine.stream(ids, mask, max_new_tokens=24, stop_tokens=(stop,)))
    assert torch.equal(torch.stack(steps, 1), found[:, ids.shape[1] :])
    assert (found == stop).any() and all(step.shape == (3,) for step in steps)


def test_every_row_stopped_ends_the_text():
    engine = from_routed(model_of("llama"))
    ids = tokens(1, 9)
    whole = engine.generate(ids, max_new_tokens=12, stop_tokens=())
    stop = int(whole[0, 12])
    first = 9 + whole[0, 9:].tolist().index(stop)
    assert torch.equal(engine.generate(ids, max_new_tokens=12, stop_tokens=(198, stop)), whole[:, : first + 1])


@pytest.mark.parametrize("dial", (-30.0, -1.0, 0.5, 30.0))
def test_the_dial_moves_both_paths_alike(dial):
    model, ids = model_of("qwen3", compensation=True), tokens(2, 30)
    model.gates.dial.fill_(dial)
    expected = reference(model, ids)
    assert difference(from_routed(model)(ids), expected) < TOLERANCE
    kept = float(torch.cat([model.last_gates(kind).flatten() for kind in ("attention", "ffn")]).mean())
    assert kept == {-30.0: 0.0, 30.0: 1.0}.get(dial, kept) and (abs(dial) == 30 or 0 < kept < 1)


def test_forced_masks_equal_the_reference_under_the_same_gates():
    model, (ids, mask) = model_of("llama", compensation=True), batch("left", (5, 40, 23))
    keep = forced_keep(model.gates, 0.5, seed=1, period=17)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    gates = {kind: rows[:, positions % 17].float() for kind, rows in keep.items()}
    with model.forced(**gates):
        expected = reference(model, ids, mask)
    engine = from_routed(model, prefill_chunk=9)
    engine.decoder.weights = with_forced_masks(engine.decoder.weights, keep)
    real = mask.bool()
    assert difference(engine(ids, mask)[real], expected[real]) < TOLERANCE


def test_weights_are_shared_and_the_routed_model_stays_whole():
    model, ids = model_of("qwen2"), tokens(1, 8)
    before = reference(model, ids)
    weights = take_weights(model)
    layer = model.base.model.layers[1]
    assert torch.equal(reference(model, ids), before)
    assert layer.self_attn.q_proj.weight.data_ptr() == weights.layers[1].qkv.data_ptr()
    assert layer.self_attn.v_proj.bias.data_ptr() == weights.layers[1].qkv_bias[-64 // 2 :].data_ptr()
    assert layer.mlp.up_proj.weight.data_ptr() == weights.layers[1].gate_up[160:].data_ptr()


def test_vectors_lie_behind_the_output_projections_of_the_routed_model_itself():
    model = model_of("llama", compensation=True)
    stock_weight = model.base.model.layers[1].mlp.down_proj.weight.detach().clone()
    layer, stored = take_weights(model).layers[1], model.base.model.layers[1]
    for linear, routing in ((stored.self_attn.o_proj, layer.attention), (stored.mlp.down_proj, layer.ffn)):
        width, groups = linear.weight.shape[1], routing.num_groups
        assert linear.weight.data_ptr() == routing.extended.data_ptr()
        assert routing.extended.stride(0) * 4 % 128 == 0 and routing.extended.shape[1] >= width + groups
        assert torch.equal(routing.extended[:, width : width + groups], routing.vectors.T)
        assert not routing.extended[:, width + groups :].any()
    assert torch.equal(stored.mlp.down_proj.weight, stock_weight)
    assert take_weights(routed("llama")).layers[1].ffn.extended is None, "no vectors, no further columns"


@pytest.mark.parametrize("sizes", ((16, 32), (32, 1)), ids=("fewer groups fit", "more groups than there is room for"))
def test_one_set_of_weights_serves_several_routers_in_turn(sizes):
    first, second = (model_of("llama", compensation=True, ffn_group_size=size) for size in sizes)
    second.base.load_state_dict(first.base.state_dict())
    ids, weights = tokens(2, 20), take_weights(first)
    assert difference(Engine(weights)(ids), reference(first, ids)) < TOLERANCE
    moved = with_gates(weights, second.gates)
    assert (moved.layers[0].ffn.extended is None) == (sizes[1] == 1)
    assert difference(Engine(moved)(ids), reference(second, ids)) < TOLERANCE
    assert difference(Engine(weights, routing=False)(ids), stock("llama")(input_ids=ids).logits) < TOLERANCE


def test_three_bfloat16_parts_hold_a_float32_weight():
    weight = torch.randn(8, 300) * torch.logspace(-6, 3, 300)
    parts = split_bfloat16(weight).T.double().view(3, 8, 300).sum(0)
    assert ((parts - weight).abs() <= 2.0**-24 * weight.abs()).all()


@pytest.mark.parametrize("lora", (False, True))
def test_load_is_the_checkpoint_with_lora_merged(tmp_path, lora):
    options = {"attn_group_size": 2, "ffn_group_size": 32, "router_rank": 4, "init_gap": 0.0, "compensation": True}
    model = model_of("llama", **options)
    base_fingerprint = fingerprint(model.base)
    if lora:
        model = add_lora(model, StageConfig(name="lora", lora_rank=2))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    dials = [DialPoint(s, s, torch.full((2, 2), value)) for s, value in ((0.2, 1.0), (0.6, -1.0))]
    save_pretrained(
        model,
        tmp_path / "c",
        model=ModelConfig(name="tiny_llama", source="tiny", family="llama"),
        method=load_method("wide").Config(**options),
        base_fingerprint=base_fingerprint,
        curve=dials,
    )
    ids, seen = tokens(2, 20), []
    for sparsity, value in ((None, 0.0), (0.2, 1.0), (0.6, -1.0)):
        model.gates.dial.fill_(value)
        engine = wide.load(tmp_path / "c", sparsity=sparsity, device="cpu")
        seen.append(reference(model, ids))
        assert difference(engine(ids), seen[-1]) < TOLERANCE
        assert engine.decoder.expected_keep == pytest.approx(1 - (0.25 if sparsity is None else sparsity))
    assert difference(seen[1], seen[2]) > 0.01
    assert engine.stop_tokens == (2,)


def test_rotary_scaling_and_a_window_shorter_than_the_text():
    for family, length in (("llama", 200), ("mistral", 40)):
        config = tiny_config(family)
        if family == "llama":
            config.rope_parameters = {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        base = type(stock(family))(config).eval()
        base.load_state_dict(stock(family).state_dict())
        model = routed(family)
        model = RoutedModel(base, model.gates, model.layout)
        ids = tokens(2, length)
        for chunk in (length, 30, 1):
            assert difference(from_routed(model, prefill_chunk=chunk)(ids), reference(model, ids)) < TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='dynamic'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_models_it_would_compute_wrongly_are_refused(change, message):
    model = routed("llama")
    for key, value in change.items():
        setattr(model.base.config, key, value)
    with pytest.raises(ValueError, match=message):
        from_routed(model)


def test_biases_it_would_ignore_are_refused():
    model = routed("llama")
    model.base.model.layers[0].mlp.up_proj.bias = torch.nn.Parameter(torch.ones(160))
    with pytest.raises(ValueError, match="up_proj have biases"):
        from_routed(model)


MISTAKES = [
    ({"input_ids": tokens(1, 30), "max_new_tokens": 3}, "30 prompt tokens and 3 new ones exceed max_length=32"),
    ({"input_ids": torch.full((1, 3), 199)}, "199 to 199; legal: 0 to 198"),
    ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "input_ids must be integers"),
    ({"input_ids": torch.zeros(3, dtype=torch.long)}, "input_ids must be integers"),
    ({"input_ids": torch.zeros(1, 3)}, "input_ids must be integers"),
    ({"input_ids": tokens(2, 4), "attention_mask": torch.ones(2, 5)}, "is not like input_ids"),
    ({"input_ids": tokens(1, 4), "attention_mask": torch.tensor([[1, 0, 1, 1]])}, "one run of ones"),
    ({"input_ids": tokens(1, 4), "attention_mask": torch.zeros(1, 4)}, "one run of ones"),
    ({"input_ids": tokens(1, 4), "attention_mask": torch.tensor([[1, 1, 1, 0]])}, "needs left padding"),
    ({"input_ids": tokens(1, 4), "max_new_tokens": 0}, "max_new_tokens=0"),
    ({"input_ids": tokens(1, 4), "temperature": -1.0}, "temperature=-1.0"),
    ({"input_ids": tokens(1, 4), "temperature": 1.0, "top_k": 0}, "top_k=0"),
    ({"input_ids": tokens(1, 4), "temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
    ({"input_ids": tokens(1, 4), "top_p": 0.5}, "need temperature above 0"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_are_refused_at_the_call(call, message):
    engine = from_routed(routed("llama"), max_length=32)
    with pytest.raises(ValueError, match=message):
        engine.stream(**{"max_new_tokens": 2} | call)


@pytest.mark.parametrize("options", ({"max_length": 0}, {"max_length": 513}, {"prefill_chunk": 0}))
def test_impossible_engines_are_refused(options):
    with pytest.raises(ValueError, match="out of range; legal: 1"):
        from_routed(routed("llama"), **options)


def test_the_cache_grows_and_is_reused():
    engine = from_routed(routed("llama"))
    ids = tokens(1, 300)
    engine.generate(ids[:, :20], max_new_tokens=2)
    small = engine.cache
    engine.generate(ids[:, :100], max_new_tokens=2)
    assert engine.cache is small
    long = engine(ids)
    assert engine.cache is not small and difference(engine(ids[:, :50]), long[:, :50]) < TOLERANCE
