"""What every method owes on every family: exactness against the stock model, report, checkpoint, stages, dial."""

import pytest
import torch
from rivals import CASES, PREPARED, STATIC, TRAINED, build, config_of, text
from tiny import FAMILIES, pattern, stock, tokens
from torch import Tensor
from training import fit, tiny_run_config, trained_tensors

from wide import methods
from wide.adapter import add_lora
from wide.base_model import fingerprint
from wide.checkpoint import from_pretrained, save_pretrained
from wide.dial import fit_dial
from wide.evaluation.perplexity import score
from wide.evaluation.report import routing_report
from wide.model import RoutedModel
from wide.options import ModelConfig, StageConfig
from wide.routing import KINDS
from wide.stages.calibrate import Calibrate
from wide.stages.lora import Lora

EXACT = {"atol": 1e-5, "rtol": 0}
every_case = pytest.mark.parametrize("case", CASES)
every_family = pytest.mark.parametrize("family", FAMILIES)


def logits(model, ids: Tensor, **more) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **more).logits


def columns(keep: Tensor, width: int) -> Tensor:
    """Decisions [B, T, G] as factors of a projection's input [B, T, width]."""
    return keep.repeat_interleave(width // keep.shape[-1], dim=-1)


def by_hand(model: RoutedModel, family: str, gates: dict[str, Tensor]):
    """The stock model under given gates, each method's arithmetic written out from its own tensors.

    Eager attention with a mask made query by query; projections fed by column.
    """
    base, provider, geometry = stock(family, "eager"), model.gates, model.geometry
    for index, layer in enumerate(base.model.layers):
        for kind, out in (("attention", layer.self_attn.o_proj), ("ffn", layer.mlp.down_proj)):
            keep = columns(gates[kind][index], out.in_features)
            strength = torch.ones(out.in_features)
            if hasattr(provider, "strengths"):
                strength = columns(provider.strengths[kind][index].detach().clamp(min=0), out.in_features)
            rest = torch.zeros(out.in_features)
            if hasattr(provider, f"mean_{kind}"):
                rest = getattr(provider, f"mean_{kind}")[index]
            bias = ((1 - keep) * rest) @ out.weight.T
            out.register_forward_pre_hook(lambda m, args, keep=keep, strength=strength: args[0] * keep * strength)
            out.register_forward_hook(lambda m, args, output, bias=bias: output + bias)
        if provider.kv == "evicted":
            mask = kept_keys_only(gates["attention"][index][..., 0], geometry.sliding_window)
            layer.self_attn.register_forward_pre_hook(
                lambda m, args, kwargs, mask=mask: (args, kwargs | {"attention_mask": mask}), with_kwargs=True
            )
    return base


def kept_keys_only(kept: Tensor, window: int | None) -> Tensor:
    """Additive mask [B, 1, T, T]: earlier keys of kept tokens, and the query's own."""
    mask = torch.full((kept.shape[0], 1, kept.shape[1], kept.shape[1]), torch.finfo(torch.float32).min)
    for row, flags in enumerate(kept.tolist()):
        for query in range(len(flags)):
            first = 0 if window is None else max(0, query - window + 1)
            for key in range(first, query + 1):
                if flags[key] or key == query:
                    mask[row, 0, query, key] = 0
    return mask


def test_the_methods_are_those_listed_here():
    assert {name for name, _ in CASES.values()} == set(methods.names())


@every_case
@every_family
def test_all_on_equals_dense(case, family):
    model, ids = build(case, family, fresh=True), tokens(2, 20)
    ones = {kind: torch.ones(2, 2, 20, groups) for kind, groups in model.gates.num_groups.items()}
    expected = logits(stock(family), ids)
    with model.forced(**ones):
        torch.testing.assert_close(logits(model, ids), expected, **EXACT)
    with model.dense():
        assert torch.equal(logits(model, ids), expected)


@every_case
@every_family
def test_given_gates_equal_the_same_arithmetic_by_hand(case, family):
    model, ids = build(case, family), tokens(2, 20)
    gates = pattern(model, 2, 20)
    if config_of(case, family).name == "dllm" and "ffn" not in model.gates.routers:
        gates["ffn"] = gates["attention"]
    expected = logits(by_hand(model, family, gates), ids)
    with model.forced(**gates):
        torch.testing.assert_close(logits(model, ids), expected, **EXACT)
    assert (expected - logits(stock(family), ids)).abs().max() > 1e-2


@every_case
@every_family
def test_own_gates_are_decisions_and_equal_the_same_given(case, family):
    model, ids = build(case, family), tokens(2, 20)
    out = logits(model, ids)
    gates = {kind: model.last_gates(kind) for kind in KINDS}
    assert all(set(keep.unique().tolist()) <= {0.0, 1.0} for keep in gates.values())
    torch.testing.assert_close(out, logits(by_hand(model, family, gates), ids), **EXACT)
    if case in STATIC:
        wanted = model.gates.static_keep()
        assert all(torch.equal(keep, wanted[kind][:, None, None].expand_as(keep)) for kind, keep in gates.items())
    else:
        assert model.gates.static_keep() is None


@every_case
@pytest.mark.parametrize("attn", ("sdpa", "eager"))
@pytest.mark.parametrize("side", ("left", "right"))
def test_padding_and_neighbours_change_nothing(case, attn, side):
    model = build(case, "smol", attn)
    texts = [tokens(1, n, seed=n) for n in (3, 11, 7)]
    ids, mask = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
    for row, one in enumerate(texts):
        span = slice(11 - one.shape[1], 11) if side == "left" else slice(0, one.shape[1])
        ids[row, span], mask[row, span] = one[0], 1
    together = logits(model, ids, attention_mask=mask)
    gates = {kind: model.last_gates(kind) for kind in KINDS}
    for row, one in enumerate(texts):
        real = mask[row].bool()
        torch.testing.assert_close(together[row, real], logits(model, one)[0], **EXACT)
        for kind, keep in gates.items():
            assert torch.equal(keep[:, row, real], model.last_gates(kind)[:, 0])


@every_case
@pytest.mark.parametrize("family", ("llama", "mistral"))
@pytest.mark.parametrize("attn", ("sdpa", "eager"))
def test_cached_decode_equals_one_forward(case, family, attn):
    """Also past mistral's window of 8, from which cached keys are dropped."""
    model, ids = build(case, family, attn), tokens(2, 30)
    whole = logits(model, ids)
    gates = {kind: model.last_gates(kind) for kind in KINDS}
    for chunks in ([1] * 30, [1, 2, 11, 16]):
        cache, start, rows, seen = None, 0, [], {kind: [] for kind in KINDS}
        for size in chunks:
            with torch.no_grad():
                out = model(input_ids=ids[:, start : start + size], past_key_values=cache, use_cache=True)
            cache, start = out.past_key_values, start + size
            rows.append(out.logits)
            for kind, parts in seen.items():
                parts.append(model.last_gates(kind))
        torch.testing.assert_close(torch.cat(rows, 1), whole, **EXACT)
        for kind, parts in seen.items():
            assert torch.equal(torch.cat(parts, 2), gates[kind])


@every_case
def test_generate_with_and_without_cache(case):
    model, ids = build(case, "llama"), tokens(1, 9)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)
    with_cache = model.generate(input_ids=ids, attention_mask=mask, **settings)
    assert torch.equal(with_cache, model.generate(input_ids=ids, attention_mask=mask, use_cache=False, **settings))


@every_case
@every_family
def test_report_states_removal_by_mean_and_by_cost_and_what_becomes_of_keys_and_values(case, family):
    model = build(case, family)
    stats = score(model, text(), dense=False).stats
    report = routing_report(model, stats, length=24)
    gates, g = [], model.geometry
    for batch in text():
        logits(model, batch["input_ids"])
        gates.append({kind: model.last_gates(kind) for kind in KINDS})
    off = {kind: 1 - torch.cat([part[kind] for part in gates], 1).double().mean().item() for kind in KINDS}
    assert report["sparsity"]["total"] == pytest.approx((off["attention"] + off["ffn"]) / 2, abs=1e-6)
    attention, ffn = 2 * g.num_heads * g.head_dim * g.hidden_size, 3 * g.ffn_size * g.hidden_size
    saved = {"cats": (1 / 2, 2 / 3), "teal": (1 / 2, 1 / 3)}.get(case, (1, 1))
    skipped = saved[0] * off["attention"] * attention + saved[1] * off["ffn"] * ffn
    assert report["skipped"]["params"] == pytest.approx(skipped / (attention + ffn), abs=1e-6)
    assert report["kv"] == ("removed" if case in STATIC else "evicted" if case in ("dllm", "mod_d") else "kept")
    by_kv_head = torch.cat([part["attention"] for part in gates], 1)
    by_kv_head = by_kv_head.repeat_interleave(model.gates.attn_group_size, -1).unflatten(-1, (g.num_kv_heads, -1))
    unused = 1 - by_kv_head.amax(-1).double().mean().item()
    assert report["skipped"]["kv"] == pytest.approx(0 if report["kv"] == "kept" else unused, abs=1e-6)
    assert report["is_static"] == (case in STATIC or case == "dense")


@every_case
@every_family
def test_checkpoint_round_trip(case, family, tmp_path):
    model, ids = build(case, family), tokens(2, 12)
    with torch.no_grad():
        for parameter in model.gates.parameters():
            parameter.add_(0.01)
    source = ModelConfig(name="tiny", source="tiny", family=family)
    options = {"model": source, "method": config_of(case, family), "base_fingerprint": fingerprint(model.base)}
    save_pretrained(model, tmp_path / "c", **options)
    loaded = from_pretrained(tmp_path / "c")
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    for name, tensor in model.gates.state_dict().items():
        assert torch.equal(loaded.gates.state_dict()[name], tensor), name


@pytest.mark.parametrize("case", PREPARED)
@every_family
def test_what_needs_no_training_meets_its_target_to_half_a_group(case, family):
    model = build(case, family)
    stats = score(model, text(), dense=False).stats
    unit = 1 / min(model.gates.num_groups.values()) / model.geometry.num_layers / 2
    unit *= 2 if case in ("sleb", "shortgpt") else 1
    layered = case == "wanda_sp"  # a whole number of groups in every layer, for itself
    slack = 1 / min(model.gates.num_groups.values()) / 2 if layered else unit / 2
    assert abs(float(stats.total) - 0.5) <= slack + 1e-9


DIALLED = ("skipgpt", "skipgpt_mlp", "ddp_single", "cats", "teal", "cats_oracle", "dllm", "dllm_kept", "mod_d")


@pytest.mark.parametrize("case", DIALLED)
@every_family
def test_dial_meets_a_target_as_closely_as_its_steps_allow(case, family):
    """A step of the dial moves one group at one of 96 tokens, a static one at all of them at once. Layers react to each
    other, hence ten steps where decisions read activations."""
    more = {"dense_layers": 0} if case == "dllm_kept" else {}
    model = build(case, family, **more)
    batches = text()
    if case == "ddp_single":
        for rows in model.gates.strengths.values():
            for row in rows:
                row.data = torch.rand(row.shape, generator=torch.Generator().manual_seed(len(row)))
    point = fit_dial(model, batches, 0.4, "global")
    group = 1 / 2 / model.geometry.num_layers / min(model.gates.num_groups.values())
    assert abs(point.measured - 0.4) <= (group if case == "ddp_single" else max(10 * group / 96, 5e-4))
    assert float(score(model, batches, dense=False).stats.total) == pytest.approx(point.measured, abs=1e-9)


def stage_run(case: str, model: RoutedModel, folder, stage: dict, **more) -> Calibrate:
    config = tiny_run_config(folder, {"batch_size": 4, "warmup_ratio": 0.0, **stage})
    config.method = config_of(case, "llama", **more)
    cls = Lora if stage.get("name") == "lora" else Calibrate
    module = cls(model, config.stage, config.method, seed=3)
    fit(config, module)
    return module


def epochs(module: Calibrate) -> list[dict[str, float]]:
    """Means over the first and over the last six steps: the 24 blocks, four a step, once each."""
    rows = module.history_rows()
    return [{key: sum(row[key] for row in part) / 6 for key in part[0]} for part in (rows[:6], rows[-6:])]


@pytest.mark.parametrize("case", TRAINED)
def test_calibration_learns_towards_the_target(case, tmp_path):
    """From all on, the skip rate has to rise towards 50%; only the method's tensors may move."""
    gap = {} if case.startswith("ddp") or case == "mod_d" else {"init_gap": 2.0}
    more = {"router_rank": 8} if "dllm" in case else {}
    model = build(case, "llama", fresh=True, **gap, **more)
    before = {k: v.clone() for k, v in model.base.state_dict().items()}
    start = trained_tensors(model)
    rate = 0.1 if case.startswith("ddp") else 0.03
    module = stage_run(case, model, tmp_path, {"steps": 40, "learning_rate": rate, "weight_decay": 0.0}, **gap, **more)
    first, last = epochs(module)
    assert abs(last["sparsity"] - 0.5) < abs(first["sparsity"] - 0.5) or case == "mod_d"
    if case == "mod_d":  # 8 of each text's 16 tokens at every step, less where a token occurs twice and ties
        assert all(0.5 - 1 / 16 < row["sparsity"] <= 0.5 for row in module.history_rows())
        assert last["cross_entropy"] < first["cross_entropy"]
    assert all(torch.equal(before[k], v) for k, v in model.base.state_dict().items())
    assert any(not torch.equal(start[k], v) for k, v in trained_tensors(model).items())


@every_case
def test_lora_on_top_trains_and_leaves_frozen_gates_alone(case, tmp_path):
    model = build(case, "llama")
    recovered = add_lora(model, StageConfig(name="lora", lora_rank=2), seed=1)
    before = {k: v.clone() for k, v in recovered.gates.state_dict().items()}
    stage = {"name": "lora", "steps": 18, "learning_rate": 0.01, "lora_rank": 2, "lora_dropout": 0.0}
    module = stage_run(case, recovered, tmp_path, stage | {"freeze_routers": True})
    first, last = epochs(module)
    assert last["cross_entropy"] < first["cross_entropy"]
    moving = {"thresholds"} if case == "mod_d" else set()
    for name, tensor in recovered.gates.state_dict().items():
        assert torch.equal(tensor, before[name]) or name in moving, name
    out = logits(recovered, tokens(1, 9))
    assert torch.isfinite(out).all() and recovered.num_attached_masks() == 4


def test_router_and_lora_of_dllm_learn_together(tmp_path):
    model = add_lora(build("dllm", "llama", fresh=True), StageConfig(name="lora", lora_rank=2), seed=1)
    start = model.gates.routers["attention"][0][0].weight.detach().clone()
    stage = {"name": "lora", "steps": 5, "lora_rank": 2, "learning_rate": 0.01}
    module = stage_run("dllm", model, tmp_path, stage)
    assert not torch.equal(model.gates.routers["attention"][0][0].weight, start)
    assert any("lora_B" in name and p.abs().max() > 0 for name, p in module.named_parameters())
