"""The engine on a GPU, bfloat16 and float32: the correctness gate at real widths, graphs, batches (`-m gpu`)."""

import pytest
import torch
from test_engine import TOLERANCE, batch, difference, model_of, reference
from tiny import FAMILIES, tokens
from transformers import AutoConfig

from wide.engine import from_routed
from wide.engine.check import check_engine
from wide.engine.synthetic import published_config
from wide.methods import load as load_method

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def sizes(family: str):
    """Configs wide enough for the operators that skip; Mistral with a window shorter than the prompt."""
    if family == "llama":
        return published_config("llama8b"), 4
    if family == "qwen3":
        return published_config("qwen3_14b"), 5
    shape = {"hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 28, "num_key_value_heads": 4}
    window = {"sliding_window": 1000} if family == "mistral" else {"use_sliding_window": False}
    return AutoConfig.for_model(family, **shape, **window, head_dim=128, max_position_embeddings=8192), 7


PUBLISHED = {"compensation": False, "router_norm": False}
CASES = [
    ("llama", 128, {}),
    ("llama", 512, PUBLISHED),
    ("qwen3", 128, PUBLISHED),
    ("qwen3", 512, {}),
    ("qwen2", 256, {}),
    ("mistral", 128, {}),
]


@pytest.mark.parametrize(("family", "group_size", "options"), CASES)
def test_bfloat16_is_within_twice_the_reference_paths_own_error(family, group_size, options):
    config, heads = sizes(family)
    method = load_method("wide").Config(attn_group_size=heads, ffn_group_size=group_size, **options)
    verdict = check_engine(config, method, 0.5, CUDA, torch.bfloat16, 4200)
    assert verdict["correct"], verdict


@pytest.mark.parametrize("sparsity", (0.0, 0.3, 0.7, 1.0))
def test_bfloat16_at_every_sparsity(sparsity):
    method = load_method("wide").Config(attn_group_size=4, ffn_group_size=256)
    verdict = check_engine(published_config("llama8b"), method, sparsity, CUDA, torch.bfloat16, 4200)
    assert verdict["correct"], verdict


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_the_reference_path_with_its_own_routers(family):
    model = model_of(family, compensation=True, router_norm=True).to(CUDA)
    ids, mask = (x.to(CUDA) for x in batch("left"))
    expected, real = reference(model, ids, mask), mask.bool()
    for chunk in (64, 4, 1):
        assert difference(from_routed(model, prefill_chunk=chunk)(ids, mask)[real], expected[real]) < TOLERANCE
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(input_ids=ids, attention_mask=mask, **settings)
    engine = from_routed(model, pad_token=0)
    assert torch.equal(engine.generate(ids, mask, max_new_tokens=24, stop_tokens=()), expected)
    alone = ids[1:2, :]
    expected = model.generate(input_ids=alone, attention_mask=torch.ones_like(alone), **settings)
    assert torch.equal(engine.generate(alone, max_new_tokens=24, stop_tokens=()), expected)


def test_one_graph_serves_every_length_and_text():
    model = model_of("llama", compensation=True).to(CUDA)
    engine = from_routed(model)
    engine.reserve(1, 256)
    for length, seed in ((5, 1), (60, 2), (9, 3)):
        ids = tokens(1, length, seed).to(CUDA)
        found = engine.generate(ids, max_new_tokens=20, stop_tokens=())
        fresh = from_routed(model).generate(ids, max_new_tokens=20, stop_tokens=())
        assert torch.equal(found, fresh)
    assert len(engine._graphs) == 1
