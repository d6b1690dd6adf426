"""Paired differences against values worked out by hand, and what they must not do."""

import math
from pathlib import Path

import numpy as np
import pytest

from unspool.reporting.comparisons import (
    ahead_of_all,
    answer_difference,
    compare,
    comparison_table,
    difference,
    headline,
)
from unspool.reporting.figures import Line
from unspool.reporting.gather import gather
from unspool.reporting.measures import Measure, key_measures, winner
from unspool.reporting.run_results import ModelScores


def measure_of(suite: str, *lengths: int, spans: tuple[tuple[int, int], ...] = ()) -> Measure:
    return Measure(
        subject=suite, place="", higher_is_better=not spans, cells={}, suite=suite, lengths=lengths, spans=spans
    )


def model(name: str, **answers: dict[str, float]) -> ModelScores:
    """`model("a", key_value_64={...})`: scores by prompt, by suite and length."""
    found = {(key.rpartition("_")[0], int(key.rpartition("_")[2])): scores for key, scores in answers.items()}
    return ModelScores(name=name, cells=(), answers=found)


def test_right_and_wrong_answers_by_hand():
    # 10 gained, 2 lost of 40: (10.5 − 2.5) / 42 ± 1.96 · √(13 − 64 / 42) / 42.
    pairs = [(0.0, 1.0)] * 10 + [(1.0, 0.0)] * 2 + [(1.0, 1.0)] * 20 + [(0.0, 0.0)] * 8
    found = answer_difference(pairs)

    half = 1.96 * math.sqrt(13 - 64 / 42) / 42
    assert (found.value, found.n) == (pytest.approx(0.2), 40)
    assert (found.low, found.high) == (pytest.approx(8 / 42 - half), pytest.approx(8 / 42 + half))
    assert found.decided


def test_the_interval_covers_the_truth_about_as_often_as_it_claims():
    rng = np.random.default_rng(0)
    before = rng.random((400, 40)) < 0.5
    after = np.where(before, rng.random((400, 40)) < 0.9, rng.random((400, 40)) < 0.4)
    covered = 0
    for first, second in zip(before, after, strict=True):
        found = answer_difference(list(zip(first.astype(float), second.astype(float), strict=True)))
        assert found.low is not None and found.high is not None
        covered += found.low <= 0.5 * 0.9 + 0.5 * 0.4 - 0.5 <= found.high

    assert 0.92 <= covered / 400 <= 0.985


@pytest.mark.parametrize("pair", [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)])
def test_few_equal_answers_do_not_give_certainty(pair: tuple[float, float]):
    found = answer_difference([pair] * 5)

    assert found.low is not None and found.high is not None
    assert found.high - found.low > 0.2
    # Five coin flips agree once in sixteen times, six once in 32.
    assert not found.decided
    assert answer_difference([pair] * 6).decided == (pair == (0.0, 1.0))


def test_swapping_the_models_turns_the_sign():
    one = model("a", key_value_64={"p": 1.0, "q": 0.0, "r": 0.0})
    two = model("b", key_value_64={"p": 1.0, "q": 1.0, "r": 1.0})
    there, back = (difference(measure_of("key_value", 64), *pair) for pair in ((one, two), (two, one)))

    assert there.value == pytest.approx(2 / 3)
    assert (back.value, back.low, back.high) == (
        pytest.approx(-2 / 3),
        pytest.approx(-(there.high or 0)),
        pytest.approx(-(there.low or 0)),
    )


def test_only_prompts_that_both_answered_count():
    one = model("a", key_value_64={"p": 1.0, "only a": 0.0}, key_value_128={"p": 0.0})
    two = model("b", key_value_64={"p": 0.0, "only b": 1.0, "only b too": 1.0})

    found = difference(measure_of("key_value", 64), one, two)
    assert (found.value, found.n) == (-1.0, 1)
    assert difference(measure_of("key_value", 128), one, two).value is None


def test_tasks_have_equal_weight_for_any_number_of_prompts():
    many = {f"p{at}": 0.0 for at in range(30)}
    one = ModelScores(name="a", cells=(), answers={("ruler: vt", 64): many, ("ruler: cwe", 64): {"q": 0.0}})
    two = ModelScores(name="b", cells=(), answers={("ruler: vt", 64): many, ("ruler: cwe", 64): {"q": 1.0}})

    found = difference(measure_of("ruler", 64), one, two)
    assert (found.value, found.n) == (pytest.approx(0.5), 31)


def test_graded_answers_get_an_interval_around_their_mean():
    rng = np.random.default_rng(1)
    before = rng.random(60)
    found = answer_difference([(score, score * 0.5) for score in before])

    assert found.value == pytest.approx(-before.mean() / 2)
    assert found.low is not None and found.high is not None
    assert found.low < found.value < found.high < 0


def windows(shift: float, noise: tuple[float, ...]) -> ModelScores:
    """Windows of very different difficulty, each with two spans."""
    hard = (0.0, 1.0, 2.0, 3.0)
    found = {
        f"w{at}": {(0, 64): (base + shift + extra, 60), (64, 128): (9.0, 64)}
        for at, (base, extra) in enumerate(zip(hard, noise, strict=True))
    }
    return ModelScores(name="", cells=(), windows={128: found})


def test_losses_are_paired_by_window():
    measure = measure_of("perplexity", 128, spans=((0, 64),))
    found = difference(measure, windows(0.0, (0, 0, 0, 0)), windows(-0.1, (0.01, -0.01, 0.01, -0.01)))

    # Four differences around −0.1 with a deviation of 0.01155: t(3) · 0.01155 / 2.
    assert found.value == pytest.approx(-0.1)
    assert found.high == pytest.approx(-0.1 + 3.182 * 0.011547 / 2, rel=1e-3)
    assert found.decided, "the windows themselves differ by 3 nats, which must not matter"


def test_a_window_without_a_span_is_left_out():
    measure = measure_of("perplexity", 128, spans=((0, 64), (128, 256)))

    assert difference(measure, windows(0.0, (0,) * 4), windows(0.0, (0,) * 4)).value is None


def test_pairing_decides_what_intervals_alone_cannot(fake_run: Path):
    results = gather(fake_run)
    losses = {measure.title: measure for measure in key_measures(results)}
    arms = {model.name: model for model in results.arms}

    assert winner(losses["Loss inside 256"], list(arms)) is None
    assert ahead_of_all(losses["Loss inside 256"], arms) == ("abf", True)
    assert ahead_of_all(losses["Loss at 1K–2K"], arms) == ("utk", True)
    assert "paired by prompt: " in headline(results)[-1]
    assert "abf wins on loss inside 256" in headline(results)[-1]


def test_without_answers_the_intervals_decide(fake_run: Path):
    for name in ("abf", "utk"):
        (fake_run / "scores" / name / "samples.jsonl").unlink()
    results = gather(fake_run)
    losses = {measure.title: measure for measure in key_measures(results)}

    assert ahead_of_all(losses["Loss inside 256"], {m.name: m for m in results.arms}) == (None, False)
    assert headline(results)[-1].endswith("(intervals overlap).")


def test_the_table_has_every_pair_and_counts_what_pairing_adds(fake_run: Path):
    results = gather(fake_run)
    lines = [Line(label=one.name, style=0, scores=one) for one in results.models]
    table = comparison_table(compare(lines, key_measures(results)))

    assert table is not None
    assert [row[0].text for row in table.rows] == ["base → abf", "base → utk", "abf → utk"]
    assert table.columns[-1] == "Loss inside 256"
    last = table.rows[2][-1]
    assert (last.text[0], last.strong) == ("+", True)
    assert "separate intervals overlap" in table.note


def test_models_without_a_common_prompt_are_not_compared():
    lines = [Line(label="a", style=0, scores=model("a")), Line(label="b", style=1, scores=model("b"))]

    assert comparison_table(compare(lines, [measure_of("key_value", 64)])) is None
