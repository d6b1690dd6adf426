"""The notebooks of examples/ run from top to bottom on the bundled model."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


def run_cell(source, namespace):
    """Run a cell as a notebook does, and show its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), namespace)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
    return value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)


def test_notebooks_are_kept_without_outputs():
    assert len(NOTEBOOKS) == 5
    for path in NOTEBOOKS:
        book = json.loads(path.read_text(encoding="utf-8"))
        assert book["nbformat"] == 4 and book["cells"][0]["cell_type"] == "markdown"
        assert not any(cell.get("outputs") for cell in book["cells"]), path.name


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        run_cell("".join(cell["source"]), namespace)
