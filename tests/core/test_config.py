"""What every config class promises."""

import pytest
from pydantic import Field, ValidationError

from unspool.core.config import Config


class Example(Config):
    from_: str = Field("books", alias="from")
    share: float = 0.5


def test_an_unknown_key_is_refused():
    with pytest.raises(ValidationError, match="extra_forbidden"):
        Example.model_validate({"shair": 0.5})


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Example().share = 0.7


@pytest.mark.parametrize("share", [float("nan"), float("inf")])
def test_values_that_are_not_numbers_are_refused(share):
    with pytest.raises(ValidationError, match="finite_number"):
        Example(share=share)


def test_a_key_is_known_by_its_name_in_files_and_in_code():
    assert Example.model_validate({"from": "wiki"}) == Example(from_="wiki")
