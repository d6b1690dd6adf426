from collections.abc import Callable
from pathlib import Path

import pytest

from unspool.core.errors import ConfigError
from unspool.recipe.load import load_recipe

VALID = """\
name: small
model: org/name
sources:
  books: {kind: jsonl, path: data/*.jsonl}
  wiki: {kind: text, path: wiki}
datasets:
  long: {from: books, seq_len: 4K, packing: single_doc}
  short:
    from: {books: 0.3, wiki: 0.7}
    seq_len: 1K
stages:
  - name: first
    context_length: 4K
    rope: {method: abf, base: 8e6}
    mix: {long: 0.6, short: 0.4}
    tokens: 1M
    batch_tokens: 16K
    lr: 1e-5
  - name: second.run
    init: first
    context_length: 4K
    mix: {long: 1}
    tokens: 1M
    batch_tokens: 16K
    lr: 2e-5
evals:
  - {suite: niah, lengths: [1K, 4K]}
"""


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(VALID)
    return path


@pytest.fixture
def problems(valid: Path) -> Callable[..., list[str]]:
    """The sentences for the valid recipe with `old` replaced by `new`, the file's folder cut off."""

    def find(old: str = "", new: str = "", sets: list[str] | None = None) -> list[str]:
        assert old in VALID, f"{old!r} is not in the recipe, so nothing would be changed"
        valid.write_text(VALID.replace(old, new, 1) if old else VALID)
        with pytest.raises(ConfigError) as error:
            load_recipe(valid, sets or [])
        return str(error.value).replace(f"{valid.parent}/", "").split("\n")

    return find
