"""Losses, gradients and updated weights of 2 and 4 ranks are those of one; what is broken on purpose is not."""

import pytest

from .cases import errors, one_rank
from .jobs import BROKEN, CASES


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_rank_does(answers, name):
    case = CASES[name]
    found, _ = answers[case.world][name]

    off = errors(found, one_rank(case))
    assert max(off.values()) < 1, off


@pytest.mark.parametrize("name", CASES)
def test_a_second_run_has_the_same_bits(answers, name):
    _, same = answers[CASES[name].world][name]

    assert same


@pytest.mark.parametrize("name", BROKEN)
def test_broken_variants_are_noticed(answers, name):
    case = CASES[BROKEN[name][0]]
    found = answers[case.world][name]

    off = errors(found, one_rank(case, steps=1))
    assert max(off["gradients"], off["losses"]) > 100, f"{name} would go unnoticed: {off}"
