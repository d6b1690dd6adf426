"""`unspool study`: a whole study through the command; shared work, kills, failures, and the same bytes as `run`."""

import gzip
import json
import os
import random
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from factory import build_model, count_file_events, in_child_dying_at_file_event, save_folder, save_mini
from unspool.cli.main import build_app
from unspool.core.artifacts import file_digest
from unspool.core.lock import LOCK, lock_run
from unspool.models.location import ASSETS
from unspool.studies.arm_comparison import over_prompts
from unspool.studies.arm_scores import contributions_of
from unspool.studies.raw_results import collect, read_runs
from unspool.studies.raw_scores import find_measure, select_answers
from unspool.studies.two_level import arm_interval

STUDY = """\
name: mini-study
recipe: mini.yaml
set:
  model: model
  datasets: {long: {from: books, seq_len: 128}}
  stages: [{name: train, context_length: 128, mix: {long: 1}, tokens: 256, batch_tokens: 256, lr: 1e-3}]
  evals:
    - {suite: niah, lengths: [192], samples: 4, needles: 2, value: words, text: held-out.jsonl}
    - {suite: perplexity, length: 128, samples: 3, text: held-out.jsonl}
arms:
  plain:
  abf:
    set: {stages.train.rope: {method: abf, base: 1e5}}
  tangled:
    set: {datasets.long.utk: {min_split: 32}}
    seeds: [0]
"""
RUNS = ["plain-s0", "plain-s1", "abf-s0", "abf-s1", "tangled-s0"]


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    folder = save_mini(tmp_path_factory.mktemp("study")).parent
    # Questions are too long in bytes, so it takes the shipped tokenizer.
    tokenizer = [ASSETS / "tiny-base" / name for name in ("tokenizer.json", "tokenizer_config.json")]
    save_folder(folder / "model", build_model(vocab_size=4200))
    for file in tokenizer:
        shutil.copy(file, folder / "model")
    path = folder / "mini-study.yaml"
    path.write_text(STUDY)
    return path


@pytest.fixture(scope="module")
def whole(study) -> tuple[Path, Result]:
    """A study that nothing happened to."""
    out = study.parent / "whole"
    return out, invoke("study", str(study), "--out", str(out))


@pytest.fixture
def finished(whole, tmp_path) -> Path:
    """Copied, not linked: as if it came from another disk."""
    return Path(shutil.copytree(whole[0], tmp_path / "out"))


def invoke(*args: str) -> Result:
    return CliRunner().invoke(build_app(), list(args))


def results(out: Path) -> dict[str, bytes]:
    """Everything but what tells the time: weights, rows, documents, samples, summaries and their manifests."""
    kept = ("stages/*/model/*", "corpus/*/*", "datasets/*/*", "scores/*/*")
    return {str(path.relative_to(out)): path.read_bytes() for each in kept for path in out.glob(each) if path.is_file()}


def all_results(out: Path) -> dict[str, dict[str, bytes]]:
    return {name: results(out / name) for name in RUNS}


# The whole of it


def test_a_study_runs_every_arm_under_every_seed_and_ranks_them(whole):
    out, result = whole

    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*RUNS, "done", "recipes", "report.html", "shared", "study.json", "study.md"]
    )
    found = json.loads((out / "study.json").read_text())
    assert [entry["state"] for entry in found["runs"]] == ["finished"] * 5
    assert sorted(entry["rank"] for entry in found["ranking"])[0] == 1
    niah = next(table for table in found["measures"] if table["measure"] == "niah/192")
    assert [niah["arms"][arm]["n"] for arm in ("plain", "abf", "tangled")] == [8, 8, 4]
    assert niah["arms"]["tangled"]["deviation"] is None, "one seed has no deviation"
    abf = next(one for one in niah["comparisons"] if one["arm"] == "abf")
    assert (abf["against"], abf["common_seeds"], abf["n"], abf["prompts"]["n"]) == ("plain", [0, 1], 8, 4)
    assert "verdict" in result.stdout
    assert "too small to tell" in (out / "study.md").read_text()
    assert (out / "report.html").read_text().startswith("<!doctype html>")


def test_what_arms_have_in_common_is_made_once(whole):
    out, result = whole

    assert result.stderr.count("corpus books: tokenizing") == 1
    assert result.stderr.count("dataset long: packing") == 3, "two seeds, and the tangled rows of one"
    assert result.stderr.count("scores of base (not built yet)") == 2, "prompts depend on the seed"
    files = [next((out / name / "corpus" / "books").glob("*.arrow")) for name in RUNS]
    assert len({path.stat().st_ino for path in files}) == 1, "the same file, not five"


def test_a_run_is_what_unspool_run_makes_of_its_written_recipe(whole, tmp_path):
    out, _ = whole

    again = invoke("run", str(out / "recipes" / "tangled-s0.yaml"), "--set", f"out={tmp_path / 'out'}")

    assert again.exit_code == 0, again.output
    assert results(tmp_path / "out") == results(out / "tangled-s0")
    assert len(results(tmp_path / "out")) > 12


def test_a_run_can_be_moved_away_and_stays_whole(finished, tmp_path):
    before = results(finished / "abf-s0")
    shutil.move(finished / "abf-s0", tmp_path / "moved")
    shutil.rmtree(finished)
    assert results(tmp_path / "moved") == before
    assert invoke("report", str(tmp_path / "moved")).exit_code == 0


# Again


def test_collected_results_give_the_studys_numbers_without_its_folder(whole, tmp_path):
    out, _ = whole
    assert sorted(collect(out, tmp_path / "raw")) == sorted([*RUNS, "base-s0", "base-s1"])

    arms = {}
    for run in read_runs(tmp_path / "raw"):
        arms.setdefault(run.arm, {})[run.seed] = select_answers(run.samples)
    for table in json.loads((out / "study.json").read_text())["measures"]:
        if table["measure"] in ("score", "loss"):  # means of several measures
            continue
        measure = find_measure(table["measure"], arms["plain"][0])
        for arm, entry in table["arms"].items():
            assert arm_interval(arms[arm], measure).value == pytest.approx(entry["mean"])
        for one in table["comparisons"]:
            pairs = contributions_of(arms[one["arm"]], arms[one["against"]], measure)
            found = over_prompts(pairs, bounded=not measure.is_loss)
            assert (found.n, found.p, found.low) == pytest.approx([one["prompts"][key] for key in ("n", "p", "low")])

    facts = json.loads((tmp_path / "raw" / "abf-s1" / "run.json").read_text())
    (file,) = facts["inputs"]["sources"]["books"]
    assert file["sha256"] == file_digest(next(out.parent.rglob(Path(file["file"]).name)))
    texts = "".join(path.read_text() for path in (tmp_path / "raw").rglob("*.[yj]*[nl]"))
    assert str(out.parent) not in texts, "a path of this machine"
    log = gzip.decompress((tmp_path / "raw" / "abf-s1" / "log.jsonl.gz").read_bytes()).decode()
    assert json.loads(log.splitlines()[0])["stage"] == "train"
    before = {path: path.read_bytes() for path in (tmp_path / "raw").rglob("*") if path.is_file()}
    collect(out, tmp_path / "raw")
    assert {path: path.read_bytes() for path in before} == before, "equal results, equal bytes"


def test_a_second_time_nothing_is_run_and_json_stands_alone(study, finished):
    before = all_results(finished)

    result = invoke("study", str(study), "--out", str(finished), "--json")

    assert result.exit_code == 0
    assert json.loads(result.stdout)["baseline"] == "plain"
    assert result.stderr == "mini-study: 5 of 5 runs are finished\n"
    assert all_results(finished) == before


def test_a_changed_arm_is_run_again_and_no_other(study, finished):
    result = invoke("study", str(study), "--out", str(finished), "--set", "stages.train.lr=2e-3", "--only", "abf-s1")

    assert result.exit_code == 0
    assert "[1/1] abf-s1" in result.stderr
    assert "corpus books: up to date" in result.stderr
    states = {entry["run"]: entry["state"] for entry in json.loads((finished / "study.json").read_text())["runs"]}
    assert states == {name: "finished" if name == "abf-s1" else "begun" for name in RUNS}


@pytest.mark.parametrize("damage", ["text", "weights", "report"])
def test_a_run_whose_inputs_or_results_have_changed_is_not_done(damage, study, finished, tmp_path):
    folder = Path(shutil.copytree(study.parent, tmp_path / "copy", ignore=shutil.ignore_patterns("whole")))
    if damage == "text":
        books = folder / "books.jsonl"
        books.write_text(books.read_text().replace("a", "o"))
    elif damage == "weights":
        (finished / "plain-s1" / "stages" / "train" / "model" / "model.safetensors").unlink()
    else:
        (finished / "plain-s1" / "report.html").unlink()

    result = invoke("study", str(folder / study.name), "--out", str(finished), "--dry-run", "--json")

    waiting = [entry["run"] for entry in json.loads(result.stdout)["runs"] if entry["will_run"]]
    # The copy's model is another path, so that its runs are not taken for done; the original's are.
    again = invoke("study", str(study), "--out", str(finished), "--dry-run", "--json")
    by_study = [entry["run"] for entry in json.loads(again.stdout)["runs"] if entry["will_run"]]
    assert waiting == RUNS
    assert by_study == ([] if damage == "text" else ["plain-s1"])


def test_kills_at_several_moments_end_with_the_same_results(study, whole, tmp_path):
    chosen = ["--only", "abf-s0", "--only", "tangled"]

    def run(out: Path) -> None:
        assert invoke("study", str(study), "--out", str(out), *chosen).exit_code == 0

    events = count_file_events(lambda: run(tmp_path / "counted"), tmp_path / "events")
    rng = random.Random(0)
    out = tmp_path / "out"
    for part in range(3):
        number = int((part + rng.random()) * events / 5) + 1
        assert in_child_dying_at_file_event(lambda: run(out), number) == -9, "nothing was killed"

    run(out)

    for name in ("abf-s0", "tangled-s0"):
        # Manifests of scores name the text by its path, and this folder lies elsewhere.
        both = [results(folder / name) for folder in (out, whole[0])]
        for found in both:
            del found["scores/base/manifest.json"], found["scores/train/manifest.json"]
        assert both[0] == both[1]
    leftovers = [path for path in out.rglob("*") if path.suffix in (".partial", ".work", ".old", ".tmp")]
    assert leftovers == []


# Failures


def test_an_arm_that_fails_does_not_stop_the_others_and_is_tried_again(study, tmp_path):
    folder = Path(shutil.copytree(study.parent, tmp_path / "copy", ignore=shutil.ignore_patterns("whole")))
    broken = folder / "broken.jsonl"
    # Nobody knows before all of it is read: the first record is good.
    broken.write_text((folder / "books.jsonl").read_text().splitlines()[0] + "\nno JSON\n")
    path = folder / study.name
    path.write_text(STUDY.replace("  plain:\n", "  broken: {set: {sources.books.path: broken.jsonl}}\n  plain:\n"))
    args = ["study", str(path), "--out", str(tmp_path / "out"), "--only", "broken-s0", "--only", "plain-s0"]

    failed = invoke(*args)

    assert failed.exit_code == 1
    assert "broken-s0 failed: " in failed.stderr
    assert "broken-s0: failed: " in failed.stdout
    found = json.loads((tmp_path / "out" / "study.json").read_text())
    states = {entry["run"]: (entry["state"], entry["compared"]) for entry in found["runs"]}
    assert states["broken-s0"] == ("failed", False)
    assert states["plain-s0"] == ("finished", True)
    assert found["measures"][0]["arms"]["broken"]["mean"] is None, "missing stays missing"
    assert [entry["rank"] for entry in found["ranking"] if entry["arm"] == "broken"] == [None]
    assert "Traceback" in json.loads((tmp_path / "out" / "failures" / "broken-s0.json").read_text())["traceback"]

    shutil.copy(folder / "books.jsonl", broken)
    mended = invoke(*args)
    assert mended.exit_code == 0, mended.output
    assert "[1/1] broken-s0" in mended.stderr, "what is finished is not run again"
    assert not (tmp_path / "out" / "failures" / "broken-s0.json").exists()


def test_a_run_that_another_process_is_at_is_passed_over(study, tmp_path):
    out = tmp_path / "out"
    with lock_run(out / "plain-s0"):
        result = invoke("study", str(study), "--out", str(out), "--only", "plain-s0")
        assert [path.name for path in (out / "plain-s0").iterdir()] == [LOCK]
    assert result.exit_code == 0
    assert f"plain-s0: skipping, because {out / 'plain-s0'} is in use: process {os.getpid()} on " in result.stderr
    assert json.loads((out / "study.json").read_text())["runs"][0]["state"] == "running elsewhere"


# Without running


def test_a_dry_run_shows_what_would_be_made_and_writes_nothing(study, tmp_path):
    out = tmp_path / "out"

    shown = invoke("study", str(study), "--out", str(out), "--dry-run")
    plan = json.loads(invoke("study", str(study), "--out", str(out), "--dry-run", "--json").stdout)

    assert shown.exit_code == 0
    assert "5 of 5 runs to do, 1,280 tokens to train" in shown.stdout or "1.28K tokens" in shown.stdout, shown.stdout
    assert plan["to_run"] == {"runs": 5, "tokens": 5 * 256}
    assert {entry["folder"]: len(entry["runs"]) for entry in plan["shared"]}["corpus/books"] == 5
    assert not out.exists()


def test_what_was_run_elsewhere_is_compared_without_its_data(study, finished, tmp_path):
    """Only the folders of two runs came back, made by `unspool run`; the files they were made of are not here."""
    out = tmp_path / "back"
    out.mkdir()
    for name in ("plain-s0", "abf-s0"):
        shutil.copytree(finished / name, out / name)
    folder = Path(shutil.copytree(study.parent, tmp_path / "copy", ignore=shutil.ignore_patterns("whole")))
    (folder / "books.jsonl").unlink()

    result = invoke("study", str(folder / study.name), "--out", str(out), "--report-only", "--json")

    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [entry["run"] for entry in found["runs"] if entry["compared"]] == ["plain-s0", "abf-s0"]
    changed = invoke("study", str(study), "--out", str(out), "--report-only", "--json", "--set", "stages.0.lr=2e-3")
    assert "plain-s0: recipe.yaml differs from the study; skipping" in changed.stderr
    assert not any(entry["compared"] for entry in json.loads(changed.stdout)["runs"])


# Errors: nothing is written


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--set", "sources.books.path=none.jsonl"], "error: arm plain: "),
        (
            ["--set", "stages.0.lr=fast"],
            "error: --set stages.0.lr=fast: arm plain: stages.0.lr = fast: must be a number",
        ),
        (["--only", "tangle"], "error: --only tangle: no arm is called 'tangle'; did you mean 'tangled'?"),
        (["--set", "device=cuda"], "device: cuda is not available here"),
    ],
)
def test_mistakes_are_one_sentence_and_nothing_is_written(args, wanted, study, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    result = invoke("study", str(study), "--out", str(tmp_path / "out"), *args)

    assert result.exit_code == 2, result.output
    assert wanted in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert not (tmp_path / "out").exists()


def test_a_recipe_given_as_a_study_is_named_as_one(study):
    result = invoke("study", str(study.parent / "mini.yaml"))
    assert result.exit_code == 2
    path = study.parent / "mini.yaml"
    assert result.stderr == f"error: {path} is a recipe, not a study; run it with `unspool run {path}`.\n"
