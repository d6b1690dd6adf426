"""The studies of docs/results/plan.md: arms differ only in what they are named after, and primary cells are large."""

import json
import re
from pathlib import Path

import pytest

from unspool.core.artifacts import seal
from unspool.evals.suites.needle_wordings import WORDINGS
from unspool.rope.tables import RopeShape
from unspool.studies.arm_scores import read_answers
from unspool.studies.load import load_study

K, M = 1 << 10, 1 << 20
NAMES = ("utk-small", "harpe-small", "prolong-small")
PRIMARY = {
    "utk-small": ["abf", "utk-80", "cip-2"],
    "harpe-small": ["shared", "uniform-descending"],
    "prolong-small": [],
}
PLAN = Path(__file__).parents[2] / "docs" / "results" / "plan.md"


def recipes_of(name: str):
    return {run.arm: run.loaded.recipe for run in load_study(name).runs}


@pytest.mark.parametrize("name", NAMES)
def test_primary_arms_have_three_seeds_and_a_hundred_questions_in_both_halves_of_the_wordings(name):
    study = load_study(name)
    seeds = {arm: [run.seed for run in study.runs if run.arm == arm] for arm in study.arms}
    assert seeds == {arm: [0, 1, 2] if arm in PRIMARY[name] else [0] for arm in study.arms}
    needles = {
        length: entry
        for entry in study.runs[0].loaded.recipe.evals
        if entry.suite == "niah"
        for length in entry.lengths
        if length > 8 * K
    }
    for length, entry in needles.items():
        held_back = [name for name in entry.wordings if WORDINGS[name].set != "development"]
        per_wording = entry.samples / len(entry.wordings)
        assert per_wording * (len(entry.wordings) - len(held_back)) >= 100
        assert (per_wording * len(held_back) >= 100) == (length == 32 * K)
        assert entry.samples % (entry.depths * len(entry.wordings) * len(entry.distractors)) == 0, "cells are equal"
        assert (entry.placement, entry.distractors) == ("strata", [0, 3, 10])
    assert set(needles) == {16 * K, 32 * K}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_trained_on_that_is_scored(name):
    for recipe in recipes_of(name).values():
        read = {source.path for source in recipe.sources.values() if hasattr(source, "path")}
        scored = {entry.text for entry in recipe.evals if getattr(entry, "text", None)}
        scored |= {path for entry in recipe.evals for path in getattr(entry, "paths", {}).values()}
        assert read.isdisjoint(scored)


def test_arms_of_utk_differ_in_their_rows_or_their_positions_only():
    found = recipes_of("utk-small")
    (abf,) = found["abf"].stages
    for arm, recipe in found.items():
        (stage,) = recipe.stages
        other = {"rope"} if arm == "ct" else {"attention"} if arm in ("mixed", "upsampling") else set()
        assert stage.model_dump(exclude=other) == abf.model_dump(exclude=other), arm
        assert recipe.evals == found["abf"].evals
    rows = {arm: recipe.datasets["books"] for arm, recipe in found.items()}
    masked = {arm for arm, dataset in rows.items() if (dataset.seq_len, dataset.packing) == (8 * K, "single_doc")}
    assert masked == {"attn-mask"}
    assert rows["cip-2"].cip.split == "random", "as in the paper"
    assert [rows[f"utk-{percent}"].utk.probability for percent in (80, 30)] == [0.8, 0.3]
    assert not rows["utk-80-disrupted"].utk.preserve_order and not rows["utk-80-no-backtrace"].utk.backtrace
    assert rows["mixed"].shares == rows["upsampling"].shares == rows["mixed-utk"].shares


def test_arms_of_fp8_differ_in_precision_only_and_train_as_the_arm_abf():
    found, (abf,) = recipes_of("fp8-small"), recipes_of("utk-small")["abf"].stages
    assert {arm: recipe.stages[0].precision for arm, recipe in found.items()} == {"bf16": "bf16", "fp8": "fp8"}
    assert [(run.arm, run.seed) for run in load_study("fp8-small").runs] == [
        (arm, seed) for arm in ("bf16", "fp8") for seed in (0, 1, 2)
    ]
    books = recipes_of("utk-small")["abf"].datasets["books"]
    for recipe in found.values():
        assert [stage.model_dump(exclude={"precision"}) for stage in recipe.stages] == [
            abf.model_dump(exclude={"precision"})
        ]
        assert recipe.datasets["books"] == books and recipe.evals == found["bf16"].evals


def test_harpe_is_compared_with_one_base_at_the_mean_and_with_the_largest():
    found = recipes_of("harpe-small")
    assert {sum(stage.tokens for stage in recipe.stages) // (128 * K) for recipe in found.values()} <= {39, 40}
    shape = RopeShape(rotary_dim=64, num_kv_heads=3, base=1e5, original_len=8 * K, max_positions=8 * K)
    ropes = {arm: recipe.stages[-1].rope for arm, recipe in found.items()}
    bases = ropes["uniform-descending"].head_bases(shape, 32 * K)
    assert bases.tolist() == [2.8e6, 1.6e6, 0.4e6]
    assert ropes["uniform-ascending"].head_bases(shape, 32 * K).tolist() == bases.tolist()[::-1]
    assert ropes["shared"].resolve(shape, 32 * K).parameters["rope_theta"] == pytest.approx(bases.mean())
    assert ropes["abf-1"].base == bases.max()
    assert found["utk-shared"].datasets == found["utk-harpe"].datasets != found["shared"].datasets


def test_arms_of_prolong_change_one_thing_each():
    found = recipes_of("prolong-small")
    long, sft = found["long-60"].stages
    assert 1 - long.mix["short"] == pytest.approx(0.6)
    assert {arm: round(1 - found[f"long-{arm}"].stages[0].mix.get("short", 0), 2) for arm in (0, 60, 100)} == {
        0: 0,
        60: 0.6,
        100: 1,
    }
    assert found["no-masks"].stages[0].attention == "full" and long.attention == sft.attention == "intra_document"
    assert [found[f"base-{base}"].stages[0].rope.base for base in ("1e5", "4.2e5")] == [1e5, 4.2e5]
    assert [found[f"synth-{share}"].stages[-1].mix["long"] for share in (10, 50)] == [0.1, 0.5]
    more = {arm: sum(stage.tokens for stage in found[arm].stages) for arm in ("more-32k", "more-64k")}
    assert len(set(more.values())) == 1, "equal tokens"
    assert {recipe.stages[-1].name for recipe in found.values()} == {"sft"}, "scored after SFT"


def test_the_recipe_has_prolongs_mixes_and_doubled_bases():
    from unspool.recipe.load import load_recipe

    small, paper = (load_recipe(name).recipe for name in ("prolong-small", "prolong"))
    renamed = {"32k": "64k", "128k": "512k"}
    for stage, theirs in zip(small.stages, paper.stages, strict=True):
        mix = {re.sub("32k|128k", lambda found: renamed[found[0]], name): share for name, share in stage.mix.items()}
        assert mix == theirs.mix
        same = (
            "attention",
            "min_lr_ratio",
            "warmup_ratio",
            "optimizer_state",
            "betas",
            "weight_decay",
            "max_grad_norm",
        )
        assert [getattr(stage, key) for key in same] == [getattr(theirs, key) for key in same]
    # Head size 64, original base 1e5 at 8K.
    bases = [stage.rope.base for stage in small.stages[:2]]
    assert bases == pytest.approx([2e5 * factor ** (64 / 62) for factor in (4, 16)], rel=0.01)


def test_the_plan_names_every_arm():
    text = PLAN.read_text()
    missing = [arm for name in (*NAMES, "newer-small") for arm in load_study(name).arms if f"`{arm}`" not in text]
    assert missing == []


def test_answers_of_conversations_and_of_needles_on_one_context_are_read(tmp_path):
    samples = [
        {"suite": suite, "length": 4 * K, "index": index, "hash": f"{suite}{index}", "score": 1.0}
        for suite in ("mrcr", "niah")
        for index in range(4)
    ]
    for sample in samples[:4]:
        sample["losses_by_context"] = {"query": 3.0, "full": 2.0, "oracle": 1.0}
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    evals = [
        {"suite": "mrcr", "lengths": [4 * K], "needles": [2, 4, 8]},
        {"suite": "niah", "lengths": [4 * K], "needles": 2},
    ]
    seal(draft, tmp_path / "train", kind="scores", inputs={}, settings={"evals": evals}, counts={})
    found = read_answers(tmp_path / "train")
    prompts = {part.suite: len({answer.prompt for answer in answers.values()}) for part, answers in found.items()}
    assert prompts == {"mrcr": 4, "niah": 2}, "two needles share a context, four conversations do not"
