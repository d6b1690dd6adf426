"""Check parts of a recipe that a user wrote elsewhere, such as on the command line, with a recipe's error messages."""

from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from unspool.core.errors import ConfigError
from unspool.recipe.json_schema import message, validation_problems
from unspool.recipe.schema import Recipe
from unspool.recipe.yaml_lines import Marks, Place
from unspool.rope.methods import AnyRopeMethod
from unspool.rope.tables import RopeMethod
from unspool.training.config import StageConfig


def check_rope(value: dict[str, Any], where: str) -> RopeMethod:
    """Return the RoPE method of a mapping; ConfigError that begins with `where` if a key or value is wrong."""
    try:
        found: RopeMethod = TypeAdapter[Any](AnyRopeMethod).validate_python(value)
    except ValidationError as error:
        raise ConfigError(_explain({"rope": value}, ("stages", 0, "rope"), where)) from error
    return found


def check_stage(value: dict[str, Any], where: str) -> StageConfig:
    """Return the stage of a mapping; ConfigError that begins with `where` if a key or value is wrong."""
    try:
        return StageConfig.model_validate(value)
    except ValidationError as error:
        raise ConfigError(_explain(value, ("stages", 0), where)) from error


def _explain(stage: dict[str, Any], place: Place, where: str) -> str:
    """Return the first problem of a stage at `place`, which is left out of the message."""
    data = {"stages": [stage]}
    try:
        Recipe.model_validate(data)
    except ValidationError as error:
        # The other problems are the missing keys of a recipe.
        for problem in validation_problems(error, data):
            if problem.place[: len(place)] == place:
                shown = replace(problem, place=problem.place[len(place) :], where=where)
                return message(shown, Marks(where), data["stages"][0] if len(place) == 2 else stage["rope"])
    raise AssertionError("a stage was refused without a message")
