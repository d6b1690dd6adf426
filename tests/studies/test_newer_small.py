"""The study of methods since the papers: its arms, their runs at a tiny size, and arms of averaged weights."""

import io
import json
import logging
import re
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
import zstandard
from safetensors.torch import load_file

import unspool
from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError
from unspool.evals.eval_request import check_request
from unspool.models.location import resolve_path
from unspool.recipe.paths import bundled_studies
from unspool.recipe.run import open_run
from unspool.recipe.run import run as run_recipe
from unspool.studies.load import StudyRun, load_study
from unspool.studies.merged_arms import merge_weights
from unspool.studies.raw_results import collect, read_runs
from unspool.studies.run import is_done, states
from unspool.studies.schema import Merge
from unspool.studies.shared_work import recipe_digest

K = 1 << 10
SCREEN = ("exact", "longce", "longfilter", "cope", "attention-scale", "merged")
SOURCES = ("books", "wiki", "papers", "textbooks")


@cache
def runs_of(name: str) -> list[StudyRun]:
    """Read only: all tests share them."""
    return load_study(name).runs


def recipes_of(name: str, seed: int = 0) -> dict[str, Any]:
    return {run.arm: run.loaded.recipe for run in runs_of(name) if run.seed == seed}


def test_runs_of_utk_small_are_not_repeated():
    ours, theirs = ({run.name: run for run in runs_of(name)} for name in ("newer-small", "utk-small"))
    for name in (f"{arm}-s{seed}" for arm in ("abf", "utk-80") for seed in range(3)):
        assert recipe_digest(ours[name].loaded) == recipe_digest(theirs[name].loaded)


@pytest.mark.parametrize("base", ["abf", "utk-80", "documents"])
def test_an_arm_adds_one_method_to_its_base(base):
    found = recipes_of("newer-small")
    plain, prefix = found[base], "" if base == "abf" else f"{base}-"
    changed: dict[str, set[str]] = {}
    for arm in (arm for arm in SCREEN if arm != "merged" and f"{prefix}{arm}" in found):
        recipe = found[f"{prefix}{arm}"]
        (one,), (other,) = recipe.stages, plain.stages
        differing = {key for key in type(one).model_fields if getattr(one, key) != getattr(other, key)}
        if recipe.datasets != plain.datasets:
            unscored = {"books": recipe.datasets["books"].model_copy(update={"score": None})}
            differing |= {"score"} if unscored == plain.datasets else {"datasets"}
        changed[arm] = differing
        assert (recipe.evals, recipe.sources, recipe.seed) == (plain.evals, plain.sources, plain.seed)
    methods = {"exact": {"loss"}, "longce": {"loss"}, "longfilter": {"score"}, "cope": {"rope"}}
    methods |= {"attention-scale": {"rope"}}
    assert changed == {arm: keys for arm, keys in methods.items() if arm in changed}
    assert set(changed) >= {"exact", "longce", "longfilter"}


def test_merged_arms_answer_the_questions_of_the_arm_that_they_average():
    found = recipes_of("newer-small")
    for merged, trained in (("merged", "abf"), ("utk-80-merged", "utk-80")):
        recipe = found[merged]
        assert not recipe.stages and not recipe.datasets and recipe.model.endswith(f"/{merged}-s0/model")
        plain, without = ([one.model_dump(exclude={"after"}) for one in found[arm].evals] for arm in (merged, trained))
        assert plain == without and {tuple(one.after) for one in recipe.evals} == {("base",)}


# Runs at a tiny size


def smaller(value: Any) -> Any:
    """Divide every size in K by 64: the context of 8K becomes 128."""
    if isinstance(value, dict):
        return {key: smaller(one) for key, one in value.items()}
    if isinstance(value, list):
        return [smaller(one) for one in value]
    size = re.fullmatch(r"(\d+)K", value) if isinstance(value, str) else None
    return int(size[1]) * K // 64 if size else value


@pytest.fixture(scope="module")
def study_file(tmp_path_factory) -> Path:
    """The bundled study with short rows and texts, one step per arm and two needles."""
    folder = tmp_path_factory.mktemp("newer")
    with (
        (files("unspool") / "assets/demo/heldout.jsonl.zst").open("rb") as packed,
        zstandard.ZstdDecompressor().stream_reader(packed) as lines,
    ):
        text = json.loads(io.TextIOWrapper(lines, encoding="utf-8").readline())["text"]
    for number, name in enumerate(SOURCES):
        size = 400 if name in ("wiki", "papers") else 3000
        texts = [text[start : start + size] for start in range(9000 * number, 9000 * (number + 1), size)]
        lines_of = "".join(json.dumps({"text": one}) + "\n" for one in texts)
        (folder / f"{name}.jsonl").write_text(lines_of, encoding="utf-8")
    data = smaller(yaml.safe_load(bundled_studies()["newer-small"].path.read_text(encoding="utf-8")))
    common = data["set"]
    common["model"] = "asset:tiny-base"
    common["device"] = "cpu"
    common["sources"] = {
        name: {"kind": "jsonl", "path": str(folder / f"{name}.jsonl")}
        for name in ("books", "wiki", "papers", "textbooks")
    }
    common["datasets"]["books"]["limit"] = K
    common["datasets"]["books"]["utk"]["min_split"] = 16
    common["stages"][0] |= {"tokens": K, "batch_tokens": K, "compile": False}
    common["evals"] = [{"suite": "niah", "lengths": [128], "samples": 2, "after": ["train"]}]
    for arm in data["arms"].values():
        for key, value in ((arm or {}).get("set") or {}).items():
            if key == "datasets.books":
                value["limit"] = K
            elif key == "datasets.books.utk":
                value["min_split"] = 16
    data |= {"seeds": [0], "compare": ["niah/128"]}
    (folder / "study.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return folder / "study.yaml"


@pytest.fixture(scope="module")
def screened(study_file) -> Path:
    out = study_file.parent / "out"
    result = unspool.study(study_file, only=["abf", *SCREEN, "documents-longfilter"], out=out)
    assert not result.failed
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_every_method_of_the_screen_runs_and_changes_the_model(screened):
    trained = {arm: weights(screened / f"{arm}-s0/stages/train/model") for arm in SCREEN if arm != "merged"}
    name = "model.layers.0.self_attn.q_proj.weight"
    plain = weights(screened / "abf-s0/stages/train/model")[name]
    assert all(not torch.equal(found[name], plain) for found in trained.values())
    rope = json.loads((screened / "cope-s0/stages/train/model/config.json").read_text())["rope_parameters"]
    assert rope["rope_type"] == "longrope"
    study = json.loads((screened / "study.json").read_text())
    states = {entry["arm"]: entry["state"] for entry in study["runs"]}
    finished = {arm for arm, state in states.items() if state == "finished"}
    assert finished == {"abf", *SCREEN, "documents-longfilter"}
    assert {entry["arm"] for entry in study["runs"] if entry["compared"]} >= {"abf", *SCREEN}


@pytest.mark.slow
def test_every_arm_runs(study_file, tmp_path):
    result = unspool.study(study_file, out=tmp_path / "out")
    assert not result.failed
    assert {entry["arm"] for entry in result.to_dict()["runs"] if entry["compared"]} == set(load_study(study_file).arms)


def test_documents_are_scored_by_the_recipes_model(screened):
    counts = read_manifest(screened / "longfilter-s0/datasets/books")["counts"]
    about = counts["sources"]["books"]["score"]
    assert 0 < about["documents_used"] < about["documents"] and about["mean_gain_used"] > about["mean_gain"]
    from unspool.recipe.document_scorer import ModelScorer

    inputs = read_manifest(screened / "longfilter-s0/document_scores/books")["inputs"]
    assert inputs["model"] == ModelScorer(resolve_path("asset:tiny-base", Path()), "cpu").digest
    several = read_manifest(screened / "documents-longfilter-s0/datasets/books")["counts"]["sources"]
    assert {name for name, about in several.items() if "score" in about} == {"books", "textbooks"}


def test_a_merged_arm_is_the_average_of_the_trained_arm_and_the_model(screened):
    base = weights(Path(resolve_path("asset:tiny-base", Path())))
    trained, merged = weights(screened / "abf-s0/stages/train/model"), weights(screened / "merged-s0/model")
    for name, tensor in trained.items():
        wanted = 0.9 * tensor.float() + 0.1 * base[name].float()
        torch.testing.assert_close(merged[name].float(), wanted, atol=1e-6, rtol=1e-5)
    config = json.loads((screened / "merged-s0/model/config.json").read_text())
    assert config["max_position_embeddings"] == 512, "the RoPE settings of the trained arm"


@pytest.fixture
def said(monkeypatch) -> list[str]:
    lines: list[str] = []
    for logger in ("unspool.studies.merged_arms", "unspool.evals.averaged_run"):
        monkeypatch.setattr(logging.getLogger(logger), "info", lines.append)
    return lines


def test_the_folder_of_a_merged_arm_is_its_model(screened, study_file, said, tmp_path):
    run = screened / "merged-s0"
    wanted = str(run / "model")
    assert check_request(run, ["niah"], [128], {}).model == wanted
    assert said == [f"{run}: using the averaged model in {wanted}"]
    recipe = load_study(study_file).runs[0].loaded
    assert recipe.model_path(str(run)) == recipe.model_path(wanted) == wanted
    assert recipe.model_path(str(screened / "abf-s0")) == str(screened / "abf-s0/stages/train/model")
    # A folder called `model` that `merge` did not write is no averaged run.
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text("stages: []")
    with pytest.raises(ConfigError, match="no stage of this run is trained yet"):
        recipe.model_path(str(tmp_path))


def test_a_merged_arm_is_announced_as_one_without_training(screened, study_file, said):
    study = load_study(study_file, out=screened)
    merge_weights(study, next(run for run in study.runs if run.name == "merged-s0"))
    assert said == ["merged-s0: no stage is trained; scores/base holds the scores of the averaged model"]


def test_the_run_of_a_merged_arm_names_the_averaged_model_and_no_stages(screened, study_file, caplog, tmp_path):
    study = load_study(study_file, out=screened)
    merged = next(run for run in study.runs if run.name == "merged-s0")
    recipe = merged.loaded.recipe.model_copy(update={"out": tmp_path / "again"})
    with caplog.at_level(logging.INFO, "unspool"):
        run_recipe(open_run(replace(merged.loaded, recipe=recipe)))

    said = [record.getMessage() for record in caplog.records]
    assert f"no stage to train, only scores of the averaged model on cpu, into {tmp_path / 'again'}" in said[0]
    assert any(line.startswith("scores of the averaged model (not built yet): ") for line in said)
    assert not any("0 stages" in line or "scores of base" in line for line in said)
    kept = json.loads((screened / "merged-s0/scores/base/summary.json").read_text())
    assert json.loads((tmp_path / "again/scores/base/summary.json").read_text())["model"] == kept["model"] == "base"


def test_a_finished_study_is_not_repeated(screened, study_file, monkeypatch):
    monkeypatch.setattr("unspool.studies.run._run_one", None)
    result = unspool.study(study_file, only=["abf", "merged"], out=screened)
    assert not result.failed


def test_merged_arms_are_collected_under_their_own_name(screened, tmp_path):
    assert {"merged-s0", "abf-s0"} <= set(collect(screened, tmp_path / "raw"))
    found = {run.arm: run for run in read_runs(tmp_path / "raw")}
    hashes = {arm: [one["hash"] for one in found[arm].samples] for arm in ("abf", "merged")}
    assert hashes["abf"] == hashes["merged"]
    assert "base" not in found


# Mistakes, and weights that change


@pytest.mark.parametrize(
    ("merge", "words"),
    [
        ({"merge": {"arm": "abff"}}, "no arm is called 'abff'"),
        ({"merge": {"arm": "abf", "weight": 2}}, "a share from 0 to 1, such as"),
        ({"merge": {"arm": "merged"}}, "arm merged is not trained either; name a trained arm"),
        ({"merge": {"arm": "abf"}, "set": {"stages.0.lr": 1}}, "cannot have 'set'; change arm abf instead"),
        ({"merge": {"arm": "abf"}, "seeds": [7]}, "arm abf has no run with seed 7"),
    ],
)
def test_a_mistake_in_merge_is_one_line(study_file, tmp_path, merge, words):
    data = yaml.safe_load(study_file.read_text(encoding="utf-8"))
    data["arms"]["other"] = merge
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        load_study(file)
    assert "\n" not in str(raised.value) and re.match(r".*study\.yaml:\d+: ", str(raised.value))


def test_a_merged_arm_needs_its_trained_arm(study_file, tmp_path):
    with pytest.raises(ConfigError, match="it averages the weights of abf-s0, which is not trained yet; add abf-s0"):
        unspool.study(study_file, only=["merged"], out=tmp_path / "out")


def test_a_merge_is_repeated_when_its_weights_have_changed(screened, study_file):
    study = load_study(study_file, out=screened)
    run = next(one for one in study.runs if one.name == "merged-s0")
    folder = screened / "merged-s0/model"
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert merge_weights(study, run) and (folder / "model.safetensors").stat().st_mtime_ns == before
    other = replace(run, merge=Merge(arm="abf", weight=0.5))
    assert merge_weights(study, other) and (folder / "model.safetensors").stat().st_mtime_ns > before
    assert not is_done(study, run), "its scores are of other weights"


def test_a_failed_merge_does_not_stop_the_other_arms(screened, study_file, monkeypatch):
    def fail(*args: Any, **options: Any) -> None:
        raise ConfigError("these two differ")

    monkeypatch.setattr("unspool.models.merge.merge", fail)
    study = load_study(study_file, out=screened)
    (run,) = (one for one in study.runs if one.name == "merged-s0")
    assert not merge_weights(study, replace(run, merge=Merge(arm="abf", weight=0.25)))
    failed = {one.run.name: one.error for one in states(study) if one.state == "failed"}
    assert failed == {"merged-s0": "these two differ"}
