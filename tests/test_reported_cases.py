"""Failures reported in neighbouring tools: stop strings, tied embeddings, exports, begin tokens, tasks without data."""

import json

import pytest
import torch
from lm_eval.tasks import TaskManager
from rivals import build
from safetensors.torch import load_file
from test_lm_eval import requests, tokenizer  # noqa: F401
from tiny import routed, stock, tokens
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from wide.adapter import add_lora, merge
from wide.base_model import tiny_tokenizer
from wide.evaluation import accuracy
from wide.evaluation.lm_eval import WideLM
from wide.export import export_static
from wide.options import EvalConfig, StageConfig

PROMPTS = ("Say: union", "To the Congress of the", "We", "Fellow citizens of the Senate")


def generate(lm: WideLM, until: list[str]) -> list[str]:
    settings = {"until": until, "max_gen_toks": 16, "do_sample": False}
    return lm.generate_until(requests("generate_until", *((p, settings) for p in PROMPTS)), disable_tqdm=True)


def test_f23_each_row_of_a_batch_stops_at_its_own_string(tokenizer):  # noqa: F811
    """Two rows stop, at a string of several tokens and early; the others go on; nothing after a stop is counted."""
    model = routed("llama")
    free = generate(WideLM(model, tokenizer, batch_size=1, max_length=256), ["\0"])
    longest = sorted(free, key=len)
    until = [longest[-1][6:9], longest[-2][2:4]]
    expected = [min((text.split(stop)[0] for stop in until), key=len) for text in free]
    assert len({len(text) for text in expected}) > 1 and any(a == b for a, b in zip(free, expected, strict=True))
    for size in (1, 4):
        lm = WideLM(model, tokenizer, batch_size=size, max_length=256)
        assert generate(lm, until) == expected
        counts = sorted(count for _, count in lm.scored)
        assert counts == sorted(len(tokenizer(text)["input_ids"]) for text in expected if text)


@pytest.mark.parametrize(("family", "tied"), [("smol", True), ("llama", False)])
def test_f29_tied_embeddings_stay_tied_through_lora_merge_and_export(family, tied, tmp_path):
    def is_tied(model) -> bool:
        return model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()

    model, ids = build("ddp", family), tokens(2, 12)
    embedding = model.base.get_input_embeddings().weight.clone()
    wrapped = add_lora(model, StageConfig(name="lora"))
    assert not [name for name, _ in wrapped.named_parameters() if "lora_" in name and "layers" not in name]
    merged = merge(wrapped)
    assert is_tied(merged.base) == tied and torch.equal(merged.base.get_input_embeddings().weight, embedding)
    export_static(merged, tmp_path / "first")
    for source, target in (("first", "second"), ("second", "third")):
        assert ("lm_head.weight" in load_file(tmp_path / source / "model.safetensors")) != tied
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / source)
        assert is_tied(loaded) == tied and loaded.config.tie_word_embeddings == tied
        with torch.no_grad():
            expected, found = merged(input_ids=ids).logits, loaded.eval()(input_ids=ids).logits
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        loaded.save_pretrained(tmp_path / target)


def test_f33_a_base_with_sampling_settings_in_greedy_mode_exports(tmp_path):
    """transformers refuses to save such settings; many published bases ship them."""
    model = build("ddp", "llama")
    model.base.generation_config.do_sample, model.base.generation_config.temperature = False, 0.6
    export_static(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not loaded.generation_config.do_sample and loaded.generation_config.temperature in (None, 1.0)


def test_f33_an_export_on_top_of_another_model_is_refused(tmp_path):
    """Old shards and their index would stay beside the new file."""
    stock("qwen3").save_pretrained(tmp_path, max_shard_size="50KB")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="holds files; legal: a new or an empty folder"):
        export_static(build("ddp", "llama"), tmp_path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("adds_bos", (True, False))
@pytest.mark.parametrize("dense", (True, False))
def test_f39_the_begin_token_is_there_as_often_as_the_tokenizer_says(adds_bos, dense):
    """In log-likelihood, rolling likelihood and generation, for the dense and for the routed model alike."""
    own = tiny_tokenizer()
    own.pad_token = own.bos_token = own.eos_token
    bos = own.bos_token_id
    if adds_bos:
        own.backend_tokenizer.post_processor = TemplateProcessing(single="B $A", special_tokens=[("B", bos)])
    lm = WideLM(routed("llama"), own, dense=dense, batch_size=1, max_length=64)
    seen = []
    decoder = lm.routed.base.model
    decoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"][0]), with_kwargs=True
    )
    lm.loglikelihood(requests("loglikelihood", ("To the", " Congress")), disable_tqdm=True)
    (scored,) = seen
    assert (scored == bos).sum() == int(adds_bos) and (scored[0] == bos) == adds_bos
    seen.clear()
    settings = {"until": ["\0"], "max_gen_toks": 1, "do_sample": False}
    lm.generate_until(requests("generate_until", ("To the", settings)), disable_tqdm=True)
    assert (seen[0] == bos).sum() == int(adds_bos) and (seen[0][0] == bos) == adds_bos
    seen.clear()
    lm.loglikelihood_rolling(requests("loglikelihood_rolling", ("To the Congress",)), disable_tqdm=True)
    assert (seen[0] == bos).sum() == 1 + int(adds_bos)  # the harness's own prefix token stands before the text


def test_f41_a_task_without_its_data_is_refused_before_the_model_loads(tmp_path, monkeypatch):
    task = {"task": "far", "dataset_path": "nobody/far_away", "test_split": "test", "output_type": "multiple_choice"}
    task |= {"doc_to_text": "{{q}}", "doc_to_choice": ["a", "b"], "doc_to_target": 0}
    (tmp_path / "far.yaml").write_text(json.dumps(task))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr(accuracy, "task_manager", lambda names: manager)
    with pytest.raises(ValueError, match=r"the data of 'far' are not in the cache .*make data"):
        accuracy.check_tasks(EvalConfig(tasks=["far"]))


def test_f41_packaged_tasks_are_there_without_a_network():
    accuracy.check_tasks(EvalConfig(tasks=["sotu_cloze", "sotu_copy"]))
