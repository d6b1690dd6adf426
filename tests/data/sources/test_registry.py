"""A source kind that is registered after import works wherever the built-in kinds do."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from unspool.core.errors import ConfigError
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.store import open_corpus
from unspool.data.sources import registry
from unspool.data.sources.base import Document, FileSource, Item
from unspool.data.sources.registry import SOURCES, build_source, register_source, source_for_file
from unspool.planning.recipe_inputs import plan_data
from unspool.recipe.json_schema import recipe_schema
from unspool.recipe.load import check_inputs, load_recipe
from unspool.recipe.schema import dump_recipe

RECIPE = """\
name: own-kind
model: {size: 4M, tokenizer: asset:tiny-base, context_length: 64}
sources:
  table: {kind: csv, path: table.csv, column: 1}
datasets:
  long: {from: table, seq_len: 64}
stages:
  - {name: first, context_length: 64, mix: {long: 1}, tokens: 4K, batch_tokens: 64, lr: 1e-3}
"""


class CsvSource(FileSource):
    """Comma-separated values; one document per line."""

    kind: Literal["csv"]
    column: int = Field(0, ge=0, description="the column that holds the text")

    def read_units(self, units: Sequence[Path], seed: int = 0) -> Iterator[Item]:
        for path in units:
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                yield Document(f"{path.name}:{number}", line.split(",")[self.column])


@pytest.fixture
def with_csv(monkeypatch):
    monkeypatch.setattr(registry, "SOURCES", SOURCES)
    monkeypatch.setitem(SOURCES, "csv", CsvSource)
    monkeypatch.delitem(SOURCES, "csv")
    register_source(CsvSource)


def save(folder: Path, text: str = RECIPE) -> Path:
    (folder / "table.csv").write_text("1,one two three\n2,four five six\n")
    (folder / "recipe.yaml").write_text(text)
    return folder / "recipe.yaml"


def test_a_registered_kind_is_loaded_checked_dumped_and_planned(tmp_path, with_csv):
    loaded = load_recipe(save(tmp_path))
    check_inputs(loaded)
    assert loaded.recipe.sources["table"] == CsvSource(kind="csv", path="table.csv", column=1)
    assert "column: 1" in dump_recipe(loaded.recipe)
    assert plan_data(loaded).sources[0].available.why.startswith("from 1 file of ")


def test_a_registered_kind_is_tokenized(tmp_path, with_csv, tokenizer):
    save(tmp_path)
    source = build_source({"kind": "csv", "path": "table.csv", "column": 1})
    counts = build_corpus(
        source, tmp_path / "out", tokenizer=tokenizer, root=tmp_path, engine=EngineConfig(workers=1), seed=0
    )
    assert counts["documents"] == 2
    assert tokenizer.decode(open_corpus(tmp_path / "out")[1][:-1]) == "four five six"


def test_the_json_schema_lists_it(with_csv):
    kinds = recipe_schema()["properties"]["sources"]["additionalProperties"]["discriminator"]["mapping"]
    assert set(kinds) == set(SOURCES) > {"csv", "text", "synthetic"}
    assert "column" in recipe_schema()["$defs"]["CsvSource"]["properties"]


def test_before_it_is_registered_the_nearest_kind_is_suggested(tmp_path):
    with pytest.raises(ConfigError) as refusal:
        load_recipe(save(tmp_path, RECIPE.replace("kind: csv", "kind: jsnl")))
    assert "recipe.yaml:4: sources.table.kind = jsnl: not known; did you mean 'jsonl'?" in str(refusal.value)
    assert str(refusal.value).endswith(f"Allowed: {', '.join(sorted(SOURCES))}.")


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("colum: 1", "sources.table.colum: unknown key; did you mean 'column'?"),
        ("column: -1", "sources.table.column = -1: must be a whole number of at least 0"),
        ("path: none.csv", "sources.table.path = none.csv: no such file or folder"),
    ],
)
def test_its_mistakes_are_reported_like_those_of_any_kind(tmp_path, with_csv, wrong, problem):
    text = RECIPE.replace("path: table.csv", wrong) if wrong.startswith("path") else RECIPE.replace("column: 1", wrong)
    with pytest.raises(ConfigError) as refusal:
        check_inputs(load_recipe(save(tmp_path, text)))
    assert "recipe.yaml:4: " in str(refusal.value)
    assert problem in str(refusal.value)


def test_a_name_has_one_class_and_a_class_one_name(with_csv):
    assert register_source(CsvSource) is CsvSource

    class Other(FileSource):
        kind: Literal["csv"]

    class Nameless(FileSource):
        pass

    with pytest.raises(ConfigError, match=r"'csv' is already registered \(CsvSource\)"):
        register_source(Other)
    with pytest.raises(ConfigError, match=r"Nameless\.kind must be a Literal with one name"):
        register_source(Nameless)


def test_every_kind_is_registered_under_its_own_name_and_names_its_paths():
    for kind, source in SOURCES.items():
        assert source.model_fields["kind"].annotation == Literal[kind]
        assert set(source.path_keys) <= set(source.model_fields)
        assert not (source.is_chat and source.generated)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.jsonl.zst", "jsonl"), ("a.parquet", "parquet"), ("A.TAR.GZ", "repos"), ("a.md", "text"), ("a", "text")],
)
def test_one_file_is_read_by_the_kind_that_its_name_tells(tmp_path, name, kind):
    (tmp_path / name).write_bytes(b"")
    assert source_for_file(tmp_path / name).kind == kind


def test_reading_a_recipe_loads_no_slow_library():
    code = (
        "import sys, unspool.data.sources.registry\n"
        "slow = ('pyarrow', 'datatrove', 'transformers', 'torch', 'tokenizers')\n"
        "print([name for name in slow if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
