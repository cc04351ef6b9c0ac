"""Stage 2: what is trained and at which rate, gradients, dropout, temperature, resume. CPU, float32, tiny models."""

import pytest
import torch
from lora_models import METHODS, NO_DROPOUT, PROJECTIONS, method_options, recovered, untrained
from tiny import FAMILIES, pattern, stock, tokens
from torch import Tensor
from training import fit, tiny_run_config, trained_tensors

from wide.adapter import add_lora
from wide.methods import load as load_method
from wide.options import StageConfig
from wide.stages.lora import Lora


class SingleProcess:
    """What the losses ask of a Lightning Trainer."""

    world_size = 1


def make(method: str = "compensated", stage: dict | None = None, family: str = "llama", **options) -> Lora:
    """The stage on a model whose gates are half on."""
    model = recovered(family, method, stage, **options)
    if method == "dense":
        config = load_method("dense").Config()
    else:
        fields = method_options(model, compensation=method == "compensated", sparsity=0.4)
        config = load_method("wide").Config(**fields | options)
    module = Lora(model, StageConfig(**NO_DROPOUT | {"steps": 10} | (stage or {})), config, seed=3)
    module._trainer = SingleProcess()
    return module


def names(module: Lora, routers: bool = True) -> set[str]:
    """Trainable names as they are declared, spelt out."""
    lora = {
        f"routed.model.base_model.model.model.layers.{layer}.{path}.lora_{side}.default.weight"
        for layer in (0, 1)
        for path in PROJECTIONS
        for side in ("A", "B")
    }
    return lora | ({f"routed.gates.{n}" for n, _ in module.routed.gates.named_parameters()} if routers else set())


def gradients(module: Lora, ids: Tensor, step: int = 3) -> dict[str, Tensor]:
    module.on_fit_start()
    (micro,) = module.micro_batches({"input_ids": ids, "sample_positions": list(range(len(ids)))})
    num_labels = (micro["shifted_labels"] != -100).sum()
    module.zero_grad()
    module.losses(micro, step, num_labels, module.targets(step), None, 1)["loss"].backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_trainable_names_are_those_declared(family, method):
    module = make(method, family=family)
    assert set(module.trainable_names()) == names(module)
    frozen = make(method, {"freeze_routers": True}, family)
    assert set(frozen.trainable_names()) == names(frozen, routers=False)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_f17_gradients_reach_everything_with_and_without_checkpointing(family, method):
    plain, ids = make(method, family=family), tokens(2, 12, seed=2)
    expected = gradients(plain, ids)
    checkpointed = make(method, {"activation_checkpointing": True}, family)
    recomputed = gradients(checkpointed, ids)
    assert any(layer.training for layer in checkpointed.routed.decoder_layers())
    assert set(expected) == set(recomputed) == names(plain)
    for name, gradient in expected.items():
        assert torch.isfinite(gradient).all() and gradient.abs().max() > 0, name
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-5, rtol=0, msg=name)


def test_f55_everything_off_still_gives_every_parameter_a_gradient():
    module, ids = make(), tokens(2, 12)
    gates = {kind: torch.zeros_like(keep) for kind, keep in pattern(module.routed, 2, 12).items()}
    with module.routed.forced(**gates):
        found = gradients(module, ids)
    forced_out = {name for name in names(module) if "routers" in name}  # given gates do not come from routers
    assert set(found) == names(module) - forced_out
    assert all(torch.isfinite(gradient).all() for gradient in found.values())


def test_checkpointing_recomputes_the_same_dropout():
    stage = {"lora_dropout": 0.5}
    expected = gradients(make(stage=stage), tokens(2, 12))
    recomputed = gradients(make(stage=stage | {"activation_checkpointing": True}), tokens(2, 12))
    for name, gradient in expected.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-5, rtol=0, msg=name)
    without = gradients(make(), tokens(2, 12))
    assert any((without[name] - gradient).abs().max() > 1e-3 for name, gradient in expected.items())


def test_dropout_is_keyed_by_seed_step_and_place_alone():
    module = make("dense", {"lora_dropout": 0.5})
    module.on_fit_start()
    micro = {"input_ids": tokens(2, 12), "sample_positions": [4, 5]}
    with torch.no_grad():
        base = module._hidden(micro, 2)
        torch.rand(1)
        assert torch.equal(module._hidden(micro, 2), base)
        assert not torch.equal(module._hidden(micro, 3), base)
        assert not torch.equal(module._hidden(micro | {"sample_positions": [6, 7]}, 2), base)
        module.seed += 1
        assert not torch.equal(module._hidden(micro, 2), base)
        module.on_train_end()
        torch.testing.assert_close(module._hidden(micro, 2), module._hidden(micro, 3), atol=0, rtol=0)


@pytest.mark.parametrize("restart", (False, True))
def test_temperature_goes_on_or_restarts_and_the_target_is_whole_from_the_start(restart):
    module = make(stage={"restart_temperature": restart}, tau_start=5.0, tau_end=0.5, ramp_ratio=0.5)
    seen = []
    for step in (0, 9):
        module._hidden({"input_ids": tokens(1, 4), "sample_positions": [0]}, step)
        seen.append(module.routed.gates.step.tau)
    assert seen == ([5.0, 0.5] if restart else [0.5, 0.5])
    assert module.targets(0) == {"total": 0.4}


def test_routers_have_a_rate_of_their_own():
    module = make(stage={"learning_rate": 2e-4, "router_learning_rate": 1e-3, "warmup_ratio": 0.0})
    configured = module.configure_optimizers()
    lora, routers = configured["optimizer"].param_groups
    assert (lora["lr"], routers["lr"]) == (2e-4, 1e-3)
    assert {id(p) for p in routers["params"]} == {id(p) for p in module.routed.gates.parameters()}
    assert len(lora["params"]) == 28
    assert [g["lr"] for g in make().configure_optimizers()["optimizer"].param_groups] == [0.0, 0.0]  # warm-up
    assert make(stage={"warmup_ratio": 0.0}).configure_optimizers()["optimizer"].param_groups[1]["lr"] == 2e-3
    assert len(make("dense").configure_optimizers()["optimizer"].param_groups) == 1
    assert len(make(stage={"freeze_routers": True}).configure_optimizers()["optimizer"].param_groups) == 1


def test_distillation_learns_from_the_stock_model_without_lora():
    module, ids = make(distill_weight=1.0, budget_weight=0.0), tokens(2, 12)
    (micro,) = module.micro_batches({"input_ids": ids, "sample_positions": [0, 1]})
    losses = module.losses(micro, 0, torch.tensor(22), {"total": 0.4}, None, 1)
    with torch.no_grad():
        student = module.routed.base.lm_head(module._hidden(micro, 0)).log_softmax(-1)
        teacher = stock("llama")(input_ids=ids).logits.log_softmax(-1)
    expected = (teacher.exp() * (teacher - student)).sum(-1)[:, :-1].sum() / 22
    torch.testing.assert_close(losses["reported_loss"].detach(), expected, atol=1e-5, rtol=0)
    losses["loss"].backward()
    assert {name for name, p in module.named_parameters() if p.grad is not None} == names(module)


def fresh(config, method: str = "compensated") -> Lora:
    """The stage as a run starts it: B is zero."""
    options = {k: v for k, v in vars(config.method).items() if k not in ("name", "compensation")}
    model = untrained("llama", method, **options if method != "dense" else {})
    method_config = load_method("dense").Config() if method == "dense" else config.method
    return Lora(add_lora(model, config.stage, config.seed), config.stage, method_config, config.seed)


@pytest.mark.parametrize("method", METHODS)
def test_five_steps_train_what_is_declared_and_leave_the_rest_bit_identical(tmp_path, method):
    config = tiny_run_config(tmp_path, NO_DROPOUT | {"steps": 5, "batch_size": 4, "micro_batch_size": 2})
    module = fresh(config, method)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    fit(config, module)
    after = module.state_dict()
    assert {name for name in after if not torch.equal(after[name], before[name])} == names(module)
    stored = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert set(stored["state_dict"]) == {*names(module), "routed.gates.dial"}
    assert len(module.history) == 5 and module.routed.num_attached_masks() == 4


def test_f25_killed_and_resumed_run_equals_the_straight_one_with_dropout(tmp_path):
    stage = NO_DROPOUT | {"steps": 7, "batch_size": 4, "micro_batch_size": 2, "save_every": 3, "learning_rate": 0.01}
    stage["lora_dropout"] = 0.1
    straight_config = tiny_run_config(tmp_path / "straight", stage)
    straight = fresh(straight_config)
    fit(straight_config, straight)

    killed_config = tiny_run_config(tmp_path / "killed", stage)
    killed = fresh(killed_config)
    original = killed.training_step

    def dies_at_five(batch, batch_idx):
        if killed.global_step == 5:
            raise KeyboardInterrupt
        original(batch, batch_idx)

    killed.training_step = dies_at_five
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(killed_config, killed)
    torch.manual_seed(99)
    resumed = fresh(killed_config)
    fit(killed_config, resumed, resume=str(tmp_path / "killed" / "checkpoints" / "last.ckpt"))

    assert resumed.history_rows() == straight.history_rows() and len(resumed.history) == 7
    for name, value in trained_tensors(straight.routed).items():
        assert torch.equal(value, trained_tensors(resumed.routed)[name]), name
