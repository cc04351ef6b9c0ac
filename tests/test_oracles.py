"""Oracles A (all on equals dense) and B (a pattern equals hand-zeroed columns), for every family and way of running."""

import pytest
import torch
from tiny import FAMILIES, pattern, routed, stock, tokens, zeroed

from wide.base_model import tiny_config
from wide.families import Geometry, check_groups, legal_attn_group_sizes
from wide.methods import load as load_method
from wide.model import RoutedModel

ATTENTION = ("sdpa", "eager")
EXACT = {"atol": 1e-5, "rtol": 0}


def padded(side: str, lengths: tuple[int, ...] = (3, 11, 7)):
    """One batch of texts of unequal length, and the texts alone."""
    texts = [tokens(1, n, seed=n) for n in lengths]
    width = max(lengths)
    ids, mask = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width, dtype=torch.long)
    for row, text in enumerate(texts):
        span = slice(width - text.shape[1], width) if side == "left" else slice(0, text.shape[1])
        ids[row, span], mask[row, span] = text[0], 1
    return ids, mask, texts


@pytest.mark.parametrize("attn", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_gates_on_equals_dense(family, attn):
    model, ids = routed(family, attn), tokens(2, 40)
    ones = {kind: torch.ones(2, 2, 40, groups) for kind, groups in model.gates.num_groups.items()}
    with torch.no_grad():
        expected = stock(family, attn)(input_ids=ids).logits
        with model.forced(**ones):
            torch.testing.assert_close(model(input_ids=ids).logits, expected, **EXACT)
        with model.dense():
            assert torch.equal(model(input_ids=ids).logits, expected)


@pytest.mark.parametrize("attn", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
def test_pattern_equals_zeroed_columns(family, attn):
    model, ids = routed(family, attn), tokens(2, 40)
    gates = pattern(model, 2, 40)
    with torch.no_grad(), model.forced(**gates):
        expected = zeroed(stock(family, attn), gates, model.geometry)(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, expected, **EXACT)
        dense = stock(family, attn)(input_ids=ids).logits
    assert (expected - dense).abs().max() > 1e-2, "the pattern must matter for the comparison to mean anything"


@pytest.mark.parametrize("attn", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
def test_pattern_holds_in_cached_decode(family, attn):
    model, ids = routed(family, attn), tokens(2, 20)
    gates = pattern(model, 2, 20)
    with torch.no_grad():
        expected = zeroed(stock(family, attn), gates, model.geometry)(input_ids=ids).logits
        with model.forced(**{kind: keep[:, :, :12] for kind, keep in gates.items()}):
            out = model(input_ids=ids[:, :12], use_cache=True)
        rows = [out.logits]
        for t in range(12, 20):
            with model.forced(**{kind: keep[:, :, t : t + 1] for kind, keep in gates.items()}):
                out = model(input_ids=ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits)
    torch.testing.assert_close(torch.cat(rows, 1), expected, **EXACT)


@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("attn", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
def test_f01_padding_changes_neither_logits_nor_gates(family, attn, side):
    model = routed(family, attn)
    ids, mask, texts = padded(side)
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask).logits
        gates = {kind: model.last_gates(kind) for kind in model.gates.num_groups}
        for row, text in enumerate(texts):
            alone = model(input_ids=text).logits[0]
            real = mask[row].bool()
            torch.testing.assert_close(together[row, real], alone, **EXACT)
            for kind, keep in gates.items():
                assert torch.equal(keep[:, row, real], model.last_gates(kind)[:, 0])


@pytest.mark.parametrize("attn", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
def test_f21_gates_do_not_depend_on_how_tokens_arrive(family, attn):
    model, ids = routed(family, attn), tokens(1, 40)
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        gates = {kind: model.last_gates(kind) for kind in model.gates.num_groups}
        for chunks in ([1] * 40, [1, 2, 5, 32]):
            cache, start, logits, seen = None, 0, [], {kind: [] for kind in gates}
            for size in chunks:
                out = model(input_ids=ids[:, start : start + size], past_key_values=cache, use_cache=True)
                cache, start = out.past_key_values, start + size
                logits.append(out.logits)
                for kind, rows in seen.items():
                    rows.append(model.last_gates(kind))
            torch.testing.assert_close(torch.cat(logits, 1), whole, **EXACT)
            for kind, rows in seen.items():
                assert torch.equal(torch.cat(rows, 2), gates[kind])
        changed = ids.clone()
        changed[0, 30] = (changed[0, 30] + 1) % 199
        assert torch.equal(model(input_ids=changed).logits[:, :30], whole[:, :30])


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_on_a_left_padded_batch_equals_each_text_alone(family):
    model = routed(family)
    ids, mask, texts = padded("left")
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    together = model.generate(input_ids=ids, attention_mask=mask, **settings)
    uncached = model.generate(input_ids=ids, attention_mask=mask, use_cache=False, **settings)
    assert torch.equal(together, uncached)
    for row, text in enumerate(texts):
        alone = model.generate(input_ids=text, attention_mask=torch.ones_like(text), **settings)
        assert torch.equal(together[row, -8:], alone[0, -8:])


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("attn", ATTENTION)
def test_f03_fully_masked_rows_and_poisoned_padding_stay_apart(attn, dtype):
    lengths = (1, 2, 40)
    ids, mask, _ = padded("left", lengths)
    ids = torch.cat([ids, torch.zeros(1, 40, dtype=torch.long)])
    mask = torch.cat([mask, torch.zeros(1, 40, dtype=torch.long)])
    results = []
    for poison in (0.0, 1e4):
        model = routed("llama", attn)
        model.model.to(dtype)
        with torch.no_grad():
            model.base.get_input_embeddings().weight[0] = poison
        shape = (model.geometry.num_layers, *ids.shape)
        model.gates.step.noise = {kind: torch.zeros(*shape, g) for kind, g in model.gates.num_groups.items()}
        out = model(input_ids=ids, attention_mask=mask).logits.float()
        stats = model.last_stats()
        (out[mask.bool()].square().mean() + stats.total).backward()
        for name, parameter in model.gates.named_parameters():
            assert torch.isfinite(parameter.grad).all() and parameter.grad.abs().max() > 0, name
        out = out.detach()
        assert stats.num_tokens == sum(lengths)
        assert torch.isfinite(out[mask.bool()]).all() and torch.isfinite(stats.total)
        results.append((out[mask.bool()], stats.kept["ffn"]))
    torch.testing.assert_close(results[0][0], results[1][0], **EXACT)
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("attn", ATTENTION)
def test_f09_settings_that_act_only_past_a_length(attn):
    """Rotary scaling with a short original length, and a sliding window, at every position, prefill and decode."""
    for family, length in (("llama", 200), ("mistral", 40)):
        config = tiny_config(family)
        config._attn_implementation = attn
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
        plain = type(stock(family))(config).eval()
        plain.load_state_dict(base.state_dict())
        model = routed(family, attn)
        model = RoutedModel(base, model.gates, model.layout)
        ids = tokens(1, length)
        with torch.no_grad():
            expected = plain(input_ids=ids).logits
            ones = {kind: torch.ones(2, 1, length, groups) for kind, groups in model.gates.num_groups.items()}
            with model.forced(**ones):
                out = model(input_ids=ids[:, : length - 5], use_cache=True)
                rows = [out.logits]
                for t in range(length - 5, length):
                    out = model(input_ids=ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
                    rows.append(out.logits)
            torch.testing.assert_close(torch.cat(rows, 1), expected, **EXACT)
            assert not torch.allclose(expected, stock(family, attn)(input_ids=ids).logits) or family == "mistral"


def test_f05_geometry_counts_query_outputs_not_hidden_size():
    model = routed("qwen3")
    assert model.gates.group_width("attention") == 2 * 32
    assert model.cost(length=1).attention == 2 * 48 * 128


HEADS = ((9, 3), (12, 4), (15, 5), (16, 2), (24, 8))


@pytest.mark.parametrize("heads,kv", HEADS)
@pytest.mark.parametrize("num_groups", (1, 2, 4, 8, 16, "heads", "more"))
def test_f07_every_accepted_head_grouping_is_exact_and_others_are_refused(heads, kv, num_groups):
    groups = {"heads": heads, "more": heads * 2}.get(num_groups, num_groups)
    config = tiny_config("llama")
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = heads, kv, 4
    config.num_hidden_layers = 1
    geometry = Geometry.from_hf(config)
    size, remainder = divmod(heads, groups)
    per_kv = heads // kv
    fits = remainder == 0 and size > 0 and (per_kv % size == 0 or size % per_kv == 0)
    if not fits:
        illegal = size if size and remainder == 0 else heads + 1
        with pytest.raises(ValueError, match=f"legal: {legal_attn_group_sizes(geometry)[0]}"):
            check_groups(geometry, illegal, 32)
        return
    check_groups(geometry, size, 32)
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    base = LlamaForCausalLM(config).eval()
    plain = LlamaForCausalLM(config).eval()
    plain.load_state_dict(base.state_dict())
    method = load_method("wide")
    gates = method.build(method.Config(attn_group_size=size, ffn_group_size=32, compensation=False), geometry)
    model = RoutedModel(base, gates, routed("llama").layout)
    keep = pattern(model, 1, 6)
    ids = tokens(1, 6)
    with torch.no_grad(), model.forced(**keep):
        expected = zeroed(plain, keep, geometry)(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, expected, **EXACT)


@pytest.mark.parametrize("ffn", (160, 1536))
def test_f07_seven_ffn_groups_are_refused_by_name(ffn):
    config = tiny_config("llama")
    config.intermediate_size = ffn
    with pytest.raises(ValueError, match=f"does not divide the FFN width {ffn}; legal: 1, 2"):
        check_groups(Geometry.from_hf(config), 2, ffn // 7)


def test_compensation_replaces_skipped_groups_by_their_vectors():
    model, ids = routed("llama", compensation=True), tokens(2, 9)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for vectors in model.gates.vectors.values():
            for parameter in vectors:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    gates = pattern(model, 2, 9)
    base = zeroed(stock("llama"), gates, model.geometry)

    def add(kind, index):
        def hook(module, args, output):
            vectors = model.gates.vectors[kind][index]
            return output + sum((1 - gates[kind][index][..., g : g + 1]) * vectors[g] for g in range(vectors.shape[0]))

        return hook

    for index, layer in enumerate(base.model.layers):
        layer.self_attn.o_proj.register_forward_hook(add("attention", index))
        layer.mlp.down_proj.register_forward_hook(add("ffn", index))
    with torch.no_grad(), model.forced(**gates):
        torch.testing.assert_close(model(input_ids=ids).logits, base(input_ids=ids).logits, atol=1e-4, rtol=0)
