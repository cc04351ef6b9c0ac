"""The harness: `wide` against its own model, the sparsity meter, the packaged tasks, the console."""

import json
import math
import sys
from collections import Counter

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tiny import routed, stock

from experiments import make_tasks, wide_eval
from wide.base_model import fingerprint, tiny_tokenizer
from wide.checkpoint import save_pretrained
from wide.data.corpus import Corpus
from wide.evaluation.accuracy import TASKS, check_tasks, flat_tasks, quiet, run_tasks, task_manager
from wide.evaluation.lm_eval import WideLM
from wide.methods import load as load_method
from wide.options import DataConfig, EvalConfig, ModelConfig

PACKAGED = sorted(path.stem for path in TASKS.glob("*.yaml"))


@pytest.fixture(scope="module")
def tokenizer():
    quiet()
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def answers(lm, limit: int = 5) -> tuple[dict, dict]:
    """Every answer to every request of the packaged tasks, and the figures."""
    results = simple_evaluate(lm, tasks=PACKAGED, limit=limit, task_manager=task_manager(PACKAGED), bootstrap_iters=0)
    given = {name: [sample["resps"] for sample in samples] for name, samples in results["samples"].items()}
    return given, results["results"]


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


def test_dense_through_wide_equals_the_harness_model_to_the_last_digit(tokenizer):
    theirs = HFLM(pretrained=stock("llama"), tokenizer=tokenizer, batch_size=4, max_length=256, backend="causal")
    ours = WideLM(routed("llama"), tokenizer, dense=True, batch_size=4, max_length=256)
    expected, figures = answers(theirs)
    assert set(expected) == set(PACKAGED)
    assert answers(ours) == (expected, figures)
    assert ours.scored_stats() is None
    assert answers(WideLM(routed("llama"), tokenizer, batch_size=4, max_length=256))[0] != expected


def test_batches_of_one_and_four_agree(tokenizer):
    one, four = (WideLM(routed("llama"), tokenizer, batch_size=size, max_length=256) for size in (1, 4))
    (given, figures), (others, other_figures) = answers(one), answers(four)
    for name in ("sotu_cloze", "sotu_continuation"):
        for mine, theirs in zip(given[name], others[name], strict=True):
            for (a,), (b,) in zip(mine, theirs, strict=True):
                assert a[0] == pytest.approx(b[0], abs=2e-4) and a[1] == b[1]
        assert figures[name]["acc,none"] == other_figures[name]["acc,none"]
    assert given["sotu_copy"] == others["sotu_copy"]
    for kind, kept in one.scored_stats().kept.items():
        assert torch.equal(kept, four.scored_stats().kept[kind])


def test_sparsity_is_that_of_the_scored_tokens_and_nothing_else(tokenizer):
    model = routed("llama")
    lm = WideLM(model, tokenizer, batch_size=4, max_length=256)
    pairs = [("To the Congress", " of this nation"), ("Of", " peace and war, and of the means"), ("Few", " a")]
    lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    before = lm.scored_stats()
    lm._model_call(torch.ones(4, 64, dtype=torch.long))  # what probing for a batch size does
    after = lm.scored_stats()
    kept, num_tokens = {"attention": 0.0, "ffn": 0.0}, 0
    for context, continuation in pairs:
        ids = tokenizer(context + continuation, return_tensors="pt")["input_ids"][:, :-1]
        model(input_ids=ids)
        num_tokens += len(continuation)
        for kind in kept:
            kept[kind] = kept[kind] + model.last_gates(kind)[:, 0, -len(continuation) :].double().sum(1)
    assert float(before.num_tokens) == num_tokens == sum(len(continuation) for _, continuation in pairs)
    for kind in kept:
        assert torch.equal(before.kept[kind], kept[kind]) and torch.equal(after.kept[kind], kept[kind])


def test_long_requests_are_cut_as_the_harness_cuts_them(tokenizer):
    lm = WideLM(routed("llama"), tokenizer, max_length=16)
    lm.loglikelihood(requests("loglikelihood", ("a" * 30, "bcd")), disable_tqdm=True)
    assert lm.scored == [(tokenizer.encode("a" * 14 + "bc"), 3)]


def test_rolling_likelihood_is_the_sum_over_the_text(tokenizer):
    text, model = "The state of our union is a matter of words.", routed("llama")
    lm = WideLM(model, tokenizer, max_length=256)
    (whole,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)), disable_tqdm=True)
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(text)]])
    with torch.no_grad():
        logs = model(input_ids=ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])
    assert whole == pytest.approx(float(logs.sum()), abs=1e-3)
    short = WideLM(model, tokenizer, max_length=10)
    short.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)), disable_tqdm=True)
    assert sum(count for _, count in short.scored) == len(text), "every token is scored once, however it is cut"


def test_generation_with_the_cache_equals_generation_without(tokenizer):
    model, prompts = routed("llama"), ("Say: union", "To the Congress of the")
    lm = WideLM(model, tokenizer, batch_size=2, max_length=256)
    settings = {"until": ["~"], "max_gen_toks": 12, "do_sample": False}
    texts = lm.generate_until(requests("generate_until", *((p, settings) for p in prompts)), disable_tqdm=True)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        for _ in range(12):
            with torch.no_grad():
                ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        expected = tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True).split("~")[0]
        assert text == expected and text


def test_engine_answers_as_the_reference_path(tokenizer):
    reference, engine = (
        cls(routed("llama"), tokenizer, batch_size=2, max_length=256) for cls in (WideLM, wide_eval.EngineLM)
    )
    (given, _), (others, _) = answers(reference, 2), answers(engine, 2)
    assert given["sotu_copy"] == others["sotu_copy"]
    flat = [[a[0] for mine in g["sotu_cloze"] for (a,) in mine] for g in (given, others)]
    assert flat[0] == pytest.approx(flat[1], abs=2e-4)
    with pytest.raises(ValueError, match="greedily"):
        sampled = {"do_sample": True, "temperature": 1.0, "until": ["~"], "max_gen_toks": 4}
        engine.generate_until(requests("generate_until", ("a", sampled)))


def test_packaged_items_are_those_the_script_makes():
    for name, items in make_tasks.make().items():
        lines = (TASKS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == items, name


def test_packaged_items_come_from_held_out_addresses_and_are_fair():
    splits = {d.name: (d.split, " ".join(d.text.split())) for d in Corpus.from_config(DataConfig()).documents()}
    items = {name: [json.loads(x) for x in (TASKS / f"{name}.jsonl").read_text().splitlines()] for name in PACKAGED}
    assert sum(map(len, items.values())) >= 500
    for name in ("sotu_cloze", "sotu_continuation"):
        assert max(Counter(item["label"] for item in items[name]).values()) < 0.32 * len(items[name])
        for item in items[name]:
            right = f"{item['context']} {item['choices'][item['label']]}"
            split, text = splits[item["document"]]
            assert split == "eval" and right in text and len(set(item["choices"])) == 4
            wrong = [choice for i, choice in enumerate(item["choices"]) if i != item["label"]]
            assert not any(f"{item['context']} {choice}" in text for choice in wrong)


def test_run_tasks_reports_both_models_and_leaves_the_harness_results_alone(tokenizer):
    options = EvalConfig(tasks=PACKAGED, limit=4, batch_size=4)
    model = routed("llama")
    report, originals = run_tasks(model, tokenizer, options, 256, bf16=False)
    assert set(originals) == {"harness_routed", "harness_dense"}
    for name, metric in (("sotu_cloze", "acc,none"), ("sotu_continuation", "acc_norm,none")):
        for mode in ("routed", "dense"):
            figure = report["tasks"][name][mode]
            assert figure["value"] == originals[f"harness_{mode}"]["results"][name][metric]
            assert (figure["num_items"], figure["output_type"]) == (4, "multiple_choice")
    lm = WideLM(model, tokenizer, batch_size=4, max_length=256)
    answers(lm, 4)
    assert report["sparsity"]["total"] == float(lm.scored_stats().total) and 0 < report["sparsity"]["total"] < 1
    words = report["tasks"]["sotu_words"]["dense"]["value"]
    assert words == originals["harness_dense"]["results"]["sotu_words"]["word_perplexity,none"]
    json.dumps(originals, default=str)
    again, further = run_tasks(model, tokenizer, options, 256, bf16=False, earlier=report)
    assert again == report and set(further) == {"harness_routed"}


def test_columns_of_the_row_by_hand():
    def task(metric, kind, routed, dense):
        common = {"metric": metric, "output_type": kind, "stderr": 0.01, "num_items": 9}
        return {"routed": {"value": routed} | common, "dense": {"value": dense} | common}

    tasks = {
        "piqa": task("acc_norm,none", "multiple_choice", 0.6, 0.8),
        "boolq": task("acc,none", "multiple_choice", 0.5, 0.6),
        "gsm8k": task("exact_match,flexible-extract", "generate_until", 0.1, 0.4),
        "wikitext": task("word_perplexity,none", "loglikelihood_rolling", 14.0, 8.0),
    }
    row = flat_tasks({"tasks": tasks, "sparsity": {"total": 0.5, "attention": 0.6, "ffn": 0.4}})
    assert row["accuracy_mean"] == pytest.approx(0.55) and row["dense_accuracy_mean"] == pytest.approx(0.7)
    assert row["accuracy_retention"] == pytest.approx(0.55 / 0.7)
    assert row["generation_mean"] == 0.1 and row["generation_retention"] == pytest.approx(0.25)
    assert (row["task_wikitext"], row["dense_task_wikitext"], row["task_sparsity_ffn"]) == (14.0, 8.0, 0.4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["sotu_clozes"]}, "'sotu_clozes' is unknown; .*sotu_cloze"),
        ({"tasks": ["humaneval"]}, "'humaneval' runs code .*eval.run_code=true"),
        ({"limit": 0}, "eval.limit=0 is out of range"),
    ],
)
def test_tasks_that_cannot_be_run_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_tasks(EvalConfig(**options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": "auto"}, "batch_size='auto'; legal: a number"),
        ({"precision": "fp8"}, "precision='fp8' .*legal: fp32, bf16"),
        ({"peft": "x"}, r"\['peft'\] in model_args; legal: wide, pretrained"),
        ({"wide": ""}, "model_args need wide=CHECKPOINT"),
        ({"wide": "nowhere"}, "checkpoint folder 'nowhere' does not exist"),
    ],
)
def test_mistakes_in_model_args(tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        WideLM(**{"wide": routed("llama"), "tokenizer": tokenizer} | arguments)


def test_console_names_our_model_and_tasks_unless_the_user_does():
    ours = ["--include_path", str(TASKS)]
    assert wide_eval.with_defaults(["--tasks", "x"]) == ["run", "--tasks", "x", "--model", "wide", *ours]
    assert wide_eval.with_defaults(["run", "--model=hf"]) == ["run", "--model=hf", *ours]
    assert wide_eval.with_defaults(["ls", "tasks"]) == ["ls", "tasks", *ours]
    assert wide_eval.with_defaults(["--help"]) == ["--help"]


def test_console_evaluates_a_checkpoint(tmp_path, monkeypatch, tokenizer):
    model = routed("llama")
    options = ModelConfig(name="tiny_llama", source="tiny", family="llama", max_length=256)
    method = load_method("wide").Config(
        attn_group_size=2, ffn_group_size=32, router_rank=4, init_gap=0.0, compensation=False
    )
    save_pretrained(model, tmp_path / "it", model=options, method=method, base_fingerprint=fingerprint(model.base))
    arguments = f"--model_args wide={tmp_path / 'it'} --tasks sotu_cloze --limit 4 --batch_size 2 --device cpu"
    monkeypatch.setattr(sys, "argv", ["wide-eval", *arguments.split(), "--output_path", str(tmp_path / "out")])
    wide_eval.main()
    (path,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(path.read_text())["results"]["sotu_cloze"]["acc,none"]
    lm = WideLM(model, tokenizer, batch_size=2, max_length=256)
    expected = simple_evaluate(lm, tasks=["sotu_cloze"], limit=4, task_manager=task_manager(["sotu_cloze"]))
    assert found == expected["results"]["sotu_cloze"]["acc,none"] and math.isfinite(found)
