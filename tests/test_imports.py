"""Imports point one way, wherever they are written, and the command answers without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import unspool

ORDER = (
    *("core", "data", "rope", "models", "training", "evals", "synthesis", "reporting"),
    *("recipe", "planning", "studies", "cli"),
)
# A package that shares another's place in the order; neither imports the other.
BESIDE = {"inspection": "reporting", "verification": "synthesis"}
PACKAGES = (*ORDER, *BESIDE)
SOURCE = Path(unspool.__file__).parent


def lies_right(other: str, mine: str | None) -> bool:
    """Whether package `other` is out of bounds for `mine`; None stands beside all packages and imports none."""
    if mine is None or other == mine:
        return other != mine
    return ORDER.index(BESIDE.get(other, other)) >= ORDER.index(BESIDE.get(mine, mine))


def imported_modules(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the file's own package, each further dot one level up.
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from unspool import cli` imports a package under the name of an attribute.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            texts = (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))
            yield from ((node.lineno, text) for text in texts if isinstance(text, str))


def violations(source: Path) -> list[str]:
    found = []
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source).parts
        mine = inside[0] if len(inside) > 1 else "cli" if inside == ("__main__.py",) else None
        if mine == "assets":
            continue  # data; lm-eval loads the Python file of a task by its path
        if mine is not None and mine not in PACKAGES:
            found.append(f"{path}: package {mine!r} has no place in ORDER")
            continue
        # What stands beside the packages, such as `__version__`, is imported by all and imports none.
        for line, name in imported_modules(ast.parse(path.read_text()), ["unspool", *inside[:-1]]):
            parts = name.split(".")
            if parts[0] == "unspool" and len(parts) > 1 and parts[1] in PACKAGES and lies_right(parts[1], mine):
                found.append(f"{'/'.join(inside)}:{line}: {mine} imports {name}, which lies to its right")
    return found


def test_no_package_imports_from_its_right():
    assert len(list(SOURCE.rglob("*.py"))) > 20, "hardly any files found, so the next line would check nothing"
    assert violations(SOURCE) == []


@pytest.mark.parametrize(
    "code",
    [
        "import unspool.evals.run",
        "import unspool.evals.run as run",
        "from unspool.evals.run import run_suite",
        "from unspool.evals import run",
        "from unspool import evals",
        "from ..evals import run",
        "from ..evals.run import run_suite",
        "from .. import evals",
        "def later():\n    from unspool.evals.run import run_suite",
        "class Later:\n    def now(self):\n        import unspool.cli.main",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from unspool.reporting.page import Page",
        "import importlib\nrun = importlib.import_module('unspool.evals.run')",
        "try:\n    from unspool.recipe import check\nexcept ImportError:\n    pass",
    ],
)
def test_a_planted_violation_is_caught(code, tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "loop.py").write_text(code + "\n")
    (found,) = violations(tmp_path)
    assert found.startswith("training/loop.py:")


@pytest.mark.parametrize(
    "code",
    [
        "from unspool.core.errors import ConfigError",
        "from . import config",
        "from unspool import __version__",
        "import os",
    ],
)
def test_imports_from_the_left_are_welcome(code, tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "loop.py").write_text(code + "\n")
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    ("package", "code", "allowed"),
    [
        ("inspection", "from unspool.evals.run import run_suite", True),
        ("inspection", "from unspool.reporting.page import Page", False),
        ("reporting", "from unspool.inspection.viewer_page import Page", False),
        ("inspection", "from unspool.recipe.load import load_recipe", False),
        ("recipe", "from unspool.inspection.viewer_page import Page", True),
        ("training", "from unspool.inspection.viewer_page import Page", False),
    ],
)
def test_packages_that_share_a_place_know_nothing_of_each_other(package, code, allowed, tmp_path):
    (tmp_path / package).mkdir()
    (tmp_path / package / "page.py").write_text(code + "\n")
    assert (violations(tmp_path) == []) is allowed


def test_a_package_without_a_place_is_caught(tmp_path):
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "x.py").write_text("")
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize("module", ["unspool.cli.main", "unspool.recipe.load"])
def test_help_and_the_recipe_checker_load_neither_torch_nor_transformers(module):
    code = (
        f"import sys, {module}; print(sorted({{'torch', 'transformers', 'datatrove', 'pyarrow'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
