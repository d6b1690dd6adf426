"""Tables in the shapes of the papers: by length, by category, long against short."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from unspool.evals.suites.helmet.suite import CATEGORIES
from unspool.reporting.figures import Line
from unspool.reporting.gather import gather
from unspool.reporting.measures import average, measures_for
from unspool.reporting.overview import category_tables, length_table, trade_off
from unspool.reporting.run_results import Cell, ModelScores

from .fake_run import LENGTHS


def cell(suite: str, length: int, value: float | None, half: float = 0.1) -> Cell:
    known = {} if value is None else {"low": value - half, "high": value + half}
    return Cell(suite=suite, metric="accuracy", length=length, value=value, n=10, **known)


def line(label: str, *cells: Cell, context: int | None = None) -> Line:
    return Line(label=label, style=0, scores=ModelScores(name=label, cells=cells), context=context)


def texts(table) -> list[list[str]]:
    return [[entry.text for entry in row] for row in table.rows]


def test_lengths_are_columns_with_average_and_adaptation_rate():
    table = length_table(
        [
            line("a", cell("key_value", 64, 0.8), cell("key_value", 128, 0.4)),
            line("b", cell("key_value", 64, 0.5), cell("key_value", 128, 0.6)),
        ],
        "key_value",
    )

    assert list(table.columns) == ["model", "64", "128", "average", "adaptation rate"]
    assert texts(table) == [["a", "80%", "40%", "60%", "50%"], ["b", "50%", "60%", "55%", "120%"]]
    bold = [[entry.strong for entry in row] for row in table.rows]
    # 60% (50 to 70) does not lie above 40% (30 to 50).
    assert bold == [[False, True, False, False, False], [False] * 5]


def test_the_adaptation_rate_uses_128k_and_32k_or_the_lengths_of_the_scores():
    """As the column "Rate" of Untie the Knots' Table 1: Qwen2-UtK-base (7B) keeps 93%."""
    scores = {4096: 0.906, 32768: 0.805, 131072: 0.750}
    cells = [cell("ruler", length, value) for length, value in scores.items()]
    table = length_table([line("UtK", *cells)], "ruler")
    assert texts(table)[0][-1] == "93%" and "adaptation rate: score at 128K ÷ score at 32K" in table.note
    named = line("UtK", *cells)
    named = replace(named, scores=replace(named.scores, rates={"ruler": (32768, 4096)}))
    assert texts(length_table([named], "ruler"))[0][-1] == "89%"


def test_the_best_is_bold_only_if_its_interval_is_above_all_others():
    def bold(values: dict[str, float], **changes: float) -> list[bool]:
        lines = [line(name, replace(cell("key_value", 64, value), **changes)) for name, value in values.items()]
        return [row[1].strong for row in length_table(lines, "key_value").rows]

    assert bold({"a": 0.9, "b": 0.5, "c": 0.4}) == [True, False, False]
    assert bold({"a": 0.9, "b": 0.75, "c": 0.1}) == [False, False, False]
    # Two questions cannot show a difference, whatever their interval looks like.
    assert bold({"a": 0.9, "b": 0.1}, n=2) == [False, False]
    assert bold({"a": 0.9, "b": 0.1}, n=6) == [True, False]


def test_a_missing_length_gives_no_average():
    lines = [line("a", cell("key_value", 64, 0.8), cell("key_value", 128, 0.4)), line("b", cell("key_value", 128, 0.6))]

    assert texts(length_table(lines, "key_value"))[1] == ["b", "–", "60%", "–", "–"]
    zero = line("c", cell("key_value", 64, 0.0), cell("key_value", 128, None))
    assert texts(length_table([zero], "key_value"))[0][-2:] == ["–", "–"]


def test_a_model_without_the_suite_has_no_line():
    assert texts(length_table([line("a", cell("key_value", 64, 0.8)), line("b")], "key_value")) == [["a", "80%"]]


def test_the_average_adds_squares_of_half_intervals():
    found = average([cell("key_value", 64, 0.5, 0.3), cell("key_value", 128, 0.7, 0.4)])

    assert found is not None
    assert (found.value, found.n, found.high) == (pytest.approx(0.6), 20, pytest.approx(0.6 + 0.25))
    assert average([cell("key_value", 64, 0.5), None]) is None
    assert average([]) is None


def test_numbers_on_the_tables_are_those_of_the_files(fake_run: Path):
    lines = [Line(label=one.name, style=0, scores=one) for one in gather(fake_run).models]
    table = length_table(lines, "niah")
    for row, name in zip(table.rows, ("base", "abf", "utk"), strict=True):
        cells = json.loads((fake_run / "scores" / name / "summary.json").read_text())["cells"]
        known = {c["length"]: c["value"] for c in cells if c["suite"] == "niah" and c["depth"] is None}
        assert [entry.text for entry in row[1:5]] == [f"{100 * known[length]:.0f}%" for length in LENGTHS]
        assert row[5].text == f"{100 * fmean(known.values()):.0f}%"


def test_helmet_has_the_categories_of_the_papers():
    tasks = [task for tasks in CATEGORIES.values() for task in tasks]
    scored = [cell(f"helmet: {task}", length, 0.5) for task in tasks for length in (64, 128)]
    (table,) = category_tables([line("a", *scored, context=128)])

    expected = ["Recall", "RAG", "Re-rank", "Cite", "Long QA", "Summaries", "ICL"]
    assert list(table.columns) == ["model", "context", *expected, "average"]
    assert texts(table) == [["a", "128", *["50%"] * 8]]
    assert "Mean over 64 and 128" in table.note


def test_a_length_of_only_some_categories_is_skipped_and_the_mixed_average_is_shown():
    scored = [cell(f"helmet: {task}", 64, 0.5) for task in ("json_kv", "nq")] + [cell("helmet: json_kv", 512, 0.9)]
    one = line("sft", *scored)
    one = replace(one, scores=replace(one.scores, mixed_averages={"helmet": (0.557, (64, 512))}))
    (table,) = category_tables([one])

    assert texts(table) == [["sft", "50%", "50%", "50%"]] and "Mean over 64, with" in table.note
    assert table.note.endswith(" Average in which some tasks use other lengths (64 and 512): sft 55.7.")


def test_parts_of_a_task_have_columns_but_no_weight_in_the_average():
    names = {"bfs": 0.5, "bfs, depth 1": 0.9, "bfs, depth 2": 0.1, "parents": 0.7}
    cells = [cell(f"graphwalks: {task}", 64, value) for task, value in names.items()]
    [table] = [found for found in category_tables([line("a", *cells)]) if found.caption.startswith("Graph walks")]

    assert table.columns == ["model", *names, "average"]
    assert texts(table) == [["a", "50%", "90%", "10%", "70%", "60%"]]


def test_trivial_baselines_are_in_the_note_of_the_length_table():
    known = replace(cell("graphwalks", 64, 0.5), baselines={"random": 0.01, "first": 0.02, "last": 0.03})
    plain = cell("graphwalks", 128, 0.4)

    note = length_table([line("a", known, plain)], "graphwalks").note
    assert note.endswith(" Trivial baselines (random, first, last item): 64: 1%, 2%, 3%.")
    assert "baselines" not in length_table([line("a", plain)], "graphwalks").note


def test_a_category_that_lacks_a_task_of_others_is_missing_and_so_is_the_average():
    full = [cell("ruler: niah_single_1", 64, 1.0), cell("ruler: vt", 64, 0.5), cell("ruler: cwe", 64, 0.2)]
    full.append(cell("ruler: fwe", 64, 0.4))
    (table,) = category_tables([line("a", *full), line("b", *full[:3])])

    assert list(table.columns) == ["model", "Counting", "Needles", "Tracing", "average"]
    assert texts(table) == [["a", "30%", "100%", "50%", "60%"], ["b", "–", "100%", "50%", "–"]]


def test_several_suites_are_in_one_table_and_short_tasks_come_last():
    one = line("a", cell("niah", 64, 0.5), cell("key_value", 64, 0.7))
    short = (cell("short: hellaswag", 0, 0.4), cell("short: mmlu", 0, 0.6))
    tables = category_tables([replace(one, scores=replace(one.scores, short=short))])

    assert [table.caption for table in tables] == ["All suites", "Short context"]
    assert texts(tables[1]) == [["a", "40%", "60%", "50%"]]


# Long and short context


def loss(start: int, stop: int, value: float) -> Cell:
    return replace(cell("perplexity", 512, value), start=start, stop=stop, metric="loss")


def extended(label: str, recall: float, inside: float) -> Line:
    return line(label, cell("key_value", 512, recall), loss(0, 256, inside), loss(256, 512, 3.0))


def measures_of(lines: list[Line], old: int | None):
    return measures_for({one.label: one.scores for one in lines}, old)


def test_the_short_side_is_the_loss_inside_the_old_context():
    lines = [extended("a", 0.1, 3.5), extended("b", 0.9, 3.6)]
    found = trade_off(lines, measures_of(lines, 256))

    assert found is not None
    assert [figure.title for figure in found.figures] == [
        "Key-value recall at 512 against loss inside 256",
        "Loss at 256–512 against loss inside 256",
    ]
    assert texts(found.table) == [["a", "3.50", "10%", "3.00"], ["b", "3.60", "90%", "3.00"]]


def test_better_is_up_and_to_the_right():
    lines = [extended("worse", 0.1, 3.9), extended("better", 0.9, 3.1)]
    found = trade_off(lines, measures_of(lines, 256))

    assert found is not None
    drawing = str(found.figures[0].drawing)
    places = [float(part.split('"')[1]) for part in drawing.split('class="hit" cx=')[1:]]
    heights = [float(part.split('"')[1]) for part in drawing.split(" cy=")[1:] if 'r="12"' in part[:30]]
    assert places[0] < places[1]
    assert heights[0] > heights[1], "SVG counts downwards"


def test_short_tasks_replace_the_loss_if_scored():
    lines = [extended("a", 0.1, 3.5), extended("b", 0.9, 3.6)]
    scored = [
        replace(one, scores=replace(one.scores, short=(cell("short: mmlu", 0, share),)))
        for one, share in zip(lines, (0.4, 0.3), strict=True)
    ]
    found = trade_off(scored, measures_of(scored, 256))

    assert found is not None
    assert texts(found.table)[0][1] == "40%"
    assert found.table.columns[1] == "Short tasks (mean of 1)"


def test_one_point_is_no_trade_off():
    lines = [extended("a", 0.1, 3.5)]

    assert trade_off(lines, measures_of(lines, 256)) is None
    assert trade_off(lines * 2, measures_of(lines, None)) is None


def test_short_results_are_read_from_their_folder_and_never_by_length(fake_run: Path):
    folder = fake_run / "short" / "abf"
    folder.mkdir(parents=True)
    raw = {"suite": "short", "task": "mmlu", "metric": "acc", "length": 0, "depth": None, "value": 0.4, "n": 100}
    (folder / "summary.json").write_text(json.dumps({"cells": [{**raw, "low": 0.3, "high": 0.5}]}))
    results = gather(fake_run)

    assert [(one.name, len(one.short)) for one in results.models] == [("base", 0), ("abf", 1), ("utk", 0)]
    assert results.recall_suites == ["niah", "key_value"]
