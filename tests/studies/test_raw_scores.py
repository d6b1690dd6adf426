"""From committed lines to scores, measures by name, verdicts on claims, and the agreement of measures."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from unspool.core.artifacts import publish
from unspool.core.errors import ConfigError, DataError
from unspool.evals.suites.mrcr import recovery
from unspool.studies.arm_scores import Answer, Part
from unspool.studies.claims import Claims, judge
from unspool.studies.metric_agreement import rank_agreement
from unspool.studies.raw_results import collect, read_runs
from unspool.studies.raw_scores import find_measure, select_answers
from unspool.studies.two_level import arm_interval, parts_of

K = 1024


def sample(suite, index, score=None, length=4 * K, **more):
    return {"suite": suite, "length": length, "index": index, "hash": f"{suite}{index}", "score": score, **more}


# Reading


def save(folder: Path, run: str, name: str, samples) -> None:
    (folder / run).mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(one) + "\n" for one in samples)
    (folder / run / name).write_bytes(gzip.compress(text.encode()))


def test_runs_are_read_by_arm_and_seed_without_logs(tmp_path):
    save(tmp_path, "a-b-s12", "niah.jsonl.gz", [sample("niah", 0, 1.0)])
    save(tmp_path, "a-b-s12", "log.jsonl.gz", [{"step": 1}])
    save(tmp_path, "base", "samples.jsonl.gz", [sample("niah", 0, 0.0), sample("loss", 0, 2.0)])
    (tmp_path / "empty").mkdir()
    found = read_runs(tmp_path)
    assert [(run.arm, run.seed, run.name, len(run.samples)) for run in found] == [
        ("a-b", 12, "a-b-s12", 1),
        ("base", 0, "base-s0", 2),
    ]
    with pytest.raises(DataError, match=r"no run with answers found; expected ARM-sSEED/SUITE\.jsonl\.gz"):
        read_runs(tmp_path / "empty")


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "a-s0").mkdir()
    (tmp_path / "a-s0" / "niah.jsonl").write_text('{"suite": "niah"\n')
    with pytest.raises(DataError, match=r"niah\.jsonl: line 1 is not JSON"):
        read_runs(tmp_path)


def test_questions_are_chosen_by_their_fields():
    lines = [sample("niah", at, 1.0, needle_wording=name) for at, name in enumerate(("magic", "ship", "locker"))]
    for where in ({"needle_wording": ["ship", "locker"]}, {"index": {"from": 1, "to": 2}}):
        assert set(select_answers(lines, where)[Part("niah", None, 4 * K)]) == {"niah1", "niah2"}
    assert set(select_answers(lines, {"needle_wording": "ship"})[Part("niah", None, 4 * K)]) == {"niah1"}


def test_questions_on_one_context_are_one_prompt_and_missing_scores_are_no_zeros():
    lines = [sample("niah", at, score, context="c") for at, score in enumerate((1.0, 0.0, None))]
    assert select_answers(lines) == {
        Part("niah", None, 4 * K): {"niah0": Answer("niah c", 1.0), "niah1": Answer("niah c", 0.0)}
    }


# Ratios


def mrcr(index, full, query, oracle):
    return sample("mrcr", index, 0.5, losses_by_context={"full": full, "query": query, "oracle": oracle})


def test_recovery_is_the_ratio_of_mean_gains_and_its_error_that_of_the_ratio():
    rng = np.random.default_rng(0)
    possible = rng.uniform(0.5, 2, size=40)
    lines = [mrcr(at, 5 - one * rng.normal(0.6, 0.2), 5.0, 5.0 - one) for at, one in enumerate(possible.tolist())]
    answers = select_answers(lines)
    measure = find_measure("mrcr/4K", answers)
    found = arm_interval({0: answers}, measure)
    cell = recovery([one["losses_by_context"] for one in lines])
    assert found.value == pytest.approx(cell["value"])
    assert (found.low, found.high) == pytest.approx((cell["low"], cell["high"]), abs=0.015), "the suite's bootstrap"
    plain = np.mean([(5 - one["losses_by_context"]["full"]) / p for one, p in zip(lines, possible, strict=True)])
    assert abs(plain - cell["value"]) > 1e-3, "the mean of ratios is another number, which this must catch"


def test_longppl_weights_windows_by_their_key_tokens():
    lines = [sample("longppl", 0, 2.0, key_tokens=30), sample("longppl", 1, 4.0, key_tokens=10)]
    lines.append(sample("longppl", 2, None, key_tokens=0))
    answers = select_answers(lines)
    assert sum(parts_of(answers, find_measure("longppl/4K", answers)).values()) == pytest.approx(2.5)


# Measures


def losses(index, values):
    edges = (0, 128, 256, 512, K)
    buckets = [
        {"from": start, "to": stop, "value": value, "n": stop - max(start, 1)}
        for start, stop, value in zip(edges[:-1], edges[1:], values, strict=True)
    ]
    return sample("perplexity", index, 0.0, length=K, losses=buckets)


def test_measures_by_name():
    lines = [losses(0, (4.0, 3.0, 2.0, 1.0))]
    lines += [sample("ruler", 10 * at, score, task=task) for at, (task, score) in enumerate(
        {"niah_single_1": 1.0, "niah_multikey_1": 0.5, "vt": 0.0}.items()
    )]  # fmt: skip
    lines += [sample("helmet", 20 + at, score, task=task) for at, (task, score) in enumerate(
        {"json_kv": 1.0, "nq": 0.2, "hotpotqa": 0.4}.items()
    )]  # fmt: skip
    answers = select_answers(lines)

    def value(name):
        return sum(parts_of(answers, find_measure(name, answers)).values())

    assert value("perplexity/256-1K") == pytest.approx((256 * 2 + 512 * 1) / 768)
    assert value("perplexity/0-256") == pytest.approx((127 * 4 + 128 * 3) / 255), "the first token is no target"
    assert value("ruler/4K") == pytest.approx(0.5)
    assert value("ruler/niah_*/4K") == pytest.approx(0.75)
    assert value("ruler/vt/4K + ruler/niah_single_1/4K") == pytest.approx(0.5)
    assert value("helmet/rag/4K") == pytest.approx(0.3)
    assert value("helmet/4K") == pytest.approx((1.0 + 0.3) / 2), "a mean of categories, not of tasks"
    assert find_measure("ruler/8K", answers) is None
    assert find_measure("ruler/4K + niah/4K", answers) is None


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("nia/4K", "measure nia/4K: no suite is called 'nia'; did you mean 'niah'?"),
        ("niah", "measure niah: use SUITE/LENGTH"),
        ("niah/long", "measure niah/long: use SUITE/LENGTH"),
    ],
)
def test_a_wrong_name_is_refused(name, wanted):
    with pytest.raises(ConfigError) as error:
        find_measure(name, [])
    assert str(error.value).startswith(wanted)


# Claims


def claims(expect="higher", metric="niah/4K", **more):
    one = {"paper": "P", "claim": "a is better", "source": "Table 1", "theirs": "2 against 1"}
    one |= {"first": "a", "second": "b", "expect": expect, "metrics": [metric]} | more
    data = [{"folder": "small", "arms": {"a": "aa"}}]
    return Claims.model_validate({"rule": {"seeds": 3, "questions": 100}, "data": data, "claims": [one]})


def arm(right, *, n=100, seeds=3, suite="niah"):
    lines = {
        seed: [sample(suite, 1000 * seed + at, float((at * 7 + seed) % n < right * n)) for at in range(n)]
        for seed in range(seeds)
    }
    return {seed: select_answers(each) for seed, each in lines.items()}


@pytest.mark.parametrize(
    ("first", "second", "expect", "verdict"),
    [
        (0.8, 0.3, "higher", "shown"),
        (0.3, 0.8, "higher", "contradicted"),
        (0.5, 0.5, "higher", "not shown"),
        (0.3, 0.8, "lower", "shown"),
        (0.8, 0.3, "lower", "contradicted"),
        (0.5, 0.5, "no higher", "shown"),
        (0.3, 0.8, "no higher", "shown"),
        (0.8, 0.3, "no higher", "contradicted"),
        (0.8, 0.3, "no lower", "shown"),
        (0.3, 0.8, "no lower", "contradicted"),
    ],
)
def test_a_verdict_follows_from_the_interval(first, second, expect, verdict):
    (found,) = judge(claims(expect), {"small": {"aa": arm(first, n=400), "b": arm(second, n=400)}})
    assert (found.verdict, found.exploratory, found.questions, found.interval.seeds) == (verdict, False, 400, 3)
    assert found.interval.value == pytest.approx(first - second)


def test_few_seeds_or_questions_are_exploratory():
    for few in ({"seeds": 2}, {"n": 99}):
        (found,) = judge(claims(), {"small": {"aa": arm(0.9, **few), "b": arm(0.1, **few)}})
        assert (found.verdict, found.exploratory) == ("shown", True)


def test_what_was_not_measured_was_not_run():
    for results in ({"aa": arm(0.9)}, {"aa": arm(0.9), "b": arm(0.1, suite="key_value")}):
        (found,) = judge(claims(), {"small": results})
        assert (found.verdict, found.interval) == ("not run", None)


def test_many_claims_are_corrected():
    """p of a single claim is between 0.05/20 and 0.05: shown alone, not among 20 of a paper."""
    results = {"small": {"aa": arm(0.5, n=100, seeds=1), "b": arm(0.42, n=100, seeds=1)}}
    (alone,) = judge(claims(), results)
    assert alone.verdict == "shown" and 0.05 / 20 < alone.p < 0.05
    many = claims().model_copy(update={"claims": claims().claims * 20})
    assert {one.verdict for one in judge(many, results)} == {"not shown"}
    elsewhere = [one.model_copy(update={"paper": f"P{at}"}) for at, one in enumerate(claims().claims * 20)]
    apart = judge(claims().model_copy(update={"claims": elsewhere}), results)
    assert {one.verdict for one in apart} == {"shown"}


def test_planned_comparisons_are_corrected_together_and_other_claims_without_them():
    """Among three planned comparisons a p of 0.03 is too large, although only one of them is a claim."""
    results = {
        "small": {"aa": arm(0.5, seeds=1), "b": arm(0.44, seeds=1), "c": arm(0.44, seeds=1), "d": arm(0.9, seeds=1)}
    }
    one = claims().claims[0]
    both = claims().model_copy(update={"claims": [one, one.model_copy(update={"first": "d", "second": "c"})]})
    plain = judge(both, results)
    assert [found.verdict for found in plain] == ["shown", "shown"] and 0.05 / 3 < plain[0].p < 0.05
    family = {"folder": "small", "metric": "niah/4K", "pairs": [("b", "aa"), ("aa", "c"), ("b", "d")]}
    planned = judge(Claims.model_validate(both.model_dump() | {"families": [family]}), results)
    assert [found.verdict for found in planned] == ["not shown", "shown"]
    assert planned[0].p == pytest.approx(2 * plain[0].p)  # (b, d) is the smallest; (aa, c) is equal
    assert planned[1].p == planned[1].interval.p  # the only one outside the family


# Agreement of measures


def test_rank_correlation_by_hand_and_by_scipy():
    """Two swaps of neighbors among five: 1 − 6·4 / (5·24) = 0.8."""
    values = {"target": dict(zip("abcde", (1, 2, 3, 4, 5), strict=True))}
    values["cheap"] = dict(zip("abcdef", (20, 10, 40, 30, 50, 0), strict=True))
    values["opposite"] = dict(zip("abcde", (5, 4, 3, 2, 1), strict=True))
    values["constant"] = dict.fromkeys("abcde", 1.0)
    found = {one.measure: one for one in rank_agreement(values, "target")}
    assert list(found) == ["cheap", "opposite", "constant"], "best first, unknown last"
    assert (found["cheap"].value, found["cheap"].arms) == (pytest.approx(0.8), 5)
    assert (found["opposite"].value, found["constant"].value, found["constant"].low) == (pytest.approx(-1), None, None)
    rng = np.random.default_rng(0)
    for _ in range(20):
        pair = rng.integers(5, size=(2, 12))
        values = {name: dict(enumerate(row.tolist())) for name, row in zip("xy", pair, strict=True)}
        (one,) = rank_agreement(values, "y")
        assert one.value == pytest.approx(stats.spearmanr(*pair).statistic)
        assert one.low <= one.value <= one.high


def test_few_arms_have_no_interval():
    values = {name: {"a": 1.0, "b": 2.0, "c": 3.0} for name in ("x", "y")}
    (one,) = rank_agreement(values, "y")
    assert (one.value, one.low, one.arms) == (pytest.approx(1), None, 3)


def test_the_interval_over_arms_holds_the_truth():
    """20 arms, normal values with correlation 0.7: Spearman's is 6/π · asin(0.35)."""
    truth, rng, inside = 6 / math.pi * math.asin(0.35), np.random.default_rng(0), 0
    for _ in range(120):
        x = rng.normal(size=20)
        y = 0.7 * x + math.sqrt(1 - 0.49) * rng.normal(size=20)
        values = {"x": dict(enumerate(x.tolist())), "y": dict(enumerate(y.tolist()))}
        (one,) = rank_agreement(values, "y")
        inside += one.low <= truth <= one.high
    assert 0.88 <= inside / 120 <= 0.99


# Collecting


RECIPE = """\
name: two
seed: 3
model: org/name
sources: {books: {kind: jsonl, path: data/*.jsonl}}
datasets: {long: {from: books, seq_len: 4K, packing: concat}}
stages:
  - {name: first, context_length: 4K, mix: {long: 1}, tokens: 1M, batch_tokens: 16K, lr: 1e-5}
  - {name: second, init: first, context_length: 4K, mix: {long: 1}, tokens: 1M, batch_tokens: 16K, lr: 1e-5}
  - {name: other, init: base, context_length: 4K, mix: {long: 1}, tokens: 1M, batch_tokens: 16K, lr: 1e-5}
evals: [{suite: niah, lengths: [4K]}]
"""


def scored_run(folder: Path) -> Path:
    """A run of three stages, of which the second follows the first, without its source's files."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "run.json").write_text(json.dumps({"seconds": {"stages/first": 5.0}, "versions": {"torch": "2"}}))
    inputs = {"model": "m", "text": {f"{folder}/far/held-out.jsonl": "t"}}
    for name in ("base", "first", "second", "other"):
        with publish(folder / "scores" / name, kind="scores", inputs=inputs, settings={"evals": []}) as draft:
            short = {"suite": "short", "task": "piqa", "length": 0, "cells": []}
            lines = [sample("niah", 0, 1.0, prompt={"start": "x"}), short]
            (draft.folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        if name != "base":
            (folder / "stages" / name).mkdir(parents=True)
            (folder / "stages" / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "of": name}) + "\n")
    with publish(folder / "corpus" / "books", kind="corpus", inputs={"files": "digest"}, settings={}):
        pass
    return folder


def test_every_scored_stage_is_collected_with_the_log_of_the_stages_before_it(tmp_path):
    scored_run(tmp_path / "study" / "arm-s3")
    assert sorted(collect(tmp_path / "study", tmp_path / "raw")) == sorted(
        ["base-s3", "arm.first-s3", "arm.second-s3", "arm-s3"]
    )

    def log(run):
        path = tmp_path / "raw" / run / "log.jsonl.gz"
        return [json.loads(line)["stage"] for line in gzip.decompress(path.read_bytes()).splitlines()]

    assert (log("arm.second-s3"), log("arm-s3")) == (["first", "second"], ["other"])
    assert not (tmp_path / "raw" / "base-s3" / "log.jsonl.gz").exists()
    facts = json.loads((tmp_path / "raw" / "arm.second-s3" / "run.json").read_text())
    assert facts["stages"] == ["first", "second"]
    assert facts["inputs"] == {"model": "m", "texts": {"far/held-out.jsonl": "t"}, "sources": {"books": "digest"}}
    (niah,) = gzip.decompress((tmp_path / "raw" / "arm-s3" / "niah.jsonl.gz").read_bytes()).splitlines()
    assert "prompt" not in json.loads(niah), "seeds give every prompt again"
    assert (tmp_path / "raw" / "arm-s3" / "short.jsonl.gz").exists()
    assert list(select_answers(read_runs(tmp_path / "raw")[0].samples)) == [Part("niah", None, 4 * K)]


def test_a_single_run_is_collected_by_its_stages(tmp_path):
    scored_run(tmp_path / "run")
    assert collect(tmp_path / "run", tmp_path / "raw") == ["base-s3", "first-s3", "second-s3", "other-s3"]


def test_two_untrained_models_keep_their_names(tmp_path):
    """Both are the base of their run, with the same seed."""
    for name in ("base", "raised-s3"):
        folder = scored_run(tmp_path / "runs" / name)
        (folder / "recipe.yaml").write_text(RECIPE.partition("stages:")[0] + "stages: []\nevals: []\n")
    assert sorted(collect(tmp_path / "runs", tmp_path / "raw")) == ["base-s3", "raised-s3"]


def test_a_folder_without_scores_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no scores found; name the folder of a study or of a run"):
        collect(tmp_path, tmp_path / "raw")
    assert not (tmp_path / "raw").exists()
