"""Compiled training: the same step as eagerly for every method and stage, one graph for all layers."""

import pytest
import torch
from rivals import CASES, build, config_of
from tiny import FAMILIES, tokens

from wide import base_model, compiled
from wide.adapter import add_lora
from wide.loss import _compiled_chunk
from wide.options import StageConfig
from wide.stages.calibrate import Calibrate
from wide.stages.lora import Lora

LEARNED = ("wide", "skipgpt_mlp", "ddp", "dllm", "mod_d")


class SingleProcess:
    world_size = 1
    strategy = None


class Graphs:
    """Stands in for torch.compile: counts the graphs traced and runs them by the eager backend (no C++ compiler)."""

    def __init__(self):
        self.count, self.compile = 0, torch.compile

    def __call__(self, function, **options):
        return self.compile(function, backend=self.backend, **options)

    def backend(self, graph, inputs):
        self.count += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture
def graphs(monkeypatch) -> Graphs:
    found = Graphs()
    monkeypatch.setattr(torch, "compile", found)
    _compiled_chunk.cache_clear()
    yield found
    _compiled_chunk.cache_clear()


def stepped(case: str, family: str, stage: str, compile: bool, **more) -> Calibrate:
    """Gradients of two steps added up, dropout off."""
    options = StageConfig(name=stage, steps=10, lora_dropout=0.0, lora_rank=2)
    model = build(case, family, **more)
    if stage == "lora":
        model = add_lora(model, options, seed=0)
    module = (Lora if stage == "lora" else Calibrate)(model, options, config_of(case, family, **more), 3, compile)
    module._trainer = SingleProcess()
    module.on_fit_start()
    for step in (3, 4):
        batch = {"input_ids": tokens(2, 12, seed=step), "sample_positions": [0, 1]}
        micro = next(iter(module.micro_batches(batch)))
        module.losses(micro, step, torch.tensor(22), {"total": 0.4}, None, 1)["loss"].backward()
    return module


def assert_same_gradients(one: Calibrate, other: Calibrate) -> None:
    compared = 0
    for (name, expected), (_, found) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, atol=1e-6, rtol=1e-5, msg=name)
            compared += int(expected.grad.abs().max() > 0)
    assert compared >= 4
    for (name, expected), (_, found) in zip(one.named_buffers(), other.named_buffers(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("case", LEARNED)
def test_calibration_of_every_method_takes_the_eager_step(case, graphs):
    found = stepped(case, "llama", "calibrate", compile=True)
    assert graphs.count > 0
    assert_same_gradients(stepped(case, "llama", "calibrate", compile=False), found)


@pytest.mark.parametrize("case", [*LEARNED, "flap", "cats", "shortgpt"])
def test_lora_over_every_kind_of_method_takes_the_eager_step(case, graphs):
    found = stepped(case, "llama", "lora", compile=True)
    assert_same_gradients(stepped(case, "llama", "lora", compile=False), found)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_the_eager_step_with_teacher_and_separation(family, graphs):
    more = {"distill_weight": 0.5, "separation_weight": 0.1}
    found = stepped("wide", family, "calibrate", compile=True, **more)
    assert_same_gradients(stepped("wide", family, "calibrate", compile=False, **more), found)


@pytest.mark.parametrize("stage", ["calibrate", "lora"])
@pytest.mark.parametrize("num_layers", [2, 5])
def test_all_layers_share_their_graphs(stage, num_layers, graphs, monkeypatch):
    """The first layer's input needs no gradient, the others' does: two graphs, and one of the loss."""
    config = base_model.tiny_config("llama")
    config.num_hidden_layers = num_layers
    monkeypatch.setattr(base_model, "tiny_config", lambda family: config)
    module = stepped("wide", "llama", stage, compile=True)
    assert module.routed.geometry.num_layers == num_layers
    assert graphs.count == 3


def test_a_second_method_in_one_process_is_traced_anew(graphs):
    """No guard looks at hooks: what CATS hangs elsewhere must not run through the graph of another method."""
    stepped("flap", "llama", "lora", compile=True)
    found = stepped("cats", "llama", "lora", compile=True)
    assert_same_gradients(stepped("cats", "llama", "lora", compile=False), found)


def test_the_layers_are_as_before_once_training_has_ended(graphs):
    module = stepped("wide", "llama", "calibrate", compile=True)
    ids = tokens(2, 12)
    before = graphs.count
    module.on_train_end()
    with torch.no_grad():
        found = module.routed(input_ids=ids).logits
        expected = build("wide", "llama")(input_ids=ids).logits
    assert graphs.count == before
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.parametrize("extra", [torch.nn.Linear(2, 2), torch.nn.Parameter(torch.zeros(2, 3))])
def test_a_provider_without_lists_per_layer_is_refused(extra):
    """A parameter with an axis of layers would be read at index 0 by all of them."""
    model = build("wide", "llama")
    model.gates.extra = extra
    with pytest.raises(ValueError, match=r"trainer.compile=true needs .* legal: trainer.compile=false"):
        compiled.one_layer(model.gates, 0)


def test_every_case_can_be_cut_by_layer():
    for case in CASES:
        gates = build(case, "llama").gates
        views = [compiled.one_layer(gates, index) for index in range(gates.geometry.num_layers)]
        own = {id(p) for view in views for p in view.parameters()}
        assert own == {id(p) for p in gates.parameters()}
