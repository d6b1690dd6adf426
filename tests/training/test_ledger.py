"""The ledger of a stage says which rows each step saw, and proves that none was passed over or came too early."""

import json

import pytest

from unspool.training.loader import LEDGER, find_gaps, ledger_line, read_ledger

from .stage_runs import LONG, SHORT, STAGE

SIZES = {"long": 3, "short": 2}


def entries(*rows: dict[str, list[int]]) -> list[dict]:
    return [{"step": number, "rows": of_step} for number, of_step in enumerate(rows, 1)]


GOOD = entries({"long": [2, 0]}, {"long": [1], "short": [1]}, {"short": [0], "long": [1]})


def test_a_line_names_rows_by_set_in_the_order_they_came():
    line = ledger_line(7, [[("long", 3)], [("short", 4), ("short", 1)], [("long", 0)]], skipped="its loss")
    assert line == '{"step":7,"rows":{"long":[3,0],"short":[4,1]},"skipped":"its loss"}\n'
    assert "skipped" not in json.loads(ledger_line(1, []))


def test_a_ledger_without_gaps():
    assert find_gaps(GOOD, SIZES, steps=3) == []


@pytest.mark.parametrize(
    ("broken", "steps", "said"),
    [
        (GOOD[:2], 3, "line 3"),
        ([*GOOD, GOOD[-1]], 3, "line 4"),
        ([GOOD[0], GOOD[0], *GOOD[1:]], 3, "line 2"),
        ([GOOD[1], GOOD[0], GOOD[2]], 3, "line 1"),
        (
            entries({"long": [2, 0]}, {"long": [2], "short": [1]}, {"short": [0]}),
            3,
            "dataset long: a row appears twice in ep",
        ),
        (
            entries({"short": [0, 1]}, {"short": [1, 0]}, {"short": [1, 1]}),
            3,
            "dataset short: a row appears twice in epoch 3",
        ),
        (entries({"long": [2, 7]}), 1, "dataset long"),
    ],
)
def test_gaps_and_repeats_are_found(broken, steps, said):
    problems = find_gaps(broken, SIZES, steps=steps)
    assert any(said in problem for problem in problems), problems


def test_a_published_stage_has_a_ledger_without_gaps(never_killed):
    found = read_ledger(never_killed / LEDGER)
    assert find_gaps(found, {"long": len(LONG), "short": len(SHORT)}, steps=STAGE.steps) == []
    assert sum(len(rows) * (2 if name == "long" else 1) for one in found for name, rows in one["rows"].items()) == 24


def test_a_large_ledger_is_small():
    line = ledger_line(4999, [[("books-64k", 123_456)]] * 40 + [[("short", 654_321)]] * 24)
    assert 5000 * len(line) < 3e6
