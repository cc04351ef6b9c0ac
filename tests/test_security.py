"""No pickle, no evaluated text, no code and no network that nobody asked for, no secret in anything that is written."""

import ast
import json
import os
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from test_checkpoint import rewrite_config, save
from test_cli import composed, one_line_error
from tiny import stock
from wandb_file import OfflineRun

from experiments.job import leave_refused, prepare
from experiments.mistakes import explain
from wide import checkpoint, results
from wide.base_model import load_base, load_tokenizer, read_hf_config
from wide.loggers import build_logger, finish
from wide.options import LoggerConfig, ModelConfig
from wide.records import clean, redact

SOURCES = sorted(p for folder in ("wide", "experiments", "kernels") for p in (ROOT / folder).rglob("*.py"))
PICKLES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
NETWORK = ("requests", "urllib.request", "http.client", "socket", "httpx", "aiohttp", "ftplib")
KEY = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_" + "aB3" * 11


def dangers(tree: ast.AST) -> list[str]:
    """What must not be in our source, by line."""
    return [f"{node.lineno}: {what}" for node in ast.walk(tree) if (what := danger(node))]


def danger(node: ast.AST) -> str | None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        return next((f"import {n}" for n in names if n.split(".")[0] in PICKLES or n in NETWORK), None)
    if not isinstance(node, ast.Call):
        return None
    name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
    if name in ("torch.load", "pl_load") and given.get("weights_only") != "True":
        return f"{name} without weights_only=True"
    if name.endswith(".fit") and "ckpt_path" in given and given.get("weights_only") != "True":
        return f"{name} resumes without weights_only=True"
    if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "pd.read_pickle"):
        return name
    if given.get("allow_pickle", "False") != "False" or given.get("shell", "False") != "False":
        return f"{name} with allow_pickle or shell"
    if given.get("trust_remote_code", "cfg.trust_remote_code") not in ("False", "cfg.trust_remote_code"):
        return f"{name} with trust_remote_code"
    return None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_has_no_dangerous_call(path):
    found = dangers(ast.parse(path.read_text(encoding="utf-8")))
    if path.name == "resume.py":  # for the name of the exception, see below
        found = [what for what in found if not what.endswith(": import pickle")]
    assert not found


@pytest.mark.parametrize(
    "line",
    (
        "import pickle", "from joblib import load", "torch.load(p)", "torch.load(p, weights_only=False)", "eval(text)",
        "exec(text)", "np.load(p, allow_pickle=True)", "subprocess.run(c, shell=True)", "yaml.load(text)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)", "trainer.fit(m, ckpt_path=p)", "import urllib.request",
        "os.system(c)", "pd.read_pickle(p)",
    ),
)  # fmt: skip
def test_the_scan_finds_what_it_looks_for(line):
    assert len(dangers(ast.parse(line))) == 1


def test_pickle_is_named_for_its_exception_only():
    tree = ast.parse((ROOT / "wide" / "resume.py").read_text())
    used = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "pickle"}
    assert used == {"pickle.UnpicklingError"}


def test_a_checkpoint_cannot_ask_for_the_code_of_its_base(tmp_path, monkeypatch):
    save(tmp_path / "c")
    base = json.loads((tmp_path / "c" / "wide_config.json").read_text())["base"]
    rewrite_config(tmp_path / "c", base=base | {"source": "hub", "path": "owner/name", "trust_remote_code": True})
    monkeypatch.setattr(checkpoint, "load_base", lambda *args: pytest.fail("a base was loaded"))
    with pytest.raises(ValueError, match=r"asks for the code that comes with its base 'owner/name'"):
        checkpoint.from_pretrained(tmp_path / "c")


def test_a_model_folder_with_code_needs_to_be_trusted(tmp_path):
    """The code in it would leave a file behind."""
    (tmp_path / "m").mkdir()
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    (tmp_path / "m" / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ValueError, match=r"cannot read the config of model\.source=local"):
        read_hf_config(ModelConfig(name="m", source="local", path=str(tmp_path / "m")))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ("../owner/name", "owner", "a/b/c", "owner/na me", "owner/../x", "https://hub/x", "owner/.git", "")
)
def test_names_that_are_no_hub_ids_never_reach_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("the hub was asked"))
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *a, **k: pytest.fail("the hub was asked"))
    if name:
        with pytest.raises(ValueError, match=r"model\.path=.* is no hub id"):
            read_hf_config(ModelConfig(name="m", source="hub", path=name))
        with pytest.raises(ValueError, match="does not exist; legal: a folder, or a hub id"):
            checkpoint.local_folder(name)
    with pytest.raises(ValueError, match="is no hub id; legal: OWNER/NAME"):
        checkpoint.push_to_hub(tmp_path, name)


def test_a_mistyped_path_does_not_go_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match="'outputs/chekpoint' does not exist"):
        checkpoint.from_pretrained("outputs/chekpoint")


def test_a_folder_is_not_taken_for_the_hub_id_that_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"model\.path='owner/name' is a folder here; legal: model\.source=local"):
        read_hf_config(ModelConfig(name="m", source="hub", path="owner/name"))


@pytest.mark.parametrize("what", ("model", "tokenizer", "checkpoint", "sweep"))
def test_a_dead_hub_is_one_line(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    options = ModelConfig(name="m", source="hub", path="owner/name")
    calls = {
        "model": lambda: load_base(options, torch.device("cpu")),
        "tokenizer": lambda: load_tokenizer(options),
        "checkpoint": lambda: checkpoint.from_pretrained("owner/name"),
        "sweep": lambda: prepare(composed("model=hub", "model.path=owner/name"), sweep=True, run_dir=tmp_path),
    }
    with pytest.raises(ValueError, match="owner/name") as caught:
        calls[what]()
    line = explain(caught.value)
    assert line and "\n" not in line and ("network" in line or "hub" in line)


@pytest.mark.parametrize("damage", ("no config", "no json", "cut weights", "no weights", "a family", "no tokenizer"))
def test_a_damaged_model_folder_is_one_line(tmp_path, damage):
    folder = tmp_path / "m"
    stock("llama").save_pretrained(folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    if damage == "no config":
        config.unlink()
    elif damage == "no json":
        config.write_text("{")
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "a family":
        config.write_text(json.dumps({"model_type": "opt"}))
    options = ModelConfig(name="m", source="local", path=str(folder))
    with pytest.raises(ValueError) as caught:
        load_tokenizer(options) if damage == "no tokenizer" else load_base(options, torch.device("cpu"))
    line = explain(caught.value)
    assert line and "\n" not in line and (str(folder) in line or "'opt' is not supported" in line)


def test_a_gguf_file_of_noise_is_one_line(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + os.urandom(500))
    with pytest.raises(ValueError, match=r"cannot read the config of model\.source=gguf") as caught:
        read_hf_config(ModelConfig(name="m", source="gguf", path=str(tmp_path / "m.gguf")))
    assert explain(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"run.py api_key={KEY} seed=3", "run.py api_key=*** seed=3"),
        (f"hydra.job.env_set.WANDB_API_KEY={KEY}", "hydra.job.env_set.WANDB_API_KEY=***"),
        (f"HF_TOKEN={TOKEN}", "HF_TOKEN=***"),
        (f"fetched with {TOKEN}.", "fetched with ***."),
        ("https://me:word@host/x", "https://***@host/x"),
        ("PASSWORD=x,y", "PASSWORD=***,y"),
        ("eval.new_tokens=40 data.path=a/b", "eval.new_tokens=40 data.path=a/b"),
    ],
)
def test_secrets_in_a_text_are_hidden_and_nothing_else(text, expected):
    assert redact(text) == expected


def test_values_of_secret_variables_are_hidden_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "a-word-nobody-uses")
    monkeypatch.setenv("SHORT_TOKEN", "the")
    value = {"message": "login a-word-nobody-uses failed in the end", "list": [("a-word-nobody-uses",)], "api_key": "x"}
    assert clean(value) == {"message": "login *** failed in the end", "list": [["***"]], "api_key": "***"}


def test_a_secret_in_a_refused_config_or_command_reaches_neither_row_nor_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run.py", f"+logger.api_key={KEY}"])
    (tmp_path / "run").mkdir()
    node = composed(f"+logger.more={TOKEN}", "logger=wandb")
    with pytest.raises(ValueError) as caught:
        prepare(node, sweep=True, run_dir=tmp_path / "run")
    leave_refused(node, tmp_path / "run", caught.value)
    assert list(results.read_rows(tmp_path / "outputs" / "results.jsonl").command) == [
        "python run.py +logger.api_key=***"
    ]
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or not _found(path, (KEY, TOKEN)), path


def test_wandb_gets_a_config_without_secrets_and_no_command_line_that_holds_one(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["run.py", f"api_key={KEY}"])
    monkeypatch.setenv("MY_PASSWORD", "a-word-nobody-uses")
    config = {
        "experiment_name": "e",
        "method": {"name": "wide"},
        "model": {"name": "tiny", "path": "a-word-nobody-uses"},
    }
    finish(build_logger(LoggerConfig(name="wandb", mode="offline"), config, tmp_path, "calibrate"), 0)
    assert OfflineRun(tmp_path).config["model"]["path"] == "***"
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or not _found(path, (KEY, "a-word-nobody-uses")), path


def test_a_secret_in_the_recipe_is_hidden_in_the_checkpoint(tmp_path):
    save(tmp_path / "c", recipe={"model": {"path": f"https://me:{KEY}@host/m"}})
    assert not _found(tmp_path / "c" / "wide_config.json", (KEY,))
    assert checkpoint.read_config(tmp_path / "c")["recipe"]["model"]["path"] == "https://***@host/m"


def test_a_mistake_with_a_secret_in_it_is_printed_without(cli):
    assert KEY not in one_line_error(cli(f"model.path=x?token={KEY}", "model.source=hub"))


def _found(path: Path, secrets: tuple[str, ...]) -> set[str]:
    data = path.read_bytes()
    return {secret for secret in secrets if secret.encode() in data}
