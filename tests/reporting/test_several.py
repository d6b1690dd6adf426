"""Several runs side by side, and runs in every state: nothing scored, killed, old, other lengths."""

import json
import shutil
from pathlib import Path

import pytest

from unspool.reporting.gather import gather
from unspool.reporting.page import lines_together, page_view, render
from unspool.reporting.text_formats import render_markdown, report_values

from .fake_run import fake_scores, fake_steps, write_fake_run, write_scores


@pytest.fixture
def other(fake_run: Path) -> Path:
    return write_fake_run(fake_run.with_name("other"))


def only_long(run: Path, model: str) -> None:
    """Scores at 2K alone."""
    cells, samples = fake_scores(model)
    write_scores(run, model, [c for c in cells if c["length"] == 2048], [s for s in samples if s["length"] == 2048])


def test_a_run_with_other_lengths_has_dashes_and_no_average(fake_run: Path, other: Path):
    for model in ("base", "abf", "utk"):
        only_long(other, model)
    section = page_view([gather(fake_run), gather(other)]).together

    assert section is not None
    table = next(table for block in section.blocks for table in getattr(block, "tables", ()))
    row = next(row for row in table.rows if row[0].text == "tiny (other) · utk")
    assert [entry.text for entry in row[1:4]] == ["–", "–", "–"]
    assert row[4].text.endswith("%")
    assert [entry.text for entry in row[5:]] == ["–", "–"]


def test_models_of_several_runs_are_compared_on_the_prompts_they_share(fake_run: Path, other: Path):
    found = report_values([gather(fake_run), gather(other)])["together"]["comparisons"]

    pairs = {(one["first"], one["second"]) for one in found}
    assert ("tiny (tiny) · abf", "tiny (other) · utk") in pairs
    same = [one for one in found if (one["first"], one["second"]) == ("tiny (tiny) · abf", "tiny (other) · abf")]
    assert same and all(one["difference"] == 0 and one["better"] is None for one in same)


def test_a_run_without_scores_is_shown_next_to_one_with_scores(fake_run: Path, other: Path):
    shutil.rmtree(other / "scores")
    runs = [gather(fake_run), gather(other)]

    assert [line.label for line in lines_together(runs)] == [f"tiny (tiny) · {name}" for name in ("base", "abf", "utk")]
    assert "No scores yet" in render(runs)
    assert "No scores yet" in render_markdown(runs)


def test_runs_without_any_scores_are_reported(fake_run: Path, other: Path):
    for run in (fake_run, other):
        shutil.rmtree(run / "scores")

    assert "No run has scores yet." in render([gather(fake_run), gather(other)])
    assert report_values([gather(fake_run), gather(other)])["together"]["measures"] == []


def test_a_killed_stage_shows_its_progress(fake_run: Path):
    shutil.rmtree(fake_run / "stages" / "utk")
    work = fake_run / "stages" / "utk.work"
    work.mkdir()
    lines = [json.dumps(step) for step in fake_steps("utk")[:7]]
    (work / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 8, "tok')
    (work / "ledger.jsonl").write_text('{"step":1,"rows":{"short":[1]}}\n{"step":2,"ro')
    results = gather(fake_run)

    assert "not finished: 115K of 983K tokens" in render([results])
    stage = report_values([results])["runs"][0]["stages"][1]
    assert (stage["finished"], stage["tokens"], stage["rows_trained_on"]) == (False, 7 * 16384, {"short": 1})


def test_faulty_steps_are_reported_with_their_reason(fake_run: Path):
    steps = fake_steps("abf")
    steps[4] |= {"loss": None, "grad_norm": None, "skipped": True, "wrong": "the loss is <not> finite"}
    path = fake_run / "stages" / "abf" / "metrics.jsonl"
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))

    page = render([gather(fake_run)])
    assert (
        "abf: 1 of 60 steps were faulty, 1 were skipped; the first is step 5 (the loss is &lt;not&gt; finite)." in page
    )


def test_an_old_run_without_newer_fields_is_shown(fake_run: Path):
    for name in ("abf", "utk"):
        steps = [{key: step[key] for key in ("step", "tokens", "loss")} for step in fake_steps(name)]
        folder = fake_run / "stages" / name
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        (folder / "ledger.jsonl").unlink()
        shutil.rmtree(folder / "model")
    for name in ("base", "abf", "utk"):
        path = fake_run / "scores" / name / "samples.jsonl"
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        old = [{key: value for key, value in one.items() if key not in ("prompt", "losses")} for one in samples]
        path.write_text("".join(json.dumps(one) + "\n" for one in old))
    results = gather(fake_run)
    page = render([results])

    assert "Training loss" in page and "Gradient norm" not in page and "Learning rate" not in page
    assert "Prompt</summary>" not in page
    assert {one["measure"] for one in report_values([results])["runs"][0]["comparisons"]} == {
        "Needle recall at 2K",
        "Needle recall at all lengths",
        "Key-value recall at 2K",
        "Key-value recall at all lengths",
    }


def test_three_runs_with_many_models_keep_the_page_small(fake_run: Path):
    runs = [fake_run, *(write_fake_run(fake_run.with_name(f"run{at}")) for at in range(2))]
    for run in runs:
        for at in range(4):
            write_scores(run, f"arm{at}", *fake_scores("abf"))

    assert len(render([gather(run) for run in runs]).encode()) < 2_000_000


def test_a_wide_suite_keeps_the_page_small(fake_run: Path):
    """RULER as it is run: 13 tasks, 6 lengths, 5 depths, 8 models."""
    depths: list[float | None] = [None, 0.0, 0.25, 0.5, 0.75, 1.0]
    for name in ("base", "abf", "utk", *(f"arm{at}" for at in range(5))):
        cells = [
            {
                "suite": "ruler",
                "task": f"task{task}",
                "metric": "recall",
                "length": 4096 << power,
                "depth": depth,
                "value": 0.5,
                "n": 100,
                "low": 0.4,
                "high": 0.6,
            }
            for task in range(13)
            for power in range(6)
            for depth in depths
        ]
        write_scores(fake_run, name, cells, [])
    page = render([gather(fake_run)])

    assert len(page.encode()) < 2_000_000
    assert "more tasks are only in “All numbers”" in page


def test_a_folder_named_after_its_model_gives_the_name_once(fake_run: Path):
    scores = fake_run / "scores" / "utk"
    summary = json.loads((scores / "summary.json").read_text())
    (scores / "summary.json").write_text(json.dumps({**summary, "model": "utk"}))
    other = shutil.copytree(scores, fake_run.parent / "copy")

    assert [line.label for line in lines_together([gather(scores), gather(other)])] == ["utk", "copy · utk"]
