"""The throughput benchmark on a tiny model, and its count of FLOPs against torch's own counter."""

import json

import pytest
import torch
from lora_models import recovered, untrained
from test_conf import hydra_conf, make  # noqa: F401
from tiny import tokens
from torch.utils.flop_counter import FlopCounterMode

from experiments.throughput import check, flops_per_token, run

OPTIONS = (
    "+experiment=throughput_llama8b",
    "model=tiny_llama",
    "method.attn_group_size=2",
    "method.ffn_group_size=32",
    "data.block_size=32",
    "trainer.accelerator=cpu",
    "trainer.precision=fp32",
    "stage.batch_size=2",
    "bench.repeats=1",
)
BATCH, LENGTH, RANK = 2, 24, 4


def counted(routed, trained) -> int:
    """FLOPs of all matrix products of one forward and backward, as torch counts them; attention is left out."""
    routed.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    gates = routed.gates
    gates.step.noise = {
        kind: torch.zeros(gates.geometry.num_layers, BATCH, LENGTH, groups) for kind, groups in gates.num_groups.items()
    }
    gates.step.tau = torch.tensor(1.0)
    with FlopCounterMode(display=False) as counter:
        logits = routed.base.lm_head(routed.hidden_states(input_ids=tokens(BATCH, LENGTH)))
        (logits.sum() + routed.last_stats().total).backward()
    return sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))


@pytest.mark.parametrize("stage", ("calibrate", "lora"))
def test_flops_are_those_torch_counts(stage):
    """To the FLOP. At length L attention's own share is the closed form of a causal mask, which no counter sees.

    The counter also leaves out what a frozen embedding saves (the first router's input needs no gradient, nor do
    LoRA's first inputs) and the routers' biases.
    """
    routed = untrained("llama", "wide") if stage == "calibrate" else recovered("llama", "wide")
    trained = list(routed.gates.parameters())
    lora = [p for name, p in routed.named_parameters() if "lora_" in name]
    cost, geometry = routed.cost(LENGTH), routed.geometry
    attention = 2 * (cost.num_layers + 2 * (cost.num_layers - 1)) * cost.core
    first = 2 * geometry.hidden_size * RANK
    if stage == "lora":
        rank = routed.model.peft_config["default"].r
        first += 2 * 3 * geometry.hidden_size * rank
    biases = 6 * sum(p.numel() for p in trained if p.dim() == 1)
    found = counted(routed, trained + lora)
    assert found == BATCH * LENGTH * (flops_per_token(routed, LENGTH, stage) - attention - first - biases)


def test_runs_on_a_tiny_model_and_leaves_rows(tmp_path):
    config = make(*OPTIONS)
    config.output_dir = str(tmp_path)
    check(config)
    found = run(config)["measurements"]
    assert [json.loads(line) for line in (tmp_path / "throughput.json").read_text().splitlines()] == found
    assert [(r["stage"], r["activation_checkpointing"]) for r in found] == [
        (stage, on) for stage in ("calibrate", "lora") for on in (False, True)
    ]
    for row in found:
        assert row["status"] == "finished" and row["tokens_per_second"] == pytest.approx(64 / row["seconds_per_step"])
        assert row["limit_tokens_per_second"] == pytest.approx(790e12 / row["flops_per_token"])
        assert 0 < row["share_of_limit"] < 1
    assert found[0]["flops_per_token"] == found[1]["flops_per_token"] < found[2]["flops_per_token"]
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.distill_weight=1.0", "method.distill_weight=0"),
        ("data.block_size=100000", "data.block_size=100000 is too long; legal: 2 to"),
        ("method.attn_group_size=3", "attn_group_size=3 does not fit"),
        ("trainer.devices=2", "trainer.devices=2 cannot be timed; legal: 1"),
    ],
)
def test_what_cannot_be_timed_is_refused(override, message):
    with pytest.raises(ValueError, match=message):
        check(make(*OPTIONS, override))
