"""The breakdown of a piece of work adds up."""

import time

from unspool.core.phases import Phases, process_seconds


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_and_the_rest_is_shown():
    clock = Clock()
    phases = Phases(clock)
    for _ in range(2):
        with phases("load"):
            clock.now += 1.5
    with phases("nothing"):
        pass
    clock.now += 1
    phases.add_before("start-up", 2.0)

    assert phases.text() == "6.0 s (start-up 2.0, load 3.0, other 1.0)"
    assert phases.rounded() == {"start-up": 2.0, "load": 3.0, "nothing": 0.0, "total": 6.0}


def test_a_phase_that_fails_is_counted():
    clock = Clock()
    phases = Phases(clock)
    try:
        with phases("load"):
            clock.now += 2
            raise ValueError
    except ValueError:
        pass
    assert phases.seconds == {"load": 2.0}


def test_the_age_of_this_process_grows():
    first = process_seconds()
    time.sleep(0.05)
    second = process_seconds()
    assert first is not None and second is not None
    assert 0 < first < second < first + 60
