"""`--position` of `unspool eval`: a method of a recipe's stages, tried without training."""

from dataclasses import replace
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from unspool.base.errors import ConfigError
from unspool.position.scaling import Position
from unspool.recipes.lines import Marks
from unspool.recipes.problems import sentence, validation_problems
from unspool.recipes.schema import Recipe

OPTION = "--position"
# Where a recipe has it, so that mistakes are told in the recipe's words.
PLACE = ("stages", 0, "position")


def read_position(text: str) -> Position:
    """`yarn`, or `{method: abf, base: 8e6}`."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{OPTION} {text!r} cannot be read; write a method, or {{method: abf, base: 8e6}}."
        ) from error
    value = {"method": value} if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ConfigError(f"{OPTION} {text!r}: write a method, such as yarn, or {{method: abf, base: 8e6}}.")
    try:
        found: Position = TypeAdapter[Any](Position).validate_python(value)
    except ValidationError as error:
        raise ConfigError(_told(value)) from error
    return found


def _told(value: dict[str, Any]) -> str:
    data = {"stages": [{"position": value}]}
    try:
        Recipe.model_validate(data)
    except ValidationError as error:
        # All else that a recipe has is missing here.
        for problem in validation_problems(error, data):
            if problem.place[:3] == PLACE:
                own = replace(problem, place=problem.place[3:], where=OPTION)
                return sentence(own, Marks(OPTION), value)
    raise AssertionError("a position was refused without a sentence")
