"""A recipe that extends another has its values, changed; messages name the file that a value is written in."""

from pathlib import Path

import pytest

from unspool.core.errors import ConfigError
from unspool.recipe.load import load_recipe


def extending(valid: Path, text: str) -> Path:
    path = valid.with_name("own.yaml")
    path.write_text(text)
    return path


def sentences(path: Path, *sets: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_recipe(path, list(sets))
    return str(error.value).replace(f"{path.parent}/", "").split("\n")


def test_own_keys_replace_those_of_the_other_and_set_changes_single_values(valid):
    path = extending(
        valid, "extends: small.yaml\nname: own\nmodel: org/other\nset: {stages.first.lr: 3e-5, stages.1.tokens: 2M}\n"
    )
    base, own = load_recipe(valid).recipe, load_recipe(path, ["stages.second.run.lr=4e-5"]).recipe
    assert (own.name, own.model, str(own.out)) == ("own", "org/other", "runs/own")
    assert [stage.lr for stage in own.stages] == [3e-5, 4e-5] and own.stages[1].tokens == 2 << 20
    assert own.datasets == base.datasets and own.stages[0].tokens == base.stages[0].tokens
    assert base.stages[0].lr == 1e-5, "the other recipe stays as it is"


def test_some_stages_are_kept_with_what_they_use(valid):
    valid.write_text(valid.read_text() + "  - {suite: key_value, lengths: [1K], after: [base, first, second.run]}\n")
    path = extending(valid, "extends: small.yaml\nname: own\nstages: [second.run]\nset: {stages.0.init: base}\n")
    own = load_recipe(path).recipe
    assert [stage.name for stage in own.stages] == ["second.run"]
    assert (list(own.datasets), list(own.sources)) == (["long"], ["books"])
    assert [entry.after for entry in own.evals] == [None, ["base", "second.run"]]


def test_a_recipe_may_extend_one_that_extends_another(valid):
    extending(valid, "extends: small.yaml\nname: own\nset: {stages.0.lr: 3e-5}\n")
    third = valid.with_name("third.yaml")
    third.write_text("extends: own.yaml\nname: third\nset: {stages.1.lr: 4e-5}\n")
    assert [stage.lr for stage in load_recipe(third).recipe.stages] == [3e-5, 4e-5]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("extends: small.yaml\n", "own.yaml:1: extends: add `name`, because two recipes cannot share a run folder."),
        ("extends: [small.yaml]\nname: own\n", "own.yaml:1: extends: give the recipe to extend"),
        ("name: own\nset: {seed: 1}\n", "own.yaml:1: extends: give the recipe to extend"),
        ("extends: small.yaml\nname: own\nset: [seed]\n", "own.yaml:3: set: must be a mapping from paths to values"),
        ("extends: smal.yaml\nname: own\n", "recipe file smal.yaml does not exist"),
        ("extends: prolonk\nname: own\n", "'prolonk' is neither a file nor a bundled recipe; did you mean 'prolong'?"),
        ("extends: own.yaml\nname: own\n", "own.yaml: the recipes extend each other in a circle"),
        (
            "extends: small.yaml\nname: own\nset:\n  seed: 1\n  stages.frist.lr: 1\n",
            "own.yaml:5: set: stages has no 'frist'; did you mean 'first'?",
        ),
        (
            "extends: small.yaml\nname: own\nset:\n  stages.0.lr: fast\n",
            "own.yaml:4: stages.0.lr = fast: must be a number above 0",
        ),
        (
            "extends: small.yaml\nname: own\nstages: [frist]\n",
            "own.yaml:3: stages: small.yaml has no stage 'frist'; did you mean 'first'?",
        ),
        (
            "extends: small.yaml\nname: own\nevals:\n  - {suite: niah, lengths: [1K]}\n  - {suite: niah}\n",
            "own.yaml:5: evals.1.lengths: missing",
        ),
    ],
)
def test_mistakes_are_reported_in_the_file_that_has_them(valid, text, wanted, monkeypatch):
    monkeypatch.chdir(valid.parent)
    found = sentences(extending(valid, text))
    assert any(sentence.startswith(wanted) for sentence in found), found


def test_a_mistake_in_the_other_recipe_is_reported_with_its_line(valid):
    valid.write_text(valid.read_text().replace("lr: 1e-5", "lr: fast"))
    (found,) = sentences(extending(valid, "extends: small.yaml\nname: own\nset: {seed: 1}\n"))
    assert found.startswith("small.yaml:18: stages.0.lr = fast")


def test_broken_values_of_the_other_recipe_are_no_traceback(valid):
    valid.write_text(
        valid.read_text().replace("mix: {long: 1}", "mix: 3").replace("from: {books: 0.3, wiki: 0.7}", "from: mix:no")
    )
    assert sentences(extending(valid, "extends: small.yaml\nname: own\nstages: [first, second.run]\n"))
