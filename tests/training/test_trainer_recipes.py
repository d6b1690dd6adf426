"""The recipes of docs/how-to/other-trainers.md run as printed."""

import re
from pathlib import Path

import pytest

from unspool.data.facts import word_list

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "other-trainers.md"
BLOCKS = re.findall(r"^## (.+?)$.*?^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
PRELUDE = re.search(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
NEEDS = {"TRL SFTTrainer": ("trl", "datasets"), "PyTorch Lightning": ("lightning",)}


@pytest.mark.slow
@pytest.mark.parametrize(("title", "code"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_a_recipe_trains_as_printed(title, code, tmp_path, monkeypatch):
    for name in NEEDS.get(title, ()):
        pytest.importorskip(name)
    assert PRELUDE is not None
    assert len(BLOCKS) == 6
    monkeypatch.chdir(tmp_path)
    words = word_list()
    names = {"texts": [" ".join(words[at : at + 40]) for at in range(0, 800, 40)]}
    exec(PRELUDE[1], names)
    before = names["model"].get_input_embeddings().weight.detach().clone()
    exec(code, names)

    if "register" not in code:
        assert not before.equal(names["model"].get_input_embeddings().weight), "nothing was trained"
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
