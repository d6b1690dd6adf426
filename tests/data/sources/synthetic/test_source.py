import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.store import open_corpus
from unspool.data.sources.synthetic import fit_documents as generate
from unspool.data.sources.synthetic.fit_documents import TASKS, SyntheticSource, TaskName
from unspool.recipe.load import check_inputs, load_recipe

from ...conftest import build_tokenizer
from .factory import SENTENCES
from .solvers import check


def build(root: Path, name: str, *, workers: int = 1, seed: int = 0, **changes) -> dict:
    plain = {"kind": "synthetic", "tokens": "48K", "length": ["1K", "4K"]}
    return build_corpus(
        SyntheticSource.model_validate(plain | changes),
        root / name,
        tokenizer=build_tokenizer(),
        root=root,
        engine=EngineConfig(workers=workers),
        seed=seed,
    )


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(generate, "PART_TOKENS", 8 << 10)


def test_a_corpus_is_the_same_for_one_worker_and_two(tmp_path, small_parts):
    (tmp_path / "prose.txt").write_text(" ".join(SENTENCES))
    for name, workers in (("one", 1), ("two", 2)):
        build(tmp_path, name, workers=workers, prose="prose.txt")
    files = sorted((tmp_path / "one").glob("*.arrow"))
    assert len(files) > 3
    for file in files:
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
    assert len(list((tmp_path / "two").iterdir())) == len(files) + 1


def test_documents_hold_right_answers_and_the_requested_number_of_tokens(tmp_path, tokenizer, small_parts):
    counts = build(tmp_path, "made", tokens="256K")
    reader = open_corpus(tmp_path / "made")
    assert counts["tokens"] == reader.lens.sum() == pytest.approx(256 << 10, rel=0.03)
    assert (counts["records"], counts["quarantined"]) == (counts["documents"], {})
    assert reader.lens.min() >= 0.96 * 1024
    assert reader.lens.max() <= 4096
    seen = set()
    for index in range(len(reader)):
        task, number = reader.id(index).split(":")
        assert int(number) == index
        assert check(task, tokenizer.decode(reader[index][:-1])) is None
        seen.add(task)
    assert seen == set(TASKS)


def test_a_corpus_is_made_again_only_when_seed_settings_or_prose_change(tmp_path, capfd):
    (tmp_path / "prose.txt").write_text(" ".join(SENTENCES))

    def said(**changes) -> str:
        build(tmp_path, "made", **({"tokens": "8K"} | changes))
        return capfd.readouterr().err

    assert "not built yet" in said()
    assert said() == "corpus made: up to date\n"
    assert "(changed settings: seed)" in said(seed=1)
    assert "(changed settings: source" in said(seed=1, tasks={"hops": 1})
    assert "(changed inputs: files" in said(seed=1, tasks={"hops": 1}, prose="prose.txt")
    (tmp_path / "prose.txt").write_text(" ".join(SENTENCES[::-1]))
    assert "(changed inputs: files)" in said(seed=1, tasks={"hops": 1}, prose="prose.txt")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"length": [256, 1024]}, "at least 512 tokens"),
        ({"length": ["4K", "1K"]}, r"length needs \[shortest, longest\]"),
        ({"tasks": {}}, "shares above 0"),
        ({"tasks": {"hops": 0}}, "shares above 0"),
        ({"tasks": {"juggling": 1}}, "sorting"),
    ],
)
def test_a_source_that_cannot_be_made_is_refused(changes, problem):
    plain = {"kind": "synthetic", "tokens": "48K", "length": ["1K", "4K"]}
    with pytest.raises(ValidationError, match=problem):
        SyntheticSource.model_validate(plain | changes)


def test_a_recipe_may_name_every_task():
    assert set(get_args(TaskName)) == set(TASKS)
    default = SyntheticSource.model_validate({"kind": "synthetic", "tokens": 1, "length": [1024, 1024]})
    assert set(default.tasks) == set(TASKS)


RECIPE = """\
name: replaced
model: {size: 4M, tokenizer: asset:tiny-base, context_length: 64}
engine: {workers: 1}
out: OUT
sources:
  books: {kind: jsonl, path: books.jsonl}
  tasks: {kind: synthetic, tokens: 160K, length: [1K, 4K], prose: books.jsonl}
datasets:
  long: {from: books, seq_len: 8K, replace: {with: tasks, share: 0.3}}
stages:
  - {name: first, context_length: 8K, mix: {long: 1}, tokens: 16K, batch_tokens: 8K, lr: 1e-3}
"""


def save_recipe(folder: Path, text: str = RECIPE) -> Path:
    rng = np.random.default_rng(0)
    books = [" ".join(rng.choice(SENTENCES, size=size)) for size in rng.integers(20, 400, size=80)]
    (folder / "books.jsonl").write_text("".join(json.dumps({"text": book}) + "\n" for book in books))
    (folder / "recipe.yaml").write_text(text.replace("OUT", str(folder / "out")))
    return folder / "recipe.yaml"


def test_a_share_of_the_rows_is_replaced_by_tasks(tmp_path):
    done = CliRunner().invoke(build_app(), ["pack", str(save_recipe(tmp_path))])
    assert done.exit_code == 0, done.output
    counts = read_manifest(tmp_path / "out/datasets/long")["counts"]
    assert counts["rows"] >= 40
    assert counts["sources"]["tasks"]["tokens"] / counts["tokens"] == pytest.approx(0.3, abs=0.01)
    assert counts["sources"]["books"]["tokens"] / counts["tokens"] == pytest.approx(0.7, abs=0.01)


def test_prose_is_optional_but_its_file_must_exist(tmp_path):
    check_inputs(load_recipe(save_recipe(tmp_path, RECIPE.replace(", prose: books.jsonl", ""))))
    with pytest.raises(ConfigError, match=r"sources\.tasks\.prose"):
        check_inputs(load_recipe(save_recipe(tmp_path, RECIPE.replace("prose: books", "prose: nothing"))))
