"""An entry, or the name that was probably meant."""

import pytest

from unspool.core.config import lookup, nearest
from unspool.core.errors import ConfigError

SUITES = {"niah": 1, "kv": 2, "loss": 3}


def test_an_entry_is_found_by_its_name():
    assert lookup(SUITES, "kv", kind="suite") == 2


def test_a_misspelled_name_is_refused_with_the_nearest_and_all_known_names():
    with pytest.raises(ConfigError) as error:
        lookup(SUITES, "niha", kind="suite")
    assert str(error.value) == "suite 'niha' is not known. Did you mean 'niah'? Known: kv, loss, niah."


def test_no_guess_is_better_than_a_wild_one():
    with pytest.raises(ConfigError) as error:
        lookup(SUITES, "ruler", kind="suite")
    assert str(error.value) == "suite 'ruler' is not known. Known: kv, loss, niah."


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("lenght", "length"),
        ("weightdecay", "weight_decay"),
        ("learning_rate", None),
        ("tokens_per_batch", None),
        ("", None),
    ],
)
def test_only_spellings_that_look_alike_are_suggested(name, guess):
    assert nearest(name, ["length", "weight_decay", "lr", "batch", "limit"]) == guess
