"""A study file: its keys, the recipes of its arms, and one sentence for every mistake."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.errors import ConfigError
from unspool.recipe.load import load_recipe
from unspool.recipe.paths import bundled_studies
from unspool.studies.load import check_study_inputs, load_study, pick_runs
from unspool.studies.shared_work import load_written, recipe_digest, shared_folders, write_recipes

STUDY = """\
name: rates
recipe: small.yaml
seeds: [0, 1]
baseline: plain
arms:
  plain:
  faster:
    set: {stages.first.lr: 1e-4}
  longer:
    set:
      stages.0.tokens: 2M
      datasets.long: {from: books, seq_len: 4K, packing: concat}
    seeds: [3]
    stage: first
compare: [niah/4K]
"""


@pytest.fixture
def study(valid: Path) -> Path:
    path = valid.parent / "rates.yaml"
    path.write_text(STUDY)
    return path


@pytest.fixture
def mistakes(study: Path):
    """The sentences for the study with `old` replaced by `new`, the file's folder cut off."""

    def find(old: str, new: str, **options) -> list[str]:
        assert old in STUDY
        study.write_text(STUDY.replace(old, new, 1))
        with pytest.raises(ConfigError) as error:
            load_study(study, **options)
        return str(error.value).replace(f"{study.parent}/", "").split("\n")

    return find


def test_arms_are_the_recipe_with_changes_under_every_seed(study):
    found = load_study(study)

    assert [run.name for run in found.runs] == ["plain-s0", "plain-s1", "faster-s0", "faster-s1", "longer-s3"]
    recipes = {run.name: run.loaded.recipe for run in found.runs}
    assert recipes["plain-s1"].seed == 1
    assert recipes["plain-s1"].out == Path("runs/rates/plain-s1")
    assert [recipes[name].stages[0].lr for name in ("plain-s0", "faster-s0")] == [1e-5, 1e-4]
    assert recipes["longer-s3"].datasets["long"].packing == "concat"
    assert [run.stage for run in found.runs] == ["second.run"] * 4 + ["first"]
    assert found.against == {"plain": [], "faster": ["plain"], "longer": ["plain"]}


def test_defaults_are_two_seeds_and_the_first_arm_as_baseline(study):
    study.write_text("name: rates\nrecipe: small.yaml\narms: {one: , two: }\n")
    found = load_study(study)
    assert [run.name for run in found.runs] == ["one-s0", "one-s1", "two-s0", "two-s1"]
    assert found.baseline == "one"


def test_a_grid_is_the_product_of_its_values_with_the_arms(study):
    study.write_text(
        "name: rates\nrecipe: small.yaml\nseeds: [0]\narms: {a: , b: {set: {stages.0.tokens: 2M}}}\n"
        "grid:\n  stages.0.lr: [1e-4, 3e-4]\n  stages.0.mix: {only: {long: 1}, both: {long: 1, short: 1}}\n"
    )
    found = load_study(study)
    assert found.arms == [
        f"{arm}-lr-{lr}-{mix}" for arm in "ab" for lr in ("0.0001", "0.0003") for mix in ("only", "both")
    ]
    recipe = found.runs[-2].loaded.recipe
    assert (recipe.stages[0].lr, recipe.stages[0].mix) == (3e-4, {"long": 1.0})


def test_a_grid_can_sweep_a_share_that_begins_at_none(study):
    study.write_text(
        "name: rates\nrecipe: small.yaml\nseeds: [0]\n"
        "grid: {datasets.long.replace: {none: null, some: {with: wiki, share: 0.1}}}\n"
    )
    found = load_study(study)
    assert found.arms == ["none", "some"]
    assert [run.loaded.recipe.datasets["long"].shares for run in found.runs] == [
        {"books": 1.0},
        pytest.approx({"books": 0.9, "wiki": 0.1}),
    ]


def test_seeds_replace_those_of_every_arm(study):
    found = load_study(study, seeds=[4, 7])
    assert [run.name for run in found.runs] == [f"{arm}-s{seed}" for arm in found.arms for seed in (4, 7)]
    assert [run.loaded.recipe.seed for run in found.runs[:2]] == [4, 7]
    with pytest.raises(ConfigError, match=r"^seeds = \[4, 4\]: must be a list of different whole numbers from 0"):
        load_study(study, seeds=[4, 4])


@pytest.mark.parametrize("given", ["3,x", "", "0.5"])
def test_seeds_on_the_command_line_are_whole_numbers(given):
    done = CliRunner().invoke(build_app(), ["study", "tiny", "--seeds", given, "--dry-run"])
    assert done.exit_code == 2
    assert done.stderr == f"error: --seeds {given}: write whole numbers with commas, such as --seeds 3,4,5.\n"


def test_a_plan_lists_the_runs_of_other_seeds():
    done = CliRunner().invoke(build_app(), ["study", "tiny", "--only", "utk", "--seeds", "3,4", "--dry-run", "--json"])
    planned = json.loads(done.stdout)["runs"]
    assert [run["run"] for run in planned if run["run"].startswith("utk-s")] == ["utk-s3", "utk-s4"]


def test_what_is_set_on_the_command_line_holds_for_every_arm(study):
    found = load_study(study, overrides=["stages.0.lr=2e-5"], out=study.parent / "elsewhere")
    assert {run.loaded.recipe.stages[0].lr for run in found.runs} == {2e-5}
    assert found.run_dir(found.runs[0]) == study.parent / "elsewhere" / "plain-s0"


def test_runs_are_chosen_by_arm_or_by_name(study):
    found = load_study(study)
    assert [run.name for run in pick_runs(found, ["faster", "plain-s1"])] == ["plain-s1", "faster-s0", "faster-s1"]
    with pytest.raises(ConfigError, match=r"`only='fastr'`: no arm is called 'fastr'; did you mean 'faster'\?"):
        pick_runs(found, ["fastr"])


# Mistakes: where, which arm, what is allowed


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("baseline: plain", "baselin: plain", "rates.yaml:4: baselin: unknown key; did you mean 'baseline'? Allowed"),
        (
            "baseline: plain",
            "baseline: plane",
            "rates.yaml:4: baseline: no arm is called 'plane'; did you mean 'plain'?",
        ),
        ("seeds: [3]", "seeds: [3, 3]", "rates.yaml:13: arms.longer.seeds: must be a list of different whole numbers"),
        ("seeds: [3]", "sets: [3]", "rates.yaml:13: arms.longer.sets: unknown key; did you mean 'set'?"),
        ("  faster:", "  fas/ter:", "rates.yaml:7: arms.fas/ter: 'fas/ter' cannot name a folder"),
        (
            "stages.first.lr: 1e-4",
            "stages.first.lr: fast",
            "rates.yaml:8: arm faster: stages.0.lr = fast: must be a number",
        ),
        (
            "stages.first.lr",
            "stages.frist.lr",
            "rates.yaml:8: arm faster: stages has no 'frist'; did you mean 'first'?",
        ),
        (
            "{stages.first.lr: 1e-4}",
            "{seed: 4}",
            "rates.yaml:8: arms.faster.set.seed: cannot be set by an arm; use seeds.",
        ),
        (
            "from: books,",
            "from: book,",
            "rates.yaml:12: arm longer: datasets.long.from: source 'book' is not known; did you",
        ),
        (
            "stage: first",
            "stage: fist",
            "rates.yaml:14: arm longer: stage = fist: not a stage of its recipe; did you mean",
        ),
        (
            "niah/4K",
            "niah/8K",
            "rates.yaml:15: compare.0: 'niah/8K' is not measured by the recipe's evals; did you mean",
        ),
        ("small.yaml", "smal.yaml", "rates.yaml:2: recipe: recipe file smal.yaml does not exist"),
        ("recipe: small.yaml", "", "rates.yaml:1: recipe: missing; write a recipe's name or file."),
        ("  faster:\n", "  plain:\n", "rates.yaml:7: arms.plain: duplicate key, first given on line 6"),
    ],
)
def test_every_mistake_is_one_sentence_with_its_line(mistakes, old, new, wanted):
    (line,) = mistakes(old, new)
    assert line.startswith(wanted), line


def test_several_mistakes_are_reported_together(mistakes):
    lines = mistakes("stages.first.lr: 1e-4", "stages.first.lr: -1, stages.0.max_grad_norm: 0, evals.0.samples: 0")
    assert len(lines) == 3
    assert all(line.startswith("rates.yaml:8: arm faster: ") for line in lines)


def test_a_problem_of_every_arm_is_reported_once(mistakes):
    lines = mistakes("seeds: [0, 1]", "seeds: [0, 1]\nset: {stages.0.lr: quick}")
    assert len(lines) == 1, lines
    assert lines[0].startswith("rates.yaml:4: arm plain: stages.0.lr = quick:")


def test_values_of_a_grid_that_make_no_name_are_refused(mistakes):
    lines = mistakes("compare: [niah/4K]", "grid: {stages.0.lr: [0.1, 0.10000001]}")
    assert any("two arms would be called 'plain-lr-0.1'; give the values of the grid names" in line for line in lines)
    assert any("baseline: no arm is called 'plain'" in line for line in lines)


def test_missing_files_are_reported_with_the_arm(study):
    with pytest.raises(ConfigError) as error:
        check_study_inputs(load_study(study).runs)
    lines = str(error.value).splitlines()
    assert len(lines) == 2, "books and wiki, each once"
    assert all(line.startswith("arm plain: ") and "no such file or folder" in line for line in lines)


def test_an_unknown_study_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'tinny' is neither a file nor a bundled study; did you mean 'tiny'\?"):
        load_study("tinny")


# Written recipes


def test_a_written_recipe_is_equal_and_finds_the_same_files(study, monkeypatch, tmp_path):
    (study.parent / "data").mkdir()
    (study.parent / "data" / "books.jsonl").write_text('{"text": "a"}\n')
    found = load_study(study, out=tmp_path / "runs")
    write_recipes(found)
    monkeypatch.chdir(tmp_path)

    for run in found.runs:
        written = load_written(found, run)
        assert Path(written.path(written.recipe.sources["books"].path)).resolve() == study.parent / "data" / "*.jsonl"
        assert recipe_digest(written, paths=False) == recipe_digest(run.loaded, paths=False)
        assert shared_folders(written) == shared_folders(run.loaded)


def test_recipes_of_arms_that_are_gone_are_gone(study, tmp_path):
    write_recipes(load_study(study, out=tmp_path / "runs"))
    study.write_text(STUDY.replace("  faster:", "  other:"))
    write_recipes(load_study(study, out=tmp_path / "runs"))
    names = sorted(path.stem for path in (tmp_path / "runs" / "recipes").iterdir())
    assert names == ["longer-s3", "other-s0", "other-s1", "plain-s0", "plain-s1"]


# What is shared


def test_arms_share_what_has_the_same_inputs_and_nothing_else(study):
    folders = {run.name: shared_folders(run.loaded) for run in load_study(study).runs}

    assert folders["plain-s0"] == folders["faster-s0"], "the learning rate changes no data"
    assert folders["plain-s0"]["corpus/books"] == folders["plain-s1"]["corpus/books"], "no seed in a corpus of files"
    for folder in ("datasets/long", "datasets/short", "scores/base"):
        assert folders["plain-s0"][folder] != folders["plain-s1"][folder], "these depend on the seed"
    assert folders["longer-s3"]["corpus/wiki"] == folders["plain-s0"]["corpus/wiki"]
    assert folders["longer-s3"]["datasets/long"] != folders["plain-s0"]["datasets/long"]


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ("sources.books.limit=1M", {"corpus/books", "datasets/long", "datasets/short"}),
        ("datasets.long.limit=1M", {"datasets/long"}),
        ("evals.0.samples=3", {"scores/base"}),
        ("model=org/other", {"corpus/books", "corpus/wiki", "datasets/long", "datasets/short", "scores/base"}),
        ("stages.0.rope.base=4e6", set()),
    ],
)
def test_a_key_depends_on_everything_the_content_depends_on(valid, change, changed):
    before, after = shared_folders(load_recipe(valid)), shared_folders(load_recipe(valid, [change]))
    assert {folder for folder in before if before[folder] != after[folder]} == changed


# Bundled studies


def test_bundled_studies_are_valid_and_say_what_they_are():
    found = bundled_studies()
    assert {"smollm2-32k", "tiny"} <= set(found)
    for name, entry in found.items():
        assert entry.summary
        assert load_study(name).runs


def test_the_smollm2_study_has_the_arms_and_controls_of_the_papers():
    found = load_study("smollm2-32k")
    assert found.arms == ["ct", "abf", "documents", "cip2", "utk", "harpe", "harpe-shared"]
    seeds = {arm: [run.seed for run in found.runs if run.arm == arm] for arm in found.arms}
    assert seeds == {arm: [0, 1] if arm in ("abf", "utk") else [0] for arm in found.arms}
    recipes = {run.arm: run.loaded.recipe for run in found.runs}
    assert len({recipe.stages[0].tokens for recipe in recipes.values()}) == 1, "equal tokens"
    assert recipes["ct"].stages[0].rope.method == "unchanged"
    assert recipes["harpe-shared"].stages[0].rope.shared
    assert "harpe-shared" in found.against["harpe"]


# A paper's numbers

PAPER = """\
paper:
  source: A paper, Table 1
  scale: 8B
  columns: {needle: niah/4K, both: [niah/4K, niah], other: null}
  numbers: {plain: [90.1, 80, null]}
  others: {untouched: [1, 2, 3]}
"""


def test_a_study_can_hold_a_papers_numbers(study):
    study.write_text(STUDY + PAPER)
    paper = load_study(study).paper
    assert paper is not None
    assert paper.columns == {"needle": ["niah/4K"], "both": ["niah/4K", "niah"], "other": []}
    assert paper.numbers == {"plain": [90.1, 80, None]} and paper.others == {"untouched": [1, 2, 3]}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "numbers: {plain",
            "numbers: {plan",
            "paper.numbers.plan: no arm is called 'plan'; move rows without an arm",
        ),
        ("[90.1, 80, null]", "[90.1, 80]", "paper.numbers.plain: must be a list of 3 numbers, one per column"),
        ("[90.1, 80, null]", "[90.1, 80, a]", "paper.numbers.plain: must be a list of 3 numbers, one per column"),
        ("[1, 2, 3]", "3", "paper.others.untouched: must be a list of 3 numbers"),
        ("scale: 8B", "size: 8B", "paper.size: unknown key"),
        ("scale: 8B", "note: 8B", "paper.scale: missing; write the paper and table"),
        ("other: null", "other: 3", "paper.columns: must be a mapping from the paper's columns to measures"),
    ],
)
def test_a_mistake_in_a_papers_numbers_is_reported_with_its_place(study, old, new, said):
    assert old in PAPER
    study.write_text(STUDY + PAPER.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        load_study(study)
    assert said in str(error.value)


def test_measures_that_other_evals_do_not_have_are_no_longer_compared(study):
    found = load_study(study, overrides=["evals=[{suite: niah, lengths: [1K], samples: 2}]"])
    assert found.compare is None


def test_the_digest_of_a_recipe_is_that_from_before_stages_had_a_schedule(monkeypatch):
    monkeypatch.setattr("unspool.studies.shared_work.digest", lambda plain: plain)
    found = {
        schedule: recipe_digest(load_recipe("tiny", {"stages.0.schedule": schedule}))
        for schedule in ("cosine", "linear")
    }

    assert not any("schedule" in stage for stage in found["cosine"]["stages"])
    assert found["linear"]["stages"][0].pop("schedule") == "linear"
    assert found["linear"] == found["cosine"] == recipe_digest(load_recipe("tiny"))
