"""`--set` changes any key of the schema, and names unknown ones."""

import pytest

from unspool.recipe.load import load_recipe


def test_a_value_is_set_by_index_by_stage_name_and_by_key(valid):
    sets = ["stages.0.lr=2e-5", "stages.second.run.lr=3e-5", "sources.books.path=other.jsonl", "stages.0.mix.short=0.1"]
    recipe = load_recipe(valid, sets).recipe
    assert [stage.lr for stage in recipe.stages] == [2e-5, 3e-5]
    assert recipe.sources["books"].path == "other.jsonl"
    assert recipe.stages[0].mix == {"long": 0.6, "short": 0.1}


def test_what_the_file_leaves_out_can_be_set(valid):
    sets = [
        "seed=7",
        "engine.workers=4",
        "datasets.short.utk.min_split=256",
        "stages.1.rope={method: abf, base: 5e5}",
    ]
    recipe = load_recipe(valid, sets).recipe
    assert (recipe.seed, recipe.engine.workers) == (7, 4)
    assert recipe.datasets["short"].utk is not None and recipe.datasets["short"].utk.min_split == 256
    assert recipe.stages[1].rope.base == 5e5


def test_whole_entries_can_be_added(valid):
    sets = [
        "datasets.more={from: wiki, seq_len: 2K}",
        "stages.1.mix.more=0.5",
        "evals.1={suite: key_value, lengths: [1K]}",
    ]
    recipe = load_recipe(valid, sets).recipe
    assert recipe.datasets["more"].seq_len == 2048
    assert recipe.stages[1].mix == {"long": 1, "more": 0.5}
    assert [entry.suite for entry in recipe.evals] == ["niah", "key_value"]


def test_a_later_override_wins(valid):
    assert load_recipe(valid, ["stages.0.lr=1", "stages.0.lr=2"]).recipe.stages[0].lr == 2


@pytest.mark.parametrize(
    ("text", "wanted"),
    {
        "stages.0.lrr=1": "stages.0.lrr: unknown key; did you mean 'lr'?",
        "stags.0.lr=1": "stags: unknown key; did you mean 'stages'?",
        "stages.frist.lr=1": "stages has no 'frist'; did you mean 'first'?",
        "stages.7.lr=1": "stages has entries 0 to 1",
        "evals.1.samples=3": "evals has entries 0 to 0",
        "sources.boks.path=x": "sources has no 'boks'; did you mean 'books'?",
        "name.x=1": "name is 'small', which has no keys",
        "out.x=1": "out must be text",
        "seed": "write a path and a value",
        "=3": "write a path and a value",
        "stages..lr=3": "write a path and a value",
        "stages.0.mix={long: [": "not valid YAML",
        "stages.0.lr=fast": "stages.0.lr = fast: must be a number above 0",
        "stages.0.tokens=64Q": "stages.0.tokens = 64Q: unit 'Q' is not known",
        "stages.0.rope={method: abff}": "stages.0.rope.method = abff: not known; did you mean 'abf'?",
        "stages.1.rope.base=1e6": "stages.1.rope.method: missing",
        "stages.0.mix.shrt=1": "stages.0.mix.shrt: dataset 'shrt' is not known; did you mean 'short'?",
        "stages.0.mix={long: 1, long: 2}": "stages.0.mix.long: duplicate key, first given",
    }.items(),
)
def test_a_wrong_override_is_reported_with_its_own_text_instead_of_a_line(text, wanted, problems):
    (sentence,) = problems(sets=[text])
    assert sentence.startswith(f"`overrides={text!r}`: ")
    assert wanted in sentence


def test_an_override_of_several_lines_is_quoted_on_one(problems):
    (sentence,) = problems(sets=["stages.0.mix=\n  lng: 1"])
    assert sentence.startswith("`overrides='stages.0.mix= lng: 1'`: stages.0.mix.lng")


def test_a_long_override_is_quoted_without_its_end(problems):
    (sentence,) = problems(sets=[f"stages.0.mix.lng=[{'1, ' * 200}]"])
    label, _, rest = sentence.partition("`: ")
    assert label.startswith("`overrides='stages.0.mix.lng=[1, 1") and label.endswith("…'")
    assert len(label) < 120 and rest.startswith("stages.0.mix.lng")


def test_problems_of_the_file_keep_their_line_next_to_those_of_overrides(problems):
    first, second = problems("lr: 1e-5", "lr: fast", sets=["stages.1.lr=slow"])
    assert first.startswith("small.yaml:18: stages.0.lr")
    assert second.startswith("`overrides='stages.1.lr=slow'`: stages.1.lr")
