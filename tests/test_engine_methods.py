"""Methods other than WIDE on the engine: through their own gates, or refused when it would compute them wrongly."""

import pytest
import rivals
import torch
from test_engine import TOLERANCE, batch, difference, reference
from tiny import tokens

from wide.engine import from_routed

ON_THE_ENGINE = ("dense", "skipgpt", "skipgpt_mlp", "flap", "flap_heads", "wanda_sp", "sleb", "random", "dllm_kept")


@pytest.mark.parametrize("case", ON_THE_ENGINE)
def test_other_methods_run_through_their_own_gates(case):
    model = rivals.build(case, "llama")
    ids, mask = batch("left", (5, 40, 23))
    engine, real = from_routed(model), mask.bool()
    assert difference(engine(ids, mask)[real], reference(model, ids, mask)[real]) < TOLERANCE
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(input_ids=ids, attention_mask=mask, **settings)
    assert torch.equal(engine.generate(ids, mask, max_new_tokens=12, stop_tokens=()), expected)


def test_vectors_of_a_method_that_adds_them_to_what_runs():
    model = rivals.build("dense", "qwen3", bias=True, attn_group_size=2, ffn_group_size=32)
    for rows in model.gates.vectors.values():
        for row in rows:
            torch.nn.init.normal_(row)
    ids = tokens(2, 20)
    assert difference(from_routed(model)(ids), reference(model, ids)) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "message"), [("dllm", "evicts"), ("cats", "inside the sublayer"), ("teal", "inside"), ("ddp", "scales")]
)
def test_methods_it_would_compute_wrongly_are_refused(case, message):
    with pytest.raises(ValueError, match=message):
        from_routed(rivals.build(case, "llama"))
