"""README and docs say what is true: pages are followed in a copy of the project, other commands are checked by rule.

A page's code blocks that start with a comment naming a file are written there; its shell commands run as they stand.
What needs a GPU, the hub or hours is composed or parsed by the real parser instead. A command without a rule fails.
"""

import ast
import contextlib
import importlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import OFFLINE, ROOT
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from lm_eval._cli.harness import HarnessCLI
from test_conf import hydra_conf, make  # noqa: F401
from warm import WarmPython

from experiments.wide_eval import with_defaults

PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
NEEDS_GPU = "python -m wide_kernels."


def blocks(path: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(path.read_text(encoding="utf-8")) if language in languages]


def commands(path: Path) -> list[str]:
    """Every line of the shell blocks, without its comment."""
    lines = [line for block in blocks(path, "bash") for line in block.splitlines()]
    return [shlex.join(words) for words in (shlex.split(line, comments=True) for line in lines) if words]


def environment(folder: Path) -> dict[str, str]:
    """That of a reader who activated the virtual environment; the packages come from `folder`."""
    places = [str(folder), str(folder / "kernels")]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "PYTEST_"))}
    return kept | OFFLINE | {"PATH": path, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("wide", "experiments", "kernels", "conf", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("run.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def files_of(page: Path) -> dict[str, str]:
    """Path to text of every file that the page asks for: the path stands in the first line, as a comment."""
    found = {}
    for block in blocks(page, "python", "yaml"):
        first, _, rest = block.partition("\n")
        if re.fullmatch(r"# [\w/]+\.(py|yaml)", first):
            found[first[2:]] = rest
    return found


def follow(page: Path, folder: Path, python: WarmPython) -> str:
    """Write the page's files, run its commands; what they print."""
    printed = ""
    for name, text in files_of(page).items():
        assert not (folder / name).exists(), f"{name} is there already: the page adds nothing"
        (folder / name).write_text(text, encoding="utf-8")
    for command in commands(page):
        if command.startswith(NEEDS_GPU):
            continue
        words, variables = shlex.split(command), environment(folder)
        if words[0] == "python" and "tests/kernels" not in command:  # whose interpreter is chosen as triton is imported
            done = python(*words[1:], folder=folder, environment=variables)
        else:
            done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        printed += done.stdout
    return printed


def row(folder: Path) -> dict:
    """The one row that the page's run left."""
    (line,) = (folder / "outputs" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(line)


def test_the_page_on_families(copy, python):
    printed = follow(ROOT / "docs" / "family.md", copy, python)
    assert int(re.search(r"(\d+) passed", printed)[1]) > 10 and "failed" not in printed
    assert row(copy)["config"]["model"]["family"] == "smollm3" and row(copy)["status"] == "finished"


def test_the_page_on_methods(copy, python):
    follow(ROOT / "docs" / "method.md", copy, python)
    assert row(copy)["method"] == "last" and row(copy)["status"] == "finished"
    assert row(copy)["sparsity_total"] == pytest.approx((1 / 2 + 2 / 5) / 2)  # of 2 head groups, of 5 FFN groups


def test_the_page_on_operators(copy, python):
    printed = follow(ROOT / "docs" / "operator.md", copy, python)
    assert int(re.search(r"(\d+) passed", printed)[1]) == 9  # as many as the page has inputs
    assert "failed" not in printed


def test_the_page_on_experiments(copy, python):
    printed = follow(ROOT / "docs" / "experiment.md", copy, python)
    assert "sparsity: 0.4" in printed and "experiment_name: smollm2_s40_channels64" in printed
    assert len(list((copy / "outputs" / "smollm2_s40_channels64").glob("*/checkpoint"))) == 1


def test_the_page_on_tables(copy, python):
    follow(ROOT / "docs" / "table.md", copy, python)
    text = (copy / "outputs" / "tables" / "smollm2_short.md").read_text(encoding="utf-8")
    assert re.search(r"\| paper \| \d+\.\d\d.* \| \d+\.\d\d ±", text) and re.search(r"\| wide \| \d", text)


def test_every_page_is_followed_and_linked():
    """Each has a test above, files to write, and a link in README."""
    tests = Path(__file__).read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert f'"docs" / "{page.name}"' in tests and files_of(page)
        assert f"(docs/{page.name})" in readme


# Rules for commands that are not run as they stand.


def check_make(words: list[str]) -> None:
    done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_run(words: list[str]) -> None:
    """Every value of a sweep is composed against the schema; a glob must match an experiment."""
    overrides = [word for word in words[2:] if word not in ("-m", "--help", "--cfg", "job")]
    assert not [word for word in overrides if word.startswith("-")]
    single, swept = [], []
    for override in OverridesParser.create().parse_overrides(overrides):
        if override.is_sweep_override():
            if isinstance(override.value(), Glob):
                values = override.value().filter([path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")])
            else:
                values = list(override.sweep_string_iterator())
            swept.append([f"{override.get_key_element()}={value}" for value in values])
        else:
            single.append(override.input_line)
    assert all(swept)
    for choice in itertools.product(*swept):
        make(*single, *choice)


def check_module(words: list[str]) -> None:
    """The module's own parser knows every option; the files it needs do not exist here."""
    folder = ROOT / words[2].replace(".", "/") if words[2].startswith("experiments") else None
    module = importlib.import_module(f"{words[2]}.__main__" if folder and folder.is_dir() else words[2])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    assert {word for word in words[3:] if word.startswith("--")} <= set(re.findall(r"--[\w-]+", printed.getvalue()))


def check_wide_eval(words: list[str]) -> None:
    sys.argv = ["wide-eval", *with_defaults(words[1:])]
    options = HarnessCLI().parse_args()
    assert options.model == "wide" and options.tasks


def check_cd(words: list[str]) -> None:
    assert (ROOT / words[1]).is_dir()


def check_pytest(words: list[str]) -> None:
    assert (ROOT / words[3]).is_file()


RULES = {
    "make ": check_make,
    "python run.py": check_run,
    "python -m pytest ": check_pytest,
    "python -m ": check_module,
    "wide-eval ": check_wide_eval,
    "cd ": check_cd,
}
README = ROOT / "README.md"
GPU = [command for page in PAGES for command in commands(page) if command.startswith(NEEDS_GPU)]
CHECKED = list(dict.fromkeys([*commands(README), *GPU]))


@pytest.mark.parametrize("command", CHECKED)
def test_every_command_of_readme_is_known(command, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["test"])
    rule = next((rule for start, rule in RULES.items() if command.startswith(start)), None)
    assert rule, "this command has no rule"
    rule(shlex.split(command))


@pytest.mark.parametrize("path", [README, *PAGES], ids=lambda path: path.name)
def test_python_blocks_import_what_exists(path):
    for block in blocks(path, "python"):
        imports = [node for node in ast.parse(block).body if isinstance(node, ast.ImportFrom) and not node.level]
        exec(ast.unparse(ast.Module(imports, [])), {})
