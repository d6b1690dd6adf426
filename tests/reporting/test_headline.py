import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from unspool.reporting.comparisons import headline, missing_parts
from unspool.reporting.gather import gather
from unspool.reporting.measures import key_measures, pool, winner
from unspool.reporting.run_results import Cell

from .fake_run import recall_cell, write_scores


def loss_cell(start: int, stop: int, value: float, half: float) -> dict[str, Any]:
    cell = {"suite": "perplexity", "metric": "loss", "length": 2048, "from": start, "to": stop, "n": 8 * (stop - start)}
    return {**cell, "value": value, "low": value - half, "high": value + half}


def write_simple(run: Path, model: str, found: int, losses: tuple[float, float]) -> None:
    cells = [
        recall_cell("niah", 256, None, 40, 40),
        recall_cell("niah", 2048, None, found, 40),
        loss_cell(0, 256, losses[0], 0.05),
        loss_cell(1024, 2048, losses[1], 0.05),
    ]
    write_scores(run, model, cells, [])


@pytest.fixture
def simple_run(fake_run: Path) -> Path:
    write_simple(fake_run, "base", 0, (3.70, 6.20))
    write_simple(fake_run, "abf", 10, (3.69, 3.80))
    write_simple(fake_run, "utk", 36, (3.71, 3.82))
    return fake_run


def test_the_three_lines_show_before_and_after_with_n_and_interval(simple_run: Path):
    assert headline(gather(simple_run)) == [
        "tiny: 256 → 2K. Needle recall at 2K: 0% (0–9) → abf 25% (14–40), utk 90% (77–96), n = 40.",
        "Loss at 1K–2K: 6.20 ±0.05 → abf 3.80 ±0.05, utk 3.82 ±0.05, n = 8,192 tokens; "
        "loss inside 256: 3.70 ±0.05 → abf 3.69 ±0.05, utk 3.71 ±0.05, n = 2,048 tokens.",
        "abf and utk at equal tokens (983K each): utk wins on needle recall at 2K; "
        "no difference shown on loss at 1K–2K and loss inside 256 (intervals overlap).",
    ]


def test_three_arms_with_one_far_behind_are_not_called_close(simple_run: Path):
    write_simple(simple_run, "utk", 11, (3.71, 3.82))
    shutil.copytree(simple_run / "stages" / "utk", simple_run / "stages" / "harpe")
    write_simple(simple_run, "harpe", 0, (3.90, 3.99))

    said = headline(gather(simple_run))[-1]
    assert "no difference" not in said
    assert "no arm shown to be better than all others on needle recall at 2K (n = 40)" in said


def test_unequal_budgets_are_reported(simple_run: Path):
    metrics = simple_run / "stages" / "utk" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:30]))

    assert headline(gather(simple_run))[-1].startswith("abf and utk at unequal tokens (abf 983K, utk 492K): ")


def test_a_missing_number_is_a_dash_and_decides_nothing(simple_run: Path):
    write_scores(simple_run, "utk", [recall_cell("niah", 2048, None, 0, 0)], [])

    lines = headline(gather(simple_run))
    assert "utk –, n = 40." in lines[0]
    assert len(lines) == 2, "no measure has both arms, so none can be compared"


def test_different_n_are_all_given(simple_run: Path):
    write_scores(simple_run, "utk", [recall_cell("niah", 2048, None, 9, 10)], [])

    assert "n = 40 / n = 10." in headline(gather(simple_run))[0]


def test_the_headline_reports_missing_scores(fake_run: Path):
    shutil.rmtree(fake_run / "scores")

    assert headline(gather(fake_run)) == [
        "tiny: 256 → 2K. No scores yet: run the recipe's evals to compare the model before and after."
    ]


def test_before_alone_and_after_alone_are_both_shown(simple_run: Path):
    base_only, arm_only = simple_run, simple_run.with_name("arm")
    shutil.copytree(simple_run, arm_only)
    for model in ("abf", "utk"):
        shutil.rmtree(base_only / "scores" / model)
        if model == "abf":
            shutil.rmtree(arm_only / "scores" / "base")

    assert headline(gather(base_only))[0].endswith("Needle recall at 2K: base 0% (0–9), n = 40.")
    shutil.rmtree(arm_only / "scores" / "abf")
    assert headline(gather(arm_only))[0].endswith("Needle recall at 2K: utk 90% (77–96), n = 40.")
    assert "The base model was not scored, so there are no “before” numbers." in missing_parts(gather(arm_only))


def test_without_the_original_context_nothing_is_called_inside(simple_run: Path):
    (simple_run / "run.json").unlink()

    results = gather(simple_run)
    assert [measure.title for measure in key_measures(results)] == ["Needle recall at 2K", "Loss at 1K–2K"]
    assert any("does not record the original context" in note for note in missing_parts(results))


def test_models_that_answered_different_questions_are_reported(fake_run: Path):
    assert missing_parts(gather(fake_run)) == []
    samples = fake_run / "scores" / "utk" / "samples.jsonl"
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    lines[0]["hash"] = "0" * 64
    samples.write_text("\n".join(map(json.dumps, lines)))

    assert missing_parts(gather(fake_run)) == [
        "Needle recall: the models answered different questions, which may explain a difference."
    ]


def test_pooled_loss_is_weighted_by_tokens_and_keeps_the_widest_interval():
    one = Cell(suite="perplexity", metric="loss", length=256, start=0, stop=64, value=4.0, n=100, low=3.8, high=4.2)
    two = Cell(suite="perplexity", metric="loss", length=256, start=64, stop=256, value=3.0, n=300, low=2.9, high=3.1)

    pooled = pool([one, two])
    assert pooled is not None
    assert (pooled.value, pooled.n, pooled.start, pooled.stop) == (pytest.approx(3.25), 400, 0, 256)
    # Two bounds of 0.2 and 0.1, moving together: 0.25 · 0.2 + 0.75 · 0.1.
    assert pooled.high == pytest.approx(3.25 + 0.125)


def test_pooling_nothing_is_missing():
    assert pool([Cell(suite="perplexity", metric="loss", length=256, start=0, stop=64, value=None, n=0)]) is None


def test_the_lower_loss_wins_only_if_intervals_do_not_overlap(simple_run: Path):
    write_simple(simple_run, "utk", 36, (3.71, 3.60))
    losses = {m.title: m for m in key_measures(gather(simple_run))}

    assert winner(losses["Loss at 1K–2K"], ["abf", "utk"]) == "utk"
    assert winner(losses["Loss inside 256"], ["abf", "utk"]) is None
