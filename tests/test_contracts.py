"""The rules of the house that no type checker sees: budgets, the import contract, the `kernels` folder, packaging."""

import ast
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

from wide import methods
from wide.options import GROUPS, RootConfig

SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in (".", "wide", "experiments", "kernels", "tests")
    for path in (ROOT / folder).glob("*.py" if folder == "." else "**/*.py")
)
LONG_FILES_SAY = "This file is longer than 300 lines because"
MAX_LINES, MAX_FUNCTION = 300, 50


def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_file_budget_and_docstring(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    if not text.strip():
        return
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert docstring, "a module starts by saying what it holds"
    assert len(text.splitlines()) <= MAX_LINES or LONG_FILES_SAY in docstring


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[0] in ("wide", "experiments")], ids=str)
def test_function_budget(path):
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > MAX_FUNCTION
    ]
    assert not long


def test_every_config_key_is_read_somewhere():
    """As an attribute outside the schema, or from the plain dict by rows and trackers; a key nobody reads must go."""
    library = [path for path in SOURCES if path.parts[0] in ("wide", "experiments") and path.name != "config.py"]
    read = {name for path in library for node in ast.walk(tree(path)) for name in _read_names(node)}
    classes = [*GROUPS.values(), RootConfig, *(methods.load(name).Config for name in methods.names())]
    unread = [
        f"{c.__name__}.{field.name}" for c in classes for field in dataclasses.fields(c) if field.name not in read
    ]
    assert not unread


def test_import_contract_is_kept():
    run = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and "0 broken" in run.stdout, run.stdout + run.stderr


def test_kernels_stays_a_plain_folder():
    """A regular package of that name would hide the `kernels` package that transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT)
    code = "import transformers; transformers.LlamaForCausalLM; import wide.model"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_light_command_line_imports():
    """`--help`, `--cfg job` and tab completion answer at once: they must not load torch."""
    for arguments in (["--help"], ["+experiment=tiny", "--cfg", "job"]):
        command = [sys.executable, "-X", "importtime", "run.py", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        loaded = {line.rsplit("|")[-1].strip() for line in done.stderr.splitlines()}
        assert done.returncode == 0 and "hydra" in loaded
        assert not loaded & {"torch", "transformers", "lightning", "wandb"}


def test_results_and_loggers_do_not_import_hydra_themselves():
    for path in (Path("wide/results.py"), Path("wide/loggers.py")):
        names = {name for node in ast.walk(tree(path)) for name in _imported(node)}
        assert not {name for name in names if name.split(".")[0] in ("hydra", "omegaconf")}


def test_every_package_is_installed():
    """The package list of pyproject.toml is the folders that hold Python files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    folders = {path.parent for path in SOURCES if path.parts[0] in ("wide", "experiments")}
    expected = {".".join(folder.parts) for folder in folders} | {"wide_kernels"}
    assert listed == expected


def test_every_direct_dependency_has_a_tested_pin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.split("==")[0] for line in lines if "==" in line}
    extras = project["optional-dependencies"]
    direct = [*project["dependencies"], *extras["demo"], *extras["eval"], *extras["dev"]]
    assert {requirement.split(">=")[0] for requirement in direct} <= pins


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def _read_names(node: ast.AST) -> list[str]:
    """`x.name`, `x["name"]` and `x.get("name")`."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return [node.attr]
    keys = [node.slice] if isinstance(node, ast.Subscript) else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        keys = node.args
    return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def test_every_fault_of_the_list_is_tried_by_a_test_of_that_name():
    """And there are at least 60 of them: a name counts as many inputs as stand behind it."""
    listed = re.findall(r"`(test_\w+)`(?: \((\d+)\))?", (ROOT / "tests" / "FAULTS.md").read_text())
    tests = {n.name for p in SOURCES if p.parts[0] == "tests" for n in tree(p).body if isinstance(n, ast.FunctionDef)}
    assert not {name for name, _ in listed} - tests
    assert sum(int(count or 1) for _, count in listed) >= 60
