"""Sizes in a recipe: any spelling people use, and never a crash."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from unspool.core.sizes import LARGEST, UNITS, Size, format_size, parse_size
from unspool.recipe.yaml_lines import read_yaml

size = TypeAdapter(Size)


@given(st.integers(1, LARGEST))
def test_a_size_is_the_same_after_spelling_and_reading(number):
    assert parse_size(format_size(number)) == number
    assert parse_size(number) == number


@given(st.integers(1, 999), st.sampled_from(sorted(UNITS)))
def test_units_are_powers_of_1024_in_either_case(number, unit):
    expected = number * 1024 ** " KMBT".index(unit or " ")
    for spelled in (f"{number}{unit}", f"{number}{unit.lower()}", f"{number} {unit}"):
        value, _, _ = read_yaml(f"x: {spelled}", "test")
        assert size.validate_python(value["x"]) == expected


@given(st.integers(1, 9), st.integers(0, 12))
def test_exponents_read_as_numbers(number, exponent):
    for spelled in (f"{number}e{exponent}", f"{number}E+{exponent}", f"{number}.0e{exponent}"):
        value, _, _ = read_yaml(f"x: {spelled}", "test")
        assert size.validate_python(value["x"]) == number * 10**exponent


@given(st.one_of(st.text(), st.floats(), st.integers(), st.booleans(), st.none(), st.lists(st.integers())))
@example("1e999")
@example("9e999T")
@example("0")
@example(float("inf"))
@example(1 << 60)
def test_anything_is_a_whole_positive_size_or_refused(value):
    try:
        found = size.validate_python(value)
    except ValidationError as error:
        assert {details["type"] for details in error.errors()} == {"value_error"}
    else:
        assert 1 <= found <= LARGEST


@pytest.mark.parametrize("value", ["64Q", "K", "", "1.5", "-3", "64 K B", "0x10", True])
def test_these_are_no_sizes(value):
    with pytest.raises(ValueError):
        parse_size(value)
