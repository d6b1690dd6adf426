import math

import pytest

from unspool.core.stats import wilson
from unspool.evals.summary import accuracy_cells, loss_cells


def sample(score: float, *, length: int = 256, depth: float | None = None, suite: str = "niah") -> dict:
    return {"suite": suite, "length": length, "depth": depth, "score": score}


def test_cells_cover_all_depths_together_and_each_alone():
    samples = [
        sample(1.0, depth=0.0),
        sample(0.0, depth=0.0),
        sample(1.0, depth=1.0),
        sample(0.0, depth=1.0, length=512),
        sample(0.0, suite="key_value"),
    ]

    cells = accuracy_cells("niah", 256, [0.0, 0.5, 1.0], samples)

    assert [(cell["depth"], cell["value"], cell["n"]) for cell in cells] == [
        (None, pytest.approx(2 / 3), 3),
        (0.0, 0.5, 2),
        (0.5, None, 0),
        (1.0, 1.0, 1),
    ]
    assert all(cell["metric"] == "accuracy" and cell["length"] == 256 for cell in cells)
    assert (cells[1]["low"], cells[1]["high"]) == wilson(1, 2)


def test_what_was_not_scored_is_null_not_zero():
    (cell,) = accuracy_cells("key_value", 256, [], [])

    assert cell["n"] == 0
    assert cell["value"] is cell["low"] is cell["high"] is None


def window(*values: float, n: int = 64, length: int = 128) -> dict:
    losses = [{"from": 64 * at, "to": 64 * at + 64, "value": value, "n": n} for at, value in enumerate(values)]
    return {"suite": "perplexity", "length": length, "losses": losses}


def test_loss_cells_average_tokens_and_take_their_interval_from_windows():
    cells = loss_cells("perplexity", 128, [window(3.0, 2.0), window(5.0, 2.0), window(9.0, length=64)])

    assert [(cell["from"], cell["to"], cell["value"], cell["n"]) for cell in cells] == [
        (0, 64, 4.0, 128),
        (64, 128, 2.0, 128),
    ]
    # Standard deviation of (3, 5) is √2; over two windows, 12.706·√2/√2 by Student's t with one degree of freedom.
    assert (cells[0]["low"], cells[0]["high"]) == pytest.approx((4 - 12.7062, 4 + 12.7062), abs=1e-4)
    assert cells[1]["low"] == cells[1]["high"] == 2.0


def test_one_window_gives_a_mean_without_an_interval():
    cells = loss_cells("perplexity", 128, [window(3.0, 2.0)])

    assert [cell["value"] for cell in cells] == [3.0, 2.0]
    assert all(cell["low"] is None and cell["high"] is None for cell in cells)
    assert not any(math.isnan(cell["value"]) for cell in cells)
