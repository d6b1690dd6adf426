"""Every mistake in a recipe gives one sentence with its place and a remedy."""

import re
from pathlib import Path

import pytest

from unspool.core.errors import ConfigError
from unspool.recipe import load
from unspool.recipe.load import check_inputs, load_recipe

from .conftest import VALID

# What is wrong: (text in the valid recipe, its replacement, line, what the one sentence must say).
MISTAKES = {
    "misspelt required key": (
        "seq_len: 4K",
        "seq_length: 4K",
        7,
        ["datasets.long.seq_length", "unknown key", "did you mean 'seq_len'?"],
    ),
    "misspelt optional key": (
        "packing: single_doc",
        "pak: whole",
        7,
        ["datasets.long.pak", "did you mean 'packing'?", "utk"],
    ),
    "misspelt top-level key": ("evals:", "eval:", 26, ["eval: unknown key", "did you mean 'evals'?"]),
    "yaml 1.1 boolean as a key": ("    lr: 1e-5", "    lr: 1e-5\n    on: 3", 19, ["stages.0.on", "unknown key"]),
    "unknown kind": (
        "kind: jsonl",
        "kind: jsnol",
        4,
        ["sources.books.kind = jsnol", "did you mean 'jsonl'?", "parquet"],
    ),
    "unknown method": ("method: abf", "method: abff", 14, ["stages.0.rope.method = abff", "did you mean 'abf'?"]),
    "unknown suite": (
        "suite: niah",
        "suite: rulr",
        27,
        ["evals.0.suite = rulr", "did you mean 'ruler'?", "graphwalks, helmet, indirect_needle, infbench, key_value"],
    ),
    "missing kind": ("kind: jsonl, ", "", 4, ["sources.books.kind: missing", "jsonl, mds, parquet"]),
    "unknown choice": (
        "packing: single_doc",
        "packing: single_dok",
        7,
        ["datasets.long.packing = single_dok", "did you mean 'single_doc'?", "concat"],
    ),
    "wrong unit": ("tokens: 1M", "tokens: 64Q", 16, ["stages.0.tokens = 64Q", "unit 'Q'", "K, M, B and T"]),
    "not a size": ("seq_len: 1K", "seq_len: long", 10, ["datasets.short.seq_len = long", "64K"]),
    "size of zero": ("seq_len: 1K", "seq_len: 0", 10, ["datasets.short.seq_len = 0", "between 1"]),
    "endless size": ("seq_len: 1K", "seq_len: 1e999", 10, ["datasets.short.seq_len = inf", "64K"]),
    "missing required key": ("    lr: 1e-5\n", "", 12, ["stages.0.lr: missing", "a number above 0"]),
    "missing top-level key": ("model: org/name\n", "", 1, ["model: missing", "Hub id"]),
    "text for a number": ("lr: 1e-5", "lr: fast", 18, ["stages.0.lr = fast", "must be a number above 0"]),
    "boolean for a number": ("lr: 1e-5", "lr: true", 18, ["stages.0.lr = true", "must be a number above 0"]),
    "infinite number": ("lr: 1e-5", "lr: inf", 18, ["stages.0.lr = inf", "must be a number above 0"]),
    "number out of range": ("lr: 1e-5", "lr: -1", 18, ["stages.0.lr = -1", "must be a number above 0"]),
    "nothing for a number": ("lr: 1e-5", "lr:", 18, ["stages.0.lr is empty", "must be a number above 0"]),
    "number for text": ("name: small", "name: 64", 1, ["name = 64", "must be text", "'64'"]),
    "value for a mapping": ("{kind: text, path: wiki}", "wiki", 5, ["sources.wiki = wiki", "a mapping with kind"]),
    "value for a list": ("[1K, 4K]", "1K", 27, ["evals.0.lengths = 1K", "a list with at least one entry"]),
    "empty list": ("[1K, 4K]", "[]", 27, ["evals.0.lengths", "at least one entry"]),
    "number for a union": ("model: org/name", "model: 7", 2, ["model = 7", "must be text or a mapping"]),
    "part of a union": ("model: org/name", "model: {size: 4M, context_length: 256}", 2, ["model.tokenizer: missing"]),
    "key given twice": ("name: small", "name: small\nname: other", 2, ["name", "first given on line 1"]),
    "tag": ("name: small", "name: !!python/name:os.system x", 1, ["name", "tag", "not allowed"]),
    "class's own check": (
        "batch_tokens: 16K",
        "batch_tokens: 5K",
        17,
        ["stages.0.batch_tokens = 5K", "a multiple of context"],
    ),
    "wrong share": ("wiki: 0.7", "wiki: -1", 9, ["datasets.short.from", "every share must be above 0"]),
    "share that is no number": ("wiki: 0.7", "wiki: most", 9, ["datasets.short.from.wiki = most", "must be a number"]),
    "unknown source": ("from: books", "from: boks", 7, ["datasets.long.from", "'boks'", "did you mean 'books'?"]),
    "unknown source with a share": ("wiki: 0.7", "wki: 0.7", 9, ["datasets.short.from.wki", "did you mean 'wiki'?"]),
    "unknown rows": ("short: 0.4", "shrt: 0.4", 15, ["stages.0.mix.shrt", "did you mean 'short'?", "long, short"]),
    "rows that do not divide": (
        "seq_len: 1K",
        "seq_len: 3K",
        15,
        ["stages.0.mix.short", "3K", "4K", "datasets.short.seq_len"],
    ),
    "unknown validation rows": (
        "    mix: {long: 1}",
        "    mix: {long: 1}\n    validation: {dataset: shrot}",
        23,
        ["stages.1.validation.dataset", "did you mean 'short'?", "long, short"],
    ),
    "validation rows that are trained on": (
        "    mix: {long: 1}",
        "    mix: {long: 1}\n    validation: {dataset: long}",
        23,
        ["stages.1.validation.dataset = long", "is in the mix", "another source"],
    ),
    "validation rows longer than the context": (
        "    context_length: 4K\n    mix: {long: 1}",
        "    context_length: 2K\n    validation: {dataset: long}\n    mix: {short: 1}",
        22,
        ["stages.1.validation.dataset", "4K", "2K", "datasets.long.seq_len"],
    ),
    "unknown refit rows": (
        "    mix: {long: 1}",
        "    mix: {long: 1}\n    attention_distillation: {datasets: shrot, after: 8, lr: 1e-3}",
        23,
        ["stages.1.attention_distillation.datasets", "did you mean 'short'?", "long, short"],
    ),
    "unknown refit rows with a share": (
        "    mix: {long: 1}",
        "    mix: {long: 1}\n    attention_distillation: {datasets: {lng: 1}, after: 8, lr: 1e-3}",
        23,
        ["stages.1.attention_distillation.datasets.lng", "did you mean 'long'?"],
    ),
    "a refit batch that is no multiple of its rows": (
        "    mix: {long: 1}",
        "    mix: {long: 1}\n    attention_distillation: {datasets: short, after: 8, batch_tokens: 1500, lr: 1e-3}",
        23,
        ["stages.1.attention_distillation.batch_tokens = 1500", "multiple", "1K"],
    ),
    "a refit batch beside training that is no multiple of its rows": (
        "    mix: {long: 1}",
        "    mix: {long: 1}\n    attention_distillation: {datasets: short, during: 1, during_batch_tokens: 1500}",
        23,
        ["stages.1.attention_distillation.during_batch_tokens = 1500", "multiple", "1K"],
    ),
    "a refit before training without other positions": (
        "    mix: {long: 1}",
        "    mix: {long: 1}\n    attention_distillation: {datasets: short, before: 8, lr: 1e-3}",
        23,
        [
            "stages.1.attention_distillation.before = 8",
            "attention_distillation.before has no effect while rope is unchanged",
        ],
    ),
    "unknown tracker": (
        "    mix: {long: 1}",
        "    mix: {long: 1}\n    loggers: [tensorbord]",
        23,
        ["stages.1.loggers.0 = tensorbord", "did you mean 'tensorboard'?"],
    ),
    "unknown start": (
        "init: first",
        "init: frist",
        20,
        ["stages.1.init", "did you mean 'first'?", "previous, base"],
    ),
    "start from oneself": ("init: first", "init: second.run", 20, ["stages.1.init", "does not come before"]),
    "same stage name": ("name: second.run\n    init: first", "name: first", 19, ["stages.1.name", "already the name"]),
    "reserved stage name": (
        "name: second.run",
        "name: base",
        19,
        ["stages.1.name", "'base' is reserved", "another name"],
    ),
    "name that is no folder": ("name: small", "name: a/b", 1, ["name", "'a/b'", "cannot name a folder"]),
    "rows named like work": ("short:\n", "short.partial:\n", 8, ["datasets.short.partial", "cannot name a folder"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_in_one_sentence_with_its_line(mistake, problems):
    old, new, line, wanted = MISTAKES[mistake]
    found = problems(old, new)
    # A renamed entry also leaves what referred to it without a target: those are other lines.
    here = [sentence for sentence in found if sentence.startswith(f"small.yaml:{line}: ")]
    assert len(here) == 1, found
    assert all(part in here[0] for part in wanted), here[0]
    if mistake != "rows named like work":
        assert found == here
    assert here[0].endswith((".", "?"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_no_wording_of_the_validator_reaches_the_user(mistake, problems):
    text = "\n".join(problems(*MISTAKES[mistake][:2]))
    assert not re.search(r"Input should|Value error|Field required|Extra inputs|\[type=|https?://|pydantic", text)


def test_a_model_from_scratch_cannot_be_refitted_in_the_stage_it_begins_with(valid):
    refit = "    attention_distillation: {datasets: short, after: 8, lr: 1e-3}\n    mix:"
    text = VALID.replace("model: org/name", "model: {size: 4M, tokenizer: org/name, context_length: 256}")
    valid.write_text(text.replace("    mix:", refit))

    with pytest.raises(ConfigError) as error:
        load_recipe(valid)

    (sentence,) = str(error.value).split("\n")
    assert "stages.0.attention_distillation: a new model has no attention to preserve" in sentence


def test_refit_rows_that_skip_positions_or_do_not_divide_are_refused(valid):
    refit = "    attention_distillation: {datasets: {short: 1, odd: 1, far: 1}, after: 8, lr: 1e-3}\n    mix: {long: 1}"
    more = "  odd: {from: books, seq_len: 3K}\n  far: {from: books, seq_len: 4K, pose: {target: 16K}}\nstages:"
    valid.write_text(VALID.replace("    mix: {long: 1}", refit).replace("stages:", more))

    with pytest.raises(ConfigError) as error:
        load_recipe(valid)

    far, odd = sorted(str(error.value).split("\n"))
    assert "stages.1.attention_distillation.datasets.far" in far and "(pose)" in far
    assert "stages.1.attention_distillation.datasets.odd" in odd and "3K" in odd and "4K" in odd


def test_all_problems_are_reported_together_in_the_order_of_the_file(valid):
    broken = VALID.replace("kind: jsonl", "kind: jsnol").replace("packing: single_doc", "pak: whole")
    valid.write_text(broken.replace("short: 0.4", "shrt: 0.4").replace("lr: 2e-5", "lr: fast"))
    with pytest.raises(ConfigError) as error:
        load_recipe(valid)
    lines = [int(re.match(r".*?:(\d+):", sentence)[1]) for sentence in str(error.value).split("\n")]
    assert lines == [4, 7, 15, 25]


@pytest.mark.parametrize(
    ("text", "wanted"),
    {
        "": "the recipe is empty",
        "# only a comment\n": "the recipe is empty",
        "- a\n- b\n": "a recipe must be a mapping",
        "hello": "a recipe must be a mapping",
        "name: a\nmodel: b: c\n": "bad.yaml:2: not valid YAML: mapping values are not allowed here at column 9",
        "name: a\n\tmodel: b\n": "bad.yaml:2: not valid YAML",
        "name: [1, 2\n": "not valid YAML",
        "name: a\n---\nname: b\n": "bad.yaml:2: not valid YAML",
        "name: \x00": "not valid YAML",
        "name: *nobody\n": "bad.yaml:1: not valid YAML: found undefined alias",
        "name: &loop [*loop]\n": "anchors expand to too many values",
        "name: " + "[" * 5000: "nested too deeply",
    }.items(),
)
def test_a_file_that_is_not_a_recipe_is_refused_in_one_sentence(tmp_path, text, wanted):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_recipe(path)
    assert wanted in str(error.value)
    assert "\n" not in str(error.value)


def test_anchors_that_multiply_are_refused_before_they_fill_memory(tmp_path):
    path = tmp_path / "bad.yaml"
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    path.write_text("\n".join(["a0: &a0 [x]", *levels]))
    with pytest.raises(ConfigError, match="anchors expand"):
        load_recipe(path)


def test_a_wrong_recipe_path_is_refused_with_the_nearest_name(tmp_path, valid):
    for given, wanted in {
        "tine": "did you mean 'tiny'?",
        str(tmp_path / "smal.yaml"): "small.yaml'?",
        str(tmp_path / "elsewhere" / "x.yaml"): "does not exist",
        str(tmp_path): "is a folder",
        "~nobody-of-this-name/x.yaml": "does not exist",
        "x" * 5000: "neither a file nor a bundled recipe",
    }.items():
        with pytest.raises(ConfigError) as error:
            load_recipe(given)
        assert wanted in str(error.value)
        assert "\n" not in str(error.value)


def test_files_that_cannot_be_a_recipe_are_refused_before_parsing(tmp_path):
    binary, large = tmp_path / "binary", tmp_path / "large"
    binary.write_bytes(b"\xff\xfe\x00")
    large.write_bytes(b"a" * (2 << 20))
    for path, wanted in {binary: "is not UTF-8 text", large: "too large"}.items():
        with pytest.raises(ConfigError, match=wanted):
            load_recipe(path)


def test_numbers_of_yaml_1_2_are_numbers_and_words_of_yaml_1_1_are_words(valid):
    text = VALID.replace("lr: 1e-5", "lr: 1e-5\n    weight_decay: 0").replace("tokens: 1M", "tokens: 1e6")
    valid.write_text(text.replace("wiki: {", "no: {").replace("wiki: 0.7", "no: 0.7"))
    recipe = load_recipe(valid).recipe
    assert recipe.stages[0].lr == 1e-5
    assert recipe.stages[0].tokens == 1_000_000
    assert recipe.stages[0].rope.base == 8e6
    assert set(recipe.sources) == {"books", "no"}


def test_a_name_of_digits_works_as_a_key(valid):
    valid.write_text(VALID.replace("wiki: {", "2024: {").replace("wiki: 0.7", "2024: 0.7"))
    assert load_recipe(valid).recipe.datasets["short"].shares == {"books": 0.3, "2024": 0.7}


def test_the_loaded_recipe_knows_its_text_and_its_folder(valid):
    loaded = load_recipe(valid)
    assert loaded.text == VALID
    assert loaded.root == valid.parent
    assert loaded.recipe.out == Path("runs/small")


def write_inputs(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / "wiki").mkdir()


def test_inputs_next_to_the_recipe_are_found(valid):
    write_inputs(valid.parent)
    loaded = load_recipe(valid)
    check_inputs(loaded)
    assert loaded.path("wiki") == str(valid.parent / "wiki")


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "hf", "repos", "textbooks", "mds"])
def test_a_folder_and_a_pattern_are_found_for_every_kind_that_is_read(valid, kind):
    write_inputs(valid.parent)
    for path in ("wiki", "data/*"):
        check_inputs(load_recipe(valid, [f"sources.wiki.kind={kind}", f"sources.wiki.path={path}"]))


def test_a_dataset_of_the_hub_needs_no_file_here_and_a_path_does(valid):
    write_inputs(valid.parent)
    check_inputs(load_recipe(valid, ["sources.wiki={kind: hf, path: org/some-dataset}"]))
    for path in ("./nowhere", "~/no-such-folder", "/no/such/folder", "a/b/c", "data/*.parquet"):
        loaded = load_recipe(valid, [f"sources.wiki={{kind: hf, path: '{path}'}}"])
        with pytest.raises(ConfigError, match=r"sources\.wiki\.path = .*: no such file"):
            check_inputs(loaded)


def test_missing_inputs_are_reported_together_before_work_starts(valid, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe(valid, ["model=./nowhere", "evals.0.text=held/*.txt"])
    with pytest.raises(ConfigError) as error:
        check_inputs(loaded)
    first, second, third, fourth = str(error.value).split("\n")
    assert "small.yaml:4: sources.books.path = data/*.jsonl: no such file" in first
    assert "small.yaml:5: sources.wiki.path = wiki: no such file" in second
    assert third.startswith("`overrides='model=./nowhere'`: model = ./nowhere: no such file")
    assert fourth.startswith("`overrides='evals.0.text=held/*.txt'`: evals.0.text = held/*.txt: no such file")


def test_a_model_folder_must_hold_a_model_and_a_hub_id_is_left_alone(valid, tmp_path):
    write_inputs(valid.parent)
    (tmp_path / "folder").mkdir()
    for model, wanted in {str(tmp_path / "folder"): "holds no model", "a/b/c": "no such", "x.gguf": "no such"}.items():
        with pytest.raises(ConfigError, match=wanted):
            check_inputs(load_recipe(valid, [f"model={model}"]))
    (tmp_path / "folder" / "config.json").write_text("{}")
    for model in (str(tmp_path / "folder"), "gpt2", "org/name-1.5B"):
        check_inputs(load_recipe(valid, [f"model={model}"]))


def test_a_tracker_that_is_not_installed_is_refused_before_work_starts(valid, monkeypatch):
    write_inputs(valid.parent)
    loaded = load_recipe(valid, ["stages.1.loggers=[wandb]"])
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"stages.1.loggers: wandb is not installed; run pip install 'unspool\[track"):
        check_inputs(loaded)
    monkeypatch.setattr(load, "find_spec", lambda name: object())
    check_inputs(loaded)


@pytest.mark.parametrize("path", ["no/such/essays.txt", "such/essays.jsonl", "essays.jsonl.zst"])
def test_a_path_that_a_suite_should_read_is_looked_for(valid, path):
    write_inputs(valid.parent)
    loaded = load_recipe(valid, [f"evals.0={{suite: ruler, lengths: [4K], paths: {{haystack: {path}}}}}"])
    with pytest.raises(ConfigError, match=rf"evals\.0\.paths\.haystack = {re.escape(path)}: no such file"):
        check_inputs(loaded)


@pytest.mark.parametrize("path", ["hub:rajpurkar/squad_v2", "rajpurkar/squad_v2"])
def test_data_of_the_hub_is_left_to_the_suite(valid, path):
    write_inputs(valid.parent)
    check_inputs(load_recipe(valid, [f"evals.0={{suite: ruler, lengths: [4K], paths: {{qa_1: '{path}'}}}}"]))


def test_a_missing_chat_template_is_reported_with_its_line(valid):
    write_inputs(valid.parent)
    loaded = load_recipe(valid, ["sources.wiki.kind=chat", "sources.wiki.template=none.jinja"])
    with pytest.raises(ConfigError, match=r"sources.wiki.template = none.jinja: no such file"):
        check_inputs(loaded)
    (valid.parent / "none.jinja").write_text("")
    check_inputs(loaded)
