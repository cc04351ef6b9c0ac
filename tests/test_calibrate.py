"""Stage 1: gradients, accumulation, checkpointing, schedules, resume. CPU, float32, tiny random models."""

import pytest
import torch
from tiny import FAMILIES, routed, stock, tokens
from training import build_module, fit, tiny_run_config, trained_tensors

from wide.families import enable_activation_checkpointing
from wide.loss import next_token_labels
from wide.methods import load as load_method
from wide.options import StageConfig
from wide.routing import (
    gate_noise,
    hard_gate,
)
from wide.stages.calibrate import Calibrate


class SingleProcess:
    """What the losses ask of a Lightning Trainer."""

    world_size = 1


def one_step(module: Calibrate, batch: dict, num_micro: int = 1) -> dict[str, torch.Tensor]:
    """Gradients of one optimiser step, micro-batch by micro-batch, without Lightning."""
    module.stage.micro_batch_size = len(batch["input_ids"]) // num_micro
    module._trainer = SingleProcess()
    micro_batches = list(module.micro_batches(batch))
    num_labels = sum((m["shifted_labels"] != -100).sum() for m in micro_batches)
    others = module._rates_of_other_micro_batches(micro_batches, step=3)
    module.zero_grad()
    for micro, other in zip(micro_batches, others, strict=True):
        losses = module.losses(micro, 3, num_labels, {"total": 0.4}, other, len(micro_batches))
        losses["loss"].backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def make(method: dict, family: str = "llama", compiled: bool = False) -> Calibrate:
    options = {"attn_group_size": routed(family).geometry.heads_per_kv, "ffn_group_size": 32, "router_rank": 4}
    config = load_method("wide").Config(**(options | {"init_gap": 0.5, "compensation": True} | method))
    model = routed(family, **{k: v for k, v in vars(config).items() if k != "name"})
    module = Calibrate(model, StageConfig(steps=10), config, seed=3, compiled=compiled)
    module._trainer = SingleProcess()
    return module


def batch(rows: int, length: int = 12) -> dict:
    return {"input_ids": tokens(rows, length, seed=2), "sample_positions": list(range(rows))}


@pytest.mark.parametrize("family", FAMILIES)
def test_f13_language_loss_alone_reaches_every_router(family):
    gradients = one_step(make({"budget_weight": 0.0}, family), batch(2))
    module = make({"budget_weight": 0.0}, family)
    assert set(gradients) == set(module.trainable_names())
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient).all() and gradient.abs().max() > 0, name


def test_f13_straight_through_gradient_agrees_with_finite_differences_of_the_soft_gate():
    logits = torch.tensor([-1.0, 0.3, 2.0], dtype=torch.float64, requires_grad=True)
    noise, tau, weight = torch.tensor([0.5, -0.2, 0.1]), 0.7, torch.tensor([1.0, -2.0, 3.0])
    (hard_gate(logits, noise, tau) * weight).sum().backward()

    def soft(x):
        return (torch.sigmoid((x + noise) / tau) * weight).sum()

    step = 1e-6
    for i in range(3):
        delta = torch.zeros(3, dtype=torch.float64)
        delta[i] = step
        difference = (soft(logits.detach() + delta) - soft(logits.detach() - delta)) / (2 * step)
        torch.testing.assert_close(logits.grad[i], difference, rtol=1e-5, atol=1e-7)


def test_one_group_per_sublayer_still_learns():
    gradients = one_step(make({"attn_group_size": 4, "ffn_group_size": 160, "budget_weight": 0.0}), batch(2))
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


def test_hard_gate_is_the_two_class_gumbel_softmax():
    """Keep probability sigmoid(logit), and decisions equal to the arg-max over two Gumbel draws' difference."""
    noise = gate_noise(0, 0, list(range(64)), (500,), torch.device("cpu"))
    for logit in (-2.0, 0.0, 1.5):
        rate = hard_gate(torch.full_like(noise, logit), noise).mean()
        expected = torch.sigmoid(torch.tensor(logit))
        standard_error = (expected * (1 - expected) / noise.numel()).sqrt()
        assert abs(rate - expected) < 5 * standard_error


def test_gate_noise_is_keyed_by_seed_step_and_place():
    shape, cpu = (3, 4), torch.device("cpu")
    base = gate_noise(1, 2, [0, 1, 2, 3], shape, cpu)
    assert torch.equal(base[2:], gate_noise(1, 2, [2, 3], shape, cpu))
    for other in (gate_noise(2, 2, [0], shape, cpu), gate_noise(1, 3, [0], shape, cpu), base[1:2]):
        assert not torch.equal(base[:1], other)


@pytest.mark.parametrize("method", ({"budget_weight": 0.0}, {"budget_scope": "step"}))
@pytest.mark.parametrize("num_micro", (2, 4))
def test_f15_accumulation_equals_the_big_batch(method, num_micro):
    texts = batch(4)
    texts["labels"] = texts["input_ids"].clone()
    texts["labels"][0, 3:] = -100  # unequal numbers of predicted tokens
    texts["labels"][2, 7:] = -100
    module = make(method)
    together, cut = one_step(module, texts, 1), one_step(module, texts, num_micro)
    for name in together:
        torch.testing.assert_close(cut[name], together[name], atol=1e-5, rtol=0, msg=name)


def test_f15_micro_scope_is_the_mean_of_each_micro_batchs_own_distance():
    module = make({"budget_scope": "micro", "budget_weight": 1.0, "budget_price": "mean"})
    texts = batch(4)
    one_step(module, texts, 2)
    expected = 0.0
    for rows in (slice(0, 2), slice(2, 4)):
        micro = {"input_ids": texts["input_ids"][rows], "sample_positions": texts["sample_positions"][rows]}
        micro["shifted_labels"] = next_token_labels(micro)
        module._hidden(micro, 3)
        expected += abs(0.4 - module.routed.last_stats().total.item()) / 2
    reported = 0.0
    for micro in module.micro_batches(texts):
        losses = module.losses(micro, 3, torch.tensor(44), {"total": 0.4}, None, 2)
        reported += float(losses["reported_loss"] - losses["cross_entropy"])
    assert reported == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_f17_activation_checkpointing_changes_no_gradient_and_no_frozen_weight(family):
    plain = make({}, family)
    before = {k: v.clone() for k, v in plain.routed.model.state_dict().items()}
    expected = one_step(plain, batch(2))
    checkpointed = make({}, family)
    enable_activation_checkpointing(checkpointed.routed.base)
    for layer in checkpointed.routed.decoder_layers():
        layer.training = True
    gradients = one_step(checkpointed, batch(2))
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], atol=1e-5, rtol=0, msg=name)
        assert expected[name].abs().max() > 0
    for name, value in checkpointed.routed.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_five_steps_leave_frozen_weights_bit_identical(tmp_path):
    config = tiny_run_config(tmp_path, {"steps": 5, "batch_size": 4})
    module = build_module(config)
    frozen = {k: v.clone() for k, v in module.routed.model.state_dict().items()}
    started = trained_tensors(module.routed)
    fit(config, module)
    assert all(torch.equal(v, frozen[k]) for k, v in module.routed.model.state_dict().items())
    moved = trained_tensors(module.routed)
    assert set(moved) == {f"gates.{n}" for n, _ in module.routed.gates.named_parameters()}
    assert all(not torch.equal(moved[name], started[name]) for name in moved)


def test_f25_killed_and_resumed_run_equals_the_straight_one(tmp_path):
    stage = {"steps": 9, "batch_size": 4, "micro_batch_size": 2, "save_every": 4, "learning_rate": 0.05}
    straight_config = tiny_run_config(tmp_path / "straight", stage)
    straight = build_module(straight_config)
    fit(straight_config, straight)

    killed_config = tiny_run_config(tmp_path / "killed", stage)
    killed = build_module(killed_config)
    original = killed.training_step

    def dies_at_six(batch, batch_idx):
        if killed.global_step == 6:
            raise KeyboardInterrupt
        original(batch, batch_idx)

    killed.training_step = dies_at_six
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(killed_config, killed)
    resumed = build_module(killed_config)
    fit(killed_config, resumed, resume=str(tmp_path / "killed" / "checkpoints" / "last.ckpt"))

    assert len(resumed.history) == 9
    assert resumed.history_rows() == straight.history_rows()
    for name, value in trained_tensors(straight.routed).items():
        assert torch.equal(value, trained_tensors(resumed.routed)[name])


def test_checkpoint_holds_trainable_keys_only_and_loads_weights_only(tmp_path):
    config = tiny_run_config(tmp_path, {"steps": 2, "batch_size": 4})
    module = build_module(config)
    fit(config, module)
    stored = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert set(stored["state_dict"]) == {*module.trainable_names(), "routed.gates.dial"}
    del stored["state_dict"][module.trainable_names()[0]]
    with pytest.raises(ValueError, match="missing"):
        build_module(config).load_state_dict(stored["state_dict"])
    with pytest.raises(ValueError, match="unexpected"):
        module.load_state_dict({"routed.gates.more": torch.zeros(1)} | module.state_dict())


def test_schedules_count_optimiser_steps(tmp_path):
    stage = {"steps": 8, "batch_size": 4, "micro_batch_size": 1, "warmup_ratio": 0.25}
    config = tiny_run_config(tmp_path, stage, {"ramp_ratio": 0.5, "sparsity": 0.4, "tau_start": 5.0, "tau_end": 0.5})
    module = build_module(config)
    seen = []
    original = module._hidden

    def record(micro, step):
        out = original(micro, step)
        seen.append((step, module.routed.gates.step.tau))
        return out

    module._hidden = record
    fit(config, module)
    assert dict(seen) == pytest.approx({i: 5.0 - 4.5 * i / 7 for i in range(8)})
    assert [row["target"] for row in module.history_rows()] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4])
    rates = [row["learning_rate"] for row in module.history_rows()]
    assert max(rates) == pytest.approx(2e-3, rel=0.05) and rates[-1] == pytest.approx(0, abs=1e-9)


def test_an_all_padding_batch_trains_on_nothing_and_stays_finite():
    module = make({})
    texts = batch(2) | {"attention_mask": torch.zeros(2, 12, dtype=torch.long)}
    module._trainer = SingleProcess()
    micro = next(iter(module.micro_batches(texts)))
    losses = module.losses(micro, 0, torch.tensor(1), {"total": 0.4}, None, 1)
    losses["loss"].backward()
    assert float(losses["cross_entropy"]) == 0 and int(module.routed.last_stats().num_tokens) == 0
    for parameter in module.routed.gates.parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all()


def test_distillation_equals_the_divergence_computed_at_once():
    module = make({"distill_weight": 1.0, "budget_weight": 0.0, "separation_weight": 0.0})
    module._trainer = SingleProcess()
    texts = batch(2)
    micro = next(iter(module.micro_batches(texts)))
    losses = module.losses(micro, 0, torch.tensor(22), {"total": 0.4}, None, 1)
    with torch.no_grad():
        student = module.routed.base.lm_head(module._hidden(micro, 0)).log_softmax(-1)
        teacher = stock("llama")(input_ids=texts["input_ids"]).logits.log_softmax(-1)
    expected = (teacher.exp() * (teacher - student)).sum(-1)[:, :-1].sum() / 22
    torch.testing.assert_close(losses["reported_loss"].detach(), expected, atol=1e-5, rtol=0)


def test_separation_term_pushes_logits_apart():
    module = make({"separation_weight": 5.0, "budget_weight": 0.0})
    gradients = one_step(module, batch(2))
    without = one_step(make({"separation_weight": 0.0, "budget_weight": 0.0}), batch(2))
    assert any((gradients[name] - without[name]).abs().max() > 1e-6 for name in gradients)
