import math

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from unspool.base.errors import ConfigError
from unspool.position.scaling import Abf, Harpe, Position, RopeShape, Unchanged, frequencies

SHAPE = RopeShape(rotary_dim=8, num_kv_heads=4, base=10_000.0)


def test_frequencies_are_powers_of_the_base_computed_by_hand():
    table = frequencies(np.array([10_000.0, 16.0]), 4)

    assert table.dtype == np.float32
    assert table.tolist() == [[1.0, np.float32(0.01)], [1.0, 0.25]]


def test_frequencies_are_rounded_to_float32_only_once():
    """At a base of 8 million and d = 128 a float32 power is off by more than the last bit."""
    found = frequencies(np.array([8e6]), 128)[0]

    exact = [math.pow(8e6, -2 * index / 128) for index in range(64)]
    assert found.tolist() == [float(np.float32(value)) for value in exact]


def test_each_line_of_frequencies_is_that_of_its_base_alone():
    bases = np.array([1e4, 5e5, 1e7])

    together = frequencies(bases, 16)

    for line, base in zip(together, bases, strict=True):
        assert np.array_equal(line, frequencies(np.array([base]), 16)[0])
    assert len(np.unique(together[:, 1])) == 3


def test_unchanged_keeps_the_models_base_and_abf_replaces_it():
    assert Unchanged().bases(SHAPE).tolist() == [10_000.0]
    assert Abf(method="abf", base=8e6).bases(SHAPE).tolist() == [8e6]


def test_harpe_spreads_bases_evenly_over_kv_heads_descending_unless_told():
    options = {"method": "harpe", "low": 10_000.0, "high": 40_000.0}

    assert Harpe(**options).bases(SHAPE).tolist() == [4e4, 3e4, 2e4, 1e4]
    assert Harpe(**options, order="ascending").bases(SHAPE).tolist() == [1e4, 2e4, 3e4, 4e4]


def test_harpe_refuses_a_single_kv_head_instead_of_using_one_base_in_silence():
    shape = RopeShape(rotary_dim=8, num_kv_heads=1, base=10_000.0)

    with pytest.raises(ConfigError, match=r"single KV head.*method abf"):
        Harpe(method="harpe", low=1e4, high=1e5).bases(shape)


@pytest.mark.parametrize(
    ("plain", "wanted"),
    [
        ({"method": "abf", "base": 1}, "greater than 1"),
        ({"method": "abf"}, "base"),
        ({"method": "harpe", "low": 5e5, "high": 1e4}, "low must not exceed high, here 500000 and 10000"),
        ({"method": "harpe", "low": 1e4, "high": float("inf")}, "finite"),
        ({"method": "yarn", "factor": 4}, "'unchanged', 'abf', 'harpe'"),
    ],
)
def test_impossible_settings_are_refused(plain, wanted):
    with pytest.raises(ValidationError, match=wanted):
        TypeAdapter(Position).validate_python(plain)
