"""Each rival's own arithmetic against an independent computation: numpy, transformers itself, or by hand."""

import numpy as np
import pytest
import torch
from rivals import build, text
from tiny import FAMILIES, stock, tokens
from transformers import AutoModelForCausalLM

from wide.evaluation.perplexity import score
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
