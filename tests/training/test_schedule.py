import math

import pytest

from factory import build_stage
from unspool.training.schedule import learning_rate


def rates(steps: int, **changes) -> list[float]:
    stage = build_stage(tokens=64 * steps, lr=2.0, **changes)
    assert stage.steps == steps
    return [learning_rate(stage, step) for step in range(1, steps + 1)]


def test_rates_are_those_computed_by_hand():
    found = rates(10, warmup_ratio=0.2, min_lr_ratio=0.1)

    # Two steps up to the peak, then eight down the cosine from 1 to a tenth.
    shares = [0.5, 1.0] + [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(1, 9)]
    assert found == pytest.approx([2.0 * share for share in shares])
    assert found[5] == pytest.approx(2.0 * 0.55)
    assert found[-1] == pytest.approx(0.2)


def test_the_peak_is_reached_once_and_never_exceeded():
    found = rates(40, warmup_ratio=0.25)

    assert max(found) == found[9] == 2.0
    assert found[:10] == sorted(found[:10])
    assert found[9:] == sorted(found[9:], reverse=True)
    assert min(found) > 0


def test_without_warm_up_the_cosine_starts_at_once_and_without_floor_it_ends_at_nothing():
    found = rates(4, warmup_ratio=0, min_lr_ratio=0)

    assert found == pytest.approx([2.0 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(1, 5)])
    assert found[-1] == pytest.approx(0)


def test_a_floor_of_one_is_a_constant_rate():
    assert rates(5, warmup_ratio=0, min_lr_ratio=1) == pytest.approx([2.0] * 5)


def test_a_linear_schedule_has_the_rates_computed_by_hand():
    found = rates(10, schedule="linear", warmup_ratio=0.2, min_lr_ratio=0.1)

    # Two steps up to the peak, then eight down a line from 1 to a tenth, 0.9 / 8 per step.
    assert found == pytest.approx([2.0 * share for share in (0.5, 1.0, *(1 - 0.1125 * step for step in range(1, 9)))])
    assert found[:2] == [1.0, 2.0], "warm-up ends at the peak"
    assert found[5] == pytest.approx(2.0 * 0.55), "halfway down"
    assert found[-1] == pytest.approx(0.2), "the last step has the final rate"


def test_a_linear_schedule_without_warm_up_and_floor_ends_at_zero():
    assert rates(4, schedule="linear", warmup_ratio=0, min_lr_ratio=0) == pytest.approx([1.5, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_stage_that_is_almost_all_warm_up_reaches_its_final_rate_in_the_last_step(schedule):
    found = rates(10, schedule=schedule, warmup_ratio=0.9, min_lr_ratio=0.25)

    assert found == pytest.approx([2.0 * step / 9 for step in range(1, 10)] + [0.5])
