"""Each rival's own arithmetic against an independent computation: numpy, transformers itself, or by hand."""

import math

import numpy as np
import pytest
import torch
from rivals import build, config_of, text
from tiny import FAMILIES, stock, tokens
from transformers import AutoModelForCausalLM

from wide.evaluation.perplexity import score
from wide.families import Geometry
from wide.methods import load as load_method
from wide.methods.ddp import build as build_ddp
from wide.methods.provider import keep_highest
from wide.routing import KINDS

every_family = pytest.mark.parametrize("family", FAMILIES)


def projection_inputs(family: str) -> dict[str, list[np.ndarray]]:
    """What o_proj and down_proj of the stock model read on the calibration text: {kind: [tokens, width] per layer}."""
    base = stock(family)
    seen: dict[str, list[list]] = {kind: [[] for _ in base.model.layers] for kind in KINDS}
    for index, layer in enumerate(base.model.layers):
        for kind, module in (("attention", layer.self_attn.o_proj), ("ffn", layer.mlp.down_proj)):
            module.register_forward_pre_hook(lambda m, args, rows=seen[kind][index]: rows.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in text():
            base(**batch)
    return {kind: [torch.cat(rows).double().numpy() for rows in layers] for kind, layers in seen.items()}


def weights(family: str) -> dict[str, list[np.ndarray]]:
    layers = stock(family).model.layers
    return {
        "attention": [layer.self_attn.o_proj.weight.double().numpy() for layer in layers],
        "ffn": [layer.mlp.down_proj.weight.double().numpy() for layer in layers],
    }


@every_family
def test_flap_scores_means_and_removals_against_numpy(family):
    model = build("flap", family)
    inputs, matrices, expected = projection_inputs(family), weights(family), {}
    for kind in KINDS:
        rows = []
        for x, w in zip(inputs[kind], matrices[kind], strict=True):
            metric = x.var(axis=0) * (w**2).sum(axis=0)
            metric = metric**2 if kind == "attention" else metric
            metric = (metric - metric.mean()) / metric.std(ddof=1)
            rows.append(metric.reshape(model.gates.num_groups[kind], -1).mean(axis=1))
        expected[kind] = np.stack(rows)
        stored = getattr(model.gates, f"mean_{kind}").numpy()
        np.testing.assert_allclose(stored, np.stack([x.mean(axis=0) for x in inputs[kind]]), atol=1e-6)
    every = np.concatenate([expected[kind].ravel() for kind in KINDS])
    price = np.concatenate([np.full(expected[kind].size, 0.25 / expected[kind].shape[1]) for kind in KINDS])
    removed, order = 0.0, np.argsort(every)
    off = np.zeros(len(every), dtype=bool)
    for place in order:
        if abs(removed + price[place] - 0.5) >= abs(removed - 0.5):
            break
        off[place], removed = True, removed + price[place]
    split = expected["attention"].size
    for kind, part in (("attention", off[:split]), ("ffn", off[split:])):
        keep = model.gates.static_keep()[kind].numpy().ravel()
        assert (keep == ~part).all()


@every_family
def test_wanda_sp_removes_the_lowest_of_every_layer_against_numpy(family):
    model, inputs, matrices = build("wanda_sp", family), projection_inputs(family), weights(family)
    for kind in KINDS:
        for layer, (x, w) in enumerate(zip(inputs[kind], matrices[kind], strict=True)):
            metric = np.abs(w).mean(axis=0) * np.sqrt((x**2).mean(axis=0))
            groups = metric.reshape(model.gates.num_groups[kind], -1).mean(axis=1)
            keep = model.gates.static_keep()[kind][layer].numpy().astype(bool)
            assert (~keep).sum() == round(0.5 * len(groups))
            assert groups[~keep].max() < groups[keep].min()


def test_flap_by_cost_removes_that_share_of_the_prunable_parameters():
    model = build("flap", "llama", budget_price="cost", sparsity=0.4)
    stats = score(model, text(), dense=False).stats
    shares = model.cost(length=24).shares(float(stats.sparsity("attention")), float(stats.sparsity("ffn")))
    attention_group = 2 * model.gates.group_width("attention") * 64
    total = model.geometry.num_layers * (2 * 64 * 64 + 3 * 64 * 160)
    assert abs(shares["params"] - 0.4) <= attention_group / total / 2 + 1e-9


def test_keep_highest_is_a_prefix_by_score_whose_price_is_nearest_to_the_target():
    scores = {"attention": torch.tensor([[3.0, 0.0]]), "ffn": torch.tensor([[1.0, 5.0, 2.0, 4.0]])}
    keep = keep_highest(scores, {"attention": 1 / 2, "ffn": 1 / 4}, 0.5)  # 0.25, then 0.375, then 0.5
    assert keep["attention"].tolist() == [[1.0, 0.0]] and keep["ffn"].tolist() == [[0.0, 1.0, 0.0, 1.0]]
    assert keep_highest(scores, {"attention": 1 / 2, "ffn": 1 / 4}, 0.0)["ffn"].min() == 1
    assert keep_highest(scores, {"attention": 1 / 2, "ffn": 1 / 4}, 1.0)["attention"].max() == 0


def without(family: str, removed: list[tuple[str, int]]):
    """The stock model with those sublayers' last weights zeroed in the state dict."""
    base = stock(family)
    for kind, layer in removed:
        block = base.model.layers[layer]
        (block.self_attn.o_proj if kind == "attention" else block.mlp.down_proj).weight.zero_()
    return base


def loss_of(base) -> float:
    with torch.no_grad():
        return sum(base(**batch, labels=batch["input_ids"]).loss.item() for batch in text()) / 2


@every_family
def test_blockpruner_removes_what_hurts_perplexity_least_at_every_step(family):
    model = build("blockpruner", family)
    removed: list[tuple[str, int]] = []
    for (unit,) in model.gates.removal_order:
        left = [(kind, layer) for layer in range(2) for kind in KINDS if (kind, layer) not in removed]
        losses = {other: loss_of(without(family, [*removed, other])) for other in left}
        assert losses[unit] == pytest.approx(min(losses.values()), abs=1e-5)
        removed.append(unit)
    assert len(removed) == 2


@every_family
@pytest.mark.parametrize("case", ("sleb", "shortgpt"))
def test_removed_layers_equal_a_stock_model_without_them(case, family):
    model, ids = build(case, family), tokens(2, 20)
    keep = model.gates.static_keep()["attention"][:, 0].bool().tolist()
    assert sum(keep) == 1 and torch.equal(model.gates.static_keep()["ffn"], model.gates.static_keep()["attention"])
    config = stock(family).config
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    smaller = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    kept = keep.index(True)
    state = {k: v for k, v in stock(family).state_dict().items() if ".layers." not in k}
    prefix = f"model.layers.{kept}."
    state |= {
        k.replace(prefix, "model.layers.0."): v for k, v in stock(family).state_dict().items() if k.startswith(prefix)
    }
    smaller.load_state_dict(state)
    with torch.no_grad():
        expected = smaller(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-5, rtol=0)


@every_family
def test_shortgpt_scores_are_one_minus_the_cosine_of_hidden_states(family):
    model, base = build("shortgpt", family), stock(family)
    sums = [0.0, 0.0]
    with torch.no_grad():
        for batch in text():
            states = [base.model.embed_tokens(batch["input_ids"])]
            seen: list = []
            handles = [
                layer.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out))
                for layer in base.model.layers
            ]
            base(**batch)
            states += [out[0] if isinstance(out, tuple) else out for out in seen]
            for handle in handles:
                handle.remove()
            for i in range(2):
                a, b = states[i].double().numpy(), states[i + 1].double().numpy()
                cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
                sums[i] += (1 - cosine).sum()
    model.gates.keep_attention.fill_(1)
    scores = model.gates.scores(model, text(), model.gates.units())
    assert [scores[unit] for unit in model.gates.units()] == pytest.approx([s / 96 for s in sums], rel=1e-5)


def test_taylor_scores_are_the_products_of_weights_and_gradients():
    model, base = build("taylor", "llama"), stock("llama").requires_grad_(True)
    scores = model.gates.scores(model, text(), model.gates.units())
    sum(base(**batch, labels=batch["input_ids"]).loss / 2 for batch in text()).backward()
    for (kind, layer), value in ((unit[0], v) for unit, v in scores.items()):
        block = base.model.layers[layer]
        linears = [m for m in (block.self_attn if kind == "attention" else block.mlp).modules() if hasattr(m, "weight")]
        by_hand = sum((m.weight * m.weight.grad).abs().sum().item() for m in linears if m.weight.dim() == 2)
        assert value == pytest.approx(by_hand, rel=1e-4)
    assert not any(p.requires_grad or p.grad is not None for p in model.base.parameters())


@pytest.mark.parametrize("case", ("cats", "teal", "cats_oracle"))
@every_family
def test_cats_thresholds_are_the_quantiles_of_block_norms_by_numpy(case, family):
    model, base = build(case, family), stock(family)
    seen: dict = {}
    for index, layer in enumerate(base.model.layers):
        layer.mlp.gate_proj.register_forward_hook(
            lambda m, a, out, i=index: seen.setdefault(("gate", i), []).append(torch.nn.functional.silu(out))
        )
        for kind, module in (("ffn", layer.mlp.down_proj), ("attention", layer.self_attn.o_proj)):
            module.register_forward_pre_hook(lambda m, a, k=kind, i=index: seen.setdefault((k, i), []).append(a[0]))
    with torch.no_grad():
        for batch in text():
            base(**batch)
    for column, (kind, source) in enumerate((("attention", "attention"), ("ffn", "gate" if case == "cats" else "ffn"))):
        norms = []
        for layer in range(2):
            x = torch.cat(seen[source, layer]).double().numpy()
            blocks = x.reshape(-1, model.gates.num_groups[kind], x.shape[-1] // model.gates.num_groups[kind])
            norms.append(np.linalg.norm(blocks, axis=-1).ravel())
        if case == "teal":  # one quantile of norms over their layer's mean
            pooled = np.concatenate([row / row.mean() for row in norms])
            wanted = [np.quantile(pooled, 0.5, method="higher") * row.mean() for row in norms]
        else:
            wanted = [np.quantile(row, 0.5, method="higher") for row in norms]
        np.testing.assert_allclose(model.gates.thresholds[:, column].numpy(), wanted, rtol=1e-4)


@every_family
def test_cats_alone_leaves_attention_dense(family):
    model = build("cats", family, sparsity=0.3, attention_sparsity=0.0, ffn_sparsity=0.6)
    stats = score(model, text(), dense=False).stats
    assert float(stats.sparsity("attention")) == 0 and 0.3 < float(stats.sparsity("ffn")) < 0.9


def test_random_gates_keep_their_rates():
    model = build("random", "llama", sparsity=0.3, attention_sparsity=0.1, ffn_sparsity=0.5)
    for kind, rate in (("attention", 0.1), ("ffn", 0.5)):
        table = getattr(model.gates, f"table_{kind}")
        deviation = math.sqrt(rate * (1 - rate) / table.numel())
        assert abs((~table).double().mean().item() - rate) < 4 * deviation


def test_ddp_penalty_and_ascent_by_hand():
    config = config_of("ddp", "llama", distill_weight=0.0)
    gates = build_ddp(config, Geometry.from_hf(stock("llama").config))
    gates.step.noise, gates.step.tau = {}, torch.tensor(0.2)
    with torch.no_grad():
        for rows in gates.strengths.values():
            for row in rows:
                row.copy_(torch.linspace(0.0, 0.4, len(row)))
    by_kind = []
    for kind in KINDS:
        z = np.linspace(0.0, 0.4, gates.num_groups[kind])
        by_kind.append(np.clip(1.2 / (1 + np.exp(-(z - 0.2) * 2.4 / 0.2)) - 0.1, 0, 1))
    excess = sum(s.mean() for s in by_kind) / 2 - (1 - 0.3)
    undecided = sum((s * (1 - s)).mean() for s in by_kind) / 2
    multipliers = np.zeros(3)
    for step in range(3):
        multipliers += np.array([0.02, 0.4, 0.02]) * np.array([excess, excess**2, undecided])
        wanted = multipliers @ np.array([excess, excess**2, undecided])
        for _ in range(2):  # a second micro-batch of the step climbs no further
            assert gates.penalty({"total": 0.3}, step, 10).item() == pytest.approx(wanted, rel=1e-4)


def test_dllm_budget_is_each_tokens_own_with_a_sine_weight():
    model = build("dllm", "llama")
    model.gates.step.noise = {"attention": torch.zeros(2, 2, 24, 1), "ffn": torch.zeros(2, 2, 24, 0)}
    with torch.no_grad():
        model(input_ids=text()[0]["input_ids"])
    attention = model.last_gates("attention")[..., 0].numpy()
    assert np.array_equal(attention, model.last_gates("ffn")[..., 0].numpy())
    assert attention[:, :, :2].min() == 1  # first tokens run everything
    distance = np.abs(1 - attention.mean(axis=0) - 0.4).mean()
    for step, weight in ((0, 0.0), (5, 5 * math.sin(math.pi / 4)), (10, 5.0)):
        assert model.gates.penalty({"total": 0.4}, step, 10).item() == pytest.approx(weight * distance, abs=1e-5)


def test_dllm_first_layers_run_for_every_token():
    model = build("dllm_kept", "llama")
    with torch.no_grad():
        model(input_ids=tokens(2, 24))
    assert model.last_gates("attention")[0].min() == 1 and model.last_gates("attention")[1].min() == 0


def test_skipgpt_routers_have_the_sizes_of_the_paper_of_its_code_and_of_wide():
    geometry = Geometry.from_hf(stock("llama").config)
    sizes = {"linear": 2 * 64 + 2, "mlp": 64 * 16 + 16 + 16 * 2 + 2, "bottleneck": 64 * 4 + 4 + 4 * 2 + 2}
    for router, size in sizes.items():
        config = load_method("skipgpt").Config(router=router, router_rank=4)
        assert load_method("skipgpt").build(config, geometry).router_parameters_per_layer() == 2 * size


def test_skipgpt_is_evaluated_sampled_by_arg_max_and_with_the_dial():
    model = build("skipgpt", "llama")
    model.gates.dial.fill_(-100.0)
    rates = {}
    for way in model.gates.evaluations:
        with model.gates.evaluated(way):
            rates[way] = float(score(model, text(), dense=False).stats.total)
            again = float(score(model, text(), dense=False).stats.total)
            assert (rates[way] == again) == (way == "argmax")
    assert float(score(model, text(), dense=False).stats.total) == 1.0
    with torch.no_grad(), model.gates.evaluated("argmax"):
        model(input_ids=text()[0]["input_ids"])
        signs = model.last_gates("ffn")[0]
    with torch.no_grad():
        stream = []
        base = stock("llama")
        base.model.layers[0].post_attention_layernorm.register_forward_pre_hook(lambda m, a: stream.append(a[0]))
        keep_first = model.last_gates("attention")[0]
        base.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda m, a: (a[0] * keep_first,))
        base(input_ids=text()[0]["input_ids"])
        first = model.gates.routers["ffn"][0].layers[0]
        two = stream[0] @ first.weight.T + first.bias
    assert torch.equal(signs[..., 0], (two[..., 0] >= two[..., 1]).float())
    assert 0.0 < rates["sampled"] < 1.0


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("skipgpt", {"router": "deep"}, "legal: linear, mlp, bottleneck"),
        ("skipgpt", {"attention_sparsity": 0.5}, "give both or neither"),
        ("ddp", {"sparsity": float("nan")}, "0 to 1"),
        ("ddp", {"tau_end": 0.0}, "above 0"),
        ("flap", {"spread": "wide"}, "legal: global, layer"),
        ("depth", {"score": "taylor"}, "legal: method.greedy=false"),
        ("cats", {"attention_sparsity": 0.5, "ffn_sparsity": 0.5}, "is not the mean"),
        ("random", {"ffn_sparsity": 0.5}, "give both or neither"),
        ("dllm", {"unit": "model"}, "legal: layer, sublayer"),
    ],
)
def test_mistakes_are_named(method, options, says):
    with pytest.raises(ValueError, match=says):
        load_method(method).Config(**options)


def test_settings_that_leave_nothing_to_remove_are_named():
    geometry = Geometry.from_hf(stock("llama").config)
    with pytest.raises(ValueError, match="leave 1 of 2 layers"):
        config = load_method("depth").Config(keep_first=1, sparsity=0.75)
        load_method("depth").build(config, geometry)
    with pytest.raises(ValueError, match="legal: 0 to 1"):
        load_method("dllm").build(load_method("dllm").Config(), geometry)
    with pytest.raises(ValueError, match="evicts keys; legal: sdpa, eager"):
        build("dllm", "llama", attn="flex_attention")
