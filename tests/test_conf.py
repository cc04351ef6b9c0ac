"""Every config file composes and validates; every mistake is one sentence that names the key and the legal values."""

import dataclasses
import importlib.util
import re
from collections import Counter

import pytest
import yaml
from conftest import ROOT
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException

from experiments.mistakes import check_sweep, explain
from wide import methods
from wide.base_model import read_geometry
from wide.config import build, register_schemas
from wide.families import Geometry, check_groups
from wide.options import GROUPS, Config

CONF = ROOT / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
OPTIONS = sorted(
    (path.parent.name, path.stem) for path in CONF.glob("*/*.yaml") if path.parent.name not in ("experiment", "sweep")
)
NEEDS_PATH = {"hub", "local", "gguf", "files"}

# Query heads, KV heads, FFN width, positions, as the models' cards state them.
PUBLISHED = {
    "smollm2": (9, 3, 1536, 8192),
    "llama8b": (32, 8, 14336, 131072),
    "llama3b": (24, 8, 8192, 131072),
    "llama1b": (32, 8, 8192, 131072),
    "qwen3_0_6b": (16, 8, 3072, 40960),
    "qwen3_1_7b": (16, 8, 6144, 40960),
    "qwen3_4b": (32, 8, 9728, 40960),
    "qwen3_8b": (32, 8, 12288, 40960),
    "qwen3_14b": (40, 8, 17408, 40960),
}


@pytest.fixture(scope="module", autouse=True)
def hydra_conf():
    register_schemas()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def make(*overrides: str) -> Config:
    node = compose("config", overrides=list(overrides))
    return build(node, methods.load(node.method.name).Config, "outputs/x")


def mistake(*overrides: str) -> str:
    """The line a user would see."""
    with pytest.raises((ValueError, HydraException)) as caught:
        make(*overrides)
    line = explain(caught.value)
    assert line is not None and "\n" not in line
    return line


def geometry_of(config: Config) -> Geometry:
    if config.model.name not in PUBLISHED:
        return read_geometry(config.model)
    num_heads, num_kv_heads, ffn_size, positions = PUBLISHED[config.model.name]
    return Geometry("llama", 2, 64, num_heads, num_kv_heads, 64, ffn_size, 99, False, positions)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_composes_validates_and_fits_its_model(name):
    config = make(f"+experiment={name}")
    geometry = geometry_of(config)
    check_groups(geometry, *(getattr(config.method, f"{kind}_group_size", None) for kind in ("attn", "ffn")))
    assert config.data.block_size <= min(geometry.max_positions, config.model.max_length)
    assert config.experiment_name == name
    share = config.stage.micro_batch_size or config.stage.batch_size
    assert config.stage.batch_size % share == 0


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_file_is_overrides_only(name):
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n")
    content = yaml.safe_load(text)
    assert all(key.startswith("override /") for entry in content.get("defaults", []) for key in entry)
    assert "hydra" not in content, "settings of the sweep do not act from inside a swept experiment"


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if re.search(r"_s\d", name)])
def test_experiment_name_tells_the_sparsity_it_asks_for(name):
    config = make(f"+experiment={name}")
    asked = next(part[1:] for part in name.split("_") if part.startswith("s") and part[1:].isdigit())
    assert config.method.sparsity == pytest.approx(int(asked) / 100)


def test_the_rows_of_the_paper_have_their_experiment():
    sizes = {"": 32, "_g64": 64, "_g128": 128}
    rows = {("llama8b", s, suffix): (4, g) for s in (25, 50) for suffix, g in sizes.items()}
    rows |= {("llama3b", 50, suffix): (3, g) for suffix, g in sizes.items()}
    rows |= {("llama3b", s, ""): (3, 32) for s in (10, 20, 30, 40, 60, 70)}
    rows |= {("llama8b", 50, f"_g{g}"): (4, g) for g in (16, 256, 512)}
    rows |= {("llama8b", 50, f"_a{a}"): (a, 32) for a in (1, 2, 8, 16, 32)}
    rows |= {("llama8b", 50, "_uniform"): (4, 32), ("llama8b", 50, "_uniform_g128"): (4, 128)}
    for (model, percent, suffix), groups in rows.items():
        config = make(f"+experiment={model}_s{percent}{suffix}")
        assert config.model.name == model
        assert (config.method.attn_group_size, config.method.ffn_group_size) == groups
        uniform = config.method.targets() == {"attention": 0.5, "ffn": 0.5}
        assert uniform == ("uniform" in suffix)
    for size in ("0_6b", "1_7b", "4b", "8b", "14b"):
        assert {f"qwen3_{size}_s25", f"qwen3_{size}_s50"} <= set(EXPERIMENTS)


def test_preset_paper_is_the_published_recipe():
    config = make("+experiment=llama8b_s50")
    method, stage = config.method, config.stage
    assert (method.tau_start, method.tau_end, method.budget_weight, method.budget_price) == (5.0, 0.5, 20.0, "mean")
    assert (method.router_rank, method.router_activation, method.router_norm) == (32, "none", False)
    assert (method.init_gap, method.ramp_ratio, method.dial, method.compensation) == (0.0, 0.0, "none", False)
    assert (method.distill_weight, method.separation_weight, method.budget_scope) == (0.0, 0.0, "micro")
    assert (stage.steps, stage.batch_size, config.data.block_size) == (10_000, 16, 4096)
    assert (stage.learning_rate, stage.weight_decay, stage.grad_clip) == (2e-3, 0.01, 1.0)
    assert (stage.warmup_ratio, stage.scheduler) == (0.1, "cosine")


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_of_every_group_composes(group, option):
    path = [f"{group}.path=somewhere"] if option in NEEDS_PATH and group in ("model", "data") else []
    config = make(f"{group}={option}", *path)
    if group not in ("method", "stage", "recovery", "trainer"):  # files of one name, or none
        assert getattr(config, group).name == option


@pytest.mark.parametrize("option", sorted(path.stem for path in (CONF / "method").glob("*.yaml")))
def test_method_file_names_every_option_of_its_method(option):
    """So that `key=value` works without a plus for each of them."""
    content = yaml.safe_load((CONF / "method" / f"{option}.yaml").read_text())
    assert set(content) == {field.name for field in dataclasses.fields(methods.load(content["name"]).Config)}


def test_default_preset_and_dataclass_agree():
    assert make().method == methods.load("wide").Config()


def test_root_defaults_do_not_mention_experiment():
    content = yaml.safe_load((CONF / "config.yaml").read_text())
    assert not [entry for entry in content["defaults"] if "experiment" in str(entry)]


MISTAKES = [
    (["method.sparsty=0.5"], ["method.sparsty", "method.sparsity"]),
    (["+method.sparsty=0.5"], ["method.sparsty", "did you mean method.sparsity"]),
    (["+model.pth=x"], ["model.pth", "did you mean model.path", "model.dtype"]),
    (["stage.step=3"], ["stage.step", "did you mean stage.steps"]),
    (["sed=3"], ["sed", "did you mean seed"]),
    (["+sed=3"], ["sed", "did you mean seed"]),
    (["modle=smollm2"], ["modle", "did you mean model"]),
    (["model=smolm2"], ["model=smolm2", "did you mean smollm2", "llama8b"]),
    (["method=wid"], ["did you mean wide", "paper", "dense"]),
    (["method.name=wid"], ["method.name='wid'", "dense", "wide"]),
    (["+experiment=smollm_s50"], ["did you mean smollm2_s50"]),
    (["experiment=tiny"], ["+experiment="]),
    (["method.sparsity=abc"], ["method.sparsity", "abc"]),
    (["method.sparsity=1.3"], ["method.sparsity=1.3", "0 to 1"]),
    (["method.sparsity=70"], ["method.sparsity=70", "0 to 1"]),
    (["method.sparsity=-0.1"], ["method.sparsity=-0.1", "0 to 1"]),
    (["method.sparsity=nan"], ["method.sparsity=nan", "0 to 1"]),
    (["method.tau_end=nan"], ["method.tau_end=nan", "above 0"]),
    (["stage.learning_rate=nan"], ["stage.learning_rate=nan", "0 or more"]),
    (["method.attention_sparsity=0.5"], ["attention_sparsity", "ffn_sparsity"]),
    (["method.attn_group_size=0"], ["method.attn_group_size=0", "1 or more"]),
    (["method.budget_price=free"], ["method.budget_price='free'", "mean, cost"]),
    (["method=dense", "method.sparsity=0.5"], ["method.sparsity=0.5", "dense"]),
    (["stage.learning_rate=fast"], ["stage.learning_rate", "fast"]),
    (["stage.steps=1.5"], ["stage.steps", "1.5"]),
    (["stage.steps=0"], ["stage.steps=0", "1 or more"]),
    (["stage.scheduler=linear"], ["stage.scheduler='linear'", "cosine, constant"]),
    (["stage.warmup_ratio=2"], ["stage.warmup_ratio=2", "0 to 1"]),
    (["model.dtype=fp8"], ["model.dtype='fp8'", "bfloat16"]),
    (["model=hub", "model.path=''"], ["model.path"]),
    (["model=tiny_llama", "model.family=null"], ["model.family"]),
    (["data.bos=sometimes"], ["data.bos='sometimes'", "tokenizer, always, never"]),
    (["data.held_out_offset=12"], ["data.held_out_offset=12", "0 to 11"]),
    (["trainer.strategy=dp"], ["trainer.strategy='dp'", "ddp"]),
    (["logger.mode=loud"], ["logger.mode='loud'", "offline"]),
    (["eval.blocks=0"], ["eval.blocks=0", "1 or more"]),
    (["seed=abc"], ["seed", "abc"]),
    (["seed=-1"], ["seed=-1", "0 to"]),
    (["results_file=null"], ["results_file"]),
    (["experiment_name=a/b"], ["experiment_name='a/b'"]),
    (["experiment_name=.."], ["experiment_name='..'"]),
    (["~model"], ["model is missing"]),
    (["+model.name=x"], ["model.name exists already"]),
    (["hydra.run.dirr=x"], ["hydra.run.dirr"]),
    (["+extra=3"], ["extra is unknown", "seed", "model"]),
    (["model=null"], ["a group cannot be null", "GROUP=OPTION"]),
    (["+model=tiny_llama"], ["model has a value already", "model=OPTION"]),
    (["sparsity"], ["'sparsity' cannot be read", "KEY=VALUE"]),
    (["stage.steps=[1"], ["'stage.steps=[1' cannot be read", "KEY=VALUE"]),
    (["stage.steps=1e3"], ["stage.steps", "1000.0", "Integer"]),
    (["method.dial=1"], ["method.dial='1'", "none, global, kind, layer"]),
    (["method.attn_group_size=true"], ["method.attn_group_size", "True"]),
]


@pytest.mark.parametrize(("overrides", "parts"), MISTAKES, ids=[" ".join(case[0]) for case in MISTAKES])
def test_f35_mistake_is_one_line_naming_key_and_legal_values(overrides, parts):
    line = mistake(*overrides)
    for part in parts:
        assert part in line


def test_f35_wrong_key_inside_an_experiment_file(tmp_path):
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "own.yaml").write_text("# @package _global_\nexperiment_name: own\nmethod:\n  sparsty: 0.7\n")
    line = mistake(f"hydra.searchpath=[file://{tmp_path}]", "+experiment=own")
    assert "method.sparsty" in line and "did you mean method.sparsity" in line


def test_f35_numbers_written_without_a_point_are_numbers():
    """YAML 1.1 reads 1e-4 as text; the schema makes a float of it."""
    config = make("stage.learning_rate=1e-4", "method.tau_end='1e-1'", "method.sparsity='0.5'", "seed='3'")
    assert (config.stage.learning_rate, config.method.tau_end, config.method.sparsity) == (1e-4, 0.1, 0.5)
    assert config.seed == 3 and type(config.seed) is int


def test_a_bug_is_not_explained_away():
    """Only this project's own ValueErrors are mistakes of the user; one from elsewhere keeps its traceback."""
    for fails in (lambda: int("x"), lambda: {}["x"]):
        with pytest.raises((ValueError, KeyError)) as caught:
            fails()
        assert explain(caught.value) is None


def test_f37_run_folders_of_one_second_differ():
    """F37: the time stamp alone would be shared by jobs started together."""
    folders = set()
    for _ in range(8):
        node = compose("config", return_hydra_config=True, overrides=["hydra.job.num=0"])
        HydraConfig.instance().set_config(node)
        folders.add(node.hydra.run.dir)
        assert node.hydra.run.dir == node.hydra.run.dir
    assert len(folders) == 8


def test_sweep_without_jobs_is_refused_and_others_are_not():
    with pytest.raises(ValueError, match="no job"):
        check_sweep(["-m", "+experiment=glob(zzz*)"], Counter())
    check_sweep(["-m", "seed=1,2"], Counter(started=2))
    check_sweep(["seed=1"], Counter())


@pytest.mark.parametrize(
    ("name", "group", "option"),
    [
        ("joblib", "launcher", "joblib"),
        ("local", "launcher", "submitit_local"),
        ("slurm", "launcher", "submitit_slurm"),
        ("ray", "launcher", "ray"),
        ("optuna", "sweeper", "optuna"),
    ],
)
def test_sweep_presets_choose_a_plugin_or_say_how_to_get_it(name, group, option):
    """In the config of the whole sweep; the job's own config stays that of a single run."""
    overrides = ["+experiment=tiny", f"+sweep={name}"]
    plugin = f"hydra_plugins.hydra_{option.split('_')[0]}_{group}"
    if importlib.util.find_spec("hydra_plugins") is None or importlib.util.find_spec(plugin) is None:
        assert f"hydra/{group}={option} is not installed here; pip install -e" in mistake(*overrides)
        return
    node = compose("config", return_hydra_config=True, overrides=overrides)
    assert node.hydra.runtime.choices[f"hydra/{group}"] == option
    assert make(*overrides) == make("+experiment=tiny")


def test_every_group_has_a_schema_entry_in_each_of_its_files():
    for group in GROUPS:
        for path in (CONF / group).glob("*.yaml"):
            assert yaml.safe_load(path.read_text())["defaults"] == ["schema", "_self_"], path.name
