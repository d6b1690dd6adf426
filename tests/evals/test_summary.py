import math

import pytest
from pydantic import ValidationError

from unspool.core.stats import wilson
from unspool.evals.config import eval_adapter
from unspool.evals.suites import suite_of
from unspool.evals.summary import accuracy_cells, loss_cells

K = 1 << 10


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


def ruler_rate(by_length: dict[int, float], **settings) -> dict:
    """The adaptation rate of a RULER run whose one task scored this at each length."""
    config = eval_adapter().validate_python({"suite": "ruler", "lengths": list(by_length), "tasks": ["vt"], **settings})
    samples = [
        {"suite": "ruler", "task": "vt", "length": length, "depth": None, "score": value}
        for length, value in by_length.items()
        for _ in range(2)
    ]
    suite = suite_of(config)
    return suite.summary(config, suite.cells(config, samples), samples)["adaptation_rate"]


@pytest.mark.parametrize(
    ("scores", "printed"),
    [
        # Untie the Knots, Table 5 (4K to 128K) and the rates of Table 1.
        ([0.9059, 0.8501, 0.8201, 0.8050, 0.7920, 0.7503], "93%"),  # Qwen2-UtK-base (7B)
        ([0.9282, 0.8579, 0.8312, 0.7816, 0.7364, 0.5475], "70%"),  # Qwen2-CT (7B)
        ([0.950, 0.9378, 0.9467, 0.9326, 0.9057, 0.8445], "91%"),  # Qwen2-UtK-base (72B); 94% is printed
    ],
)
def test_the_adaptation_rate_is_that_of_untie_the_knots(scores, printed):
    rate = ruler_rate(dict(zip([4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K], scores, strict=True)))
    assert (rate["to"], rate["from"]) == (128 * K, 32 * K)
    assert f"{rate['value']:.0%}" == printed


def test_other_lengths_can_be_named_and_the_default_is_the_longest_over_the_shortest():
    scores = {4 * K: 0.8, 32 * K: 0.5, 128 * K: 0.25}
    named = ruler_rate(scores, target_length="32K", reference_length="4K")
    assert (named["to"], named["from"], named["value"]) == (32 * K, 4 * K, pytest.approx(0.625))
    assert ruler_rate(scores, reference_length="4K")["value"] == pytest.approx(0.25 / 0.8)
    other = ruler_rate({4 * K: 0.8, 64 * K: 0.4})
    assert (other["to"], other["from"], other["value"]) == (64 * K, 4 * K, pytest.approx(0.5))
    with pytest.raises(ValidationError, match="target_length 64K is not among lengths, which are 4K, 32K, 128K"):
        ruler_rate(scores, target_length="64K")
