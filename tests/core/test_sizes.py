"""Sizes and counts as people write and read them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.core.sizes import format_count, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64K", 65_536),
        ("64k", 65_536),
        ("20B", 20 << 30),
        ("1T", 1 << 40),
        ("0.5K", 512),
        ("1.5M", 3 << 19),
        (" 4 M ", 4 << 20),
        ("8e6", 8_000_000),
        ("1_000", 1000),
        (4096, 4096),
        (8e6, 8_000_000),
    ],
)
def test_units_are_powers_of_two_and_plain_numbers_are_themselves(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("64Q", "unit 'Q' is not known; units are K, M, B and T"),
        ("64KB", "unit 'KB' is not known"),
        ("many", "write a size such as 64K"),
        ("", "write a size such as 64K"),
        ("-4K", "write a size such as 64K"),
        (None, "write a size such as 64K"),
        (True, "write a size such as 64K"),
        ([1], "write a size such as 64K"),
        ("0", "between 1 and 8192T"),
        ("9000T", "between 1 and 8192T"),
        (float("inf"), "write a size such as 64K"),
        ("1.5", "1.5 is not a whole number"),
        ("0.3K", "0.3K is not a whole number"),
    ],
)
def test_an_invalid_size_is_refused_with_the_allowed_values(value, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_size(value)


@pytest.mark.parametrize(("size", "text"), [(65_536, "64K"), (1000, "1000"), (1536, "1536"), (3 << 20, "3M"), (1, "1")])
def test_sizes_are_spelled_as_short_as_is_exact(size, text):
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (7, "7"),
        (0.25, "0.25"),
        (999, "999"),
        (999.7, "1K"),
        (1000, "1K"),
        (1234, "1.23K"),
        (999_499, "999K"),
        (999_999, "1M"),
        (15_230_000, "15.2M"),
        (999_999_999, "1B"),
        (20 << 30, "21.5B"),
        (999_999_999_999, "1T"),
        (5e15, "5000T"),
    ],
)
def test_counts_are_rounded_to_three_digits_of_the_right_unit(count, text):
    assert format_count(count) == text


@given(st.floats(1, 1e18))
def test_a_rounded_count_is_near_the_count_and_has_no_exponent(count):
    number, unit = re.fullmatch(r"([0-9.]+)([KMBT]?)", format_count(count)).groups()
    factor = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[unit]
    assert float(number) * factor == pytest.approx(count, rel=0.0051)
