"""From what pydantic refuses to sentences a person can act on.

In: a ValidationError and the data it is about. Out: one `Problem` per mistake, at its place in
the file. Promise: no wording of pydantic's own reaches the user; what is allowed comes from the
recipe's schema, and what a config class refuses by itself comes in that class's words.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from unspool.base.errors import ConfigError
from unspool.base.lookup import nearest
from unspool.recipes.lines import Marks, Place, Problem
from unspool.recipes.shape import (
    Shape,
    child,
    describe,
    form_of,
    forms,
    keys,
    recipe_schema,
    shape_at,
    tag_of,
    value_at,
)


def refuse(problems: Sequence[Problem], marks: Marks, data: Any) -> None:
    """Raise one ConfigError with a sentence per problem, in the order of the file."""
    unique: dict[tuple[Place, str | None], Problem] = {}
    for problem in problems:
        unique.setdefault((problem.place, problem.where), problem)
    if unique:
        ordered = sorted(unique.values(), key=lambda problem: marks.line(problem.place))
        raise ConfigError("\n".join(sentence(problem, marks, data) for problem in ordered))


def sentence(problem: Problem, marks: Marks, data: Any) -> str:
    """`file:line: key = value: what is wrong and what is allowed.`"""
    where = problem.where or marks.where(problem.place)
    key = ".".join(map(str, problem.place))
    value = _spell(value_at(problem.place, data)) if problem.show_value else ""
    return ": ".join(part for part in (where, key + value, problem.text) if part)


def _spell(value: Any) -> str:
    if value is None:
        return " is empty"
    if isinstance(value, dict | list):
        return ""
    if isinstance(value, bool):
        return f" = {str(value).lower()}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and text == text.strip() != ""
    return f" = {text if plain else repr(text)}"


def validation_problems(error: ValidationError, data: Any) -> Iterator[Problem]:
    placed = [(details, _place(details, data)) for details in error.errors(include_url=False)]
    unknown = [place for details, place in placed if place and details["type"] == "extra_forbidden"]
    misspelt = {(*place[:-1], nearest(str(place[-1]), _allowed_keys(place, data))) for place in unknown}
    for details, place in placed:
        # A misspelt key is one mistake, although the right one is missing as well.
        if place and not (details["type"] == "missing" and place in misspelt):
            yield _problem(details, place, data)


# Whether a default could be made says nothing about the recipe.
IGNORED = {"default_factory_not_called"}
# A value tried against each member of a union fails once per member; these failures only say
# that it was not meant to be that member.
WRONG_MEMBER = {"string_type", "dict_type", "model_type", "model_attributes_type"}


def _place(details: ErrorDetails, data: Any) -> Place | None:
    """Where in the data; pydantic's own path also names the members of unions. None: not a mistake of its own."""
    shape: Shape | None = recipe_schema()
    place: list[str | int] = []
    loc = [part for part in details["loc"] if part != "[key]"]
    if details["type"] in IGNORED:
        return None
    while loc:
        value = value_at(tuple(place), data)
        if shape is not None and (tag_of(shape) or len(forms(shape)) > 1):
            loc.pop(0)
            if not loc and isinstance(value, dict) and details["type"] in WRONG_MEMBER and not tag_of(shape):
                return None
            shape = form_of(shape, value)
            continue
        key = loc.pop(0)
        place.append(key)
        shape = None if shape is None else child(form_of(shape, value), key)
    return tuple(place)


def _problem(details: ErrorDetails, place: Place, data: Any) -> Problem:
    kind = details["type"]
    shape = shape_at(place, data)
    tag = tag_of(shape) if shape else None
    if kind == "extra_forbidden":
        return Problem(place=place, text=unknown_key(str(place[-1]), _allowed_keys(place, data)))
    if details["loc"][-1] == "[key]":
        return Problem(place=place, text=f"the key {place[-1]!r} must be a whole number.")
    if kind == "missing":
        return Problem(place=place, text=f"missing; write {_wanted(shape)}.")
    if kind == "union_tag_not_found" and tag:
        return Problem(place=(*place, tag[0]), text=f"missing; write one of {', '.join(tag[1])}.")
    if kind == "union_tag_invalid" and tag:
        value = value_at((*place, tag[0]), data)
        return Problem(place=(*place, tag[0]), text=_not_one_of(value, list(tag[1])), show_value=True)
    if kind == "value_error":
        return _own_words(str(details.get("ctx", {}).get("error", "")), place, data)
    if kind == "literal_error" and shape:
        return Problem(place=place, text=_not_one_of(value_at(place, data), _choices(shape)), show_value=True)
    hint = _quotes_hint(value_at(place, data), kind)
    return Problem(place=place, text=f"must be {_wanted(shape)}{hint}.", show_value=True)


def _allowed_keys(place: Place, data: Any) -> list[str]:
    """The keys that may stand where `place` ends."""
    holder = place[:-1]
    return keys(form_of(shape_at(holder, data) or {}, value_at(holder, data))) or []


def unknown_key(key: str, allowed: Sequence[str]) -> str:
    guess = nearest(key, allowed)
    hint = f"; did you mean {guess!r}?" if guess else "."
    return f"unknown key{hint} Allowed here: {', '.join(allowed)}."


def _own_words(text: str, place: Place, data: Any) -> Problem:
    """What a config class says of itself. Where it checks several keys, its sentence begins with the one at fault."""
    first = tuple(text.split(" ", 1)[0].rstrip(":").split("."))
    value = value_at(place, data)
    if isinstance(value, dict) and value_at(first, value) is not None:
        place = (*place, *first)
    return Problem(place=place, text=f"{text.rstrip('.')}.", show_value=True)


def _not_one_of(value: Any, choices: list[str]) -> str:
    guess = nearest(value, choices) if isinstance(value, str) else None
    hint = f"not known; did you mean {guess!r}?" if guess else "not known."
    return f"{hint} Allowed: {', '.join(choices)}."


def _choices(shape: Shape) -> list[str]:
    return [str(choice) for form in forms(shape) for choice in form.get("enum", [form.get("const")])]


def _wanted(shape: Shape | None) -> str:
    if shape is None:
        return "another value"
    note = shape.get("description")
    return describe(shape) + (f" ({note})" if note and "\n" not in note and "properties" not in shape else "")


def _quotes_hint(value: Any, kind: str) -> str:
    spelled = str(value).lower() if isinstance(value, bool) else value
    return f"; put it in quotes: '{spelled}'" if kind == "string_type" and isinstance(value, bool | int | float) else ""


def misplaced_booleans(shape: Shape, value: Any, place: Place = ()) -> Iterator[Problem]:
    """Pydantic takes `true` for 1; in a recipe it is a mistake wherever a number is asked for."""
    form = form_of(shape, value)
    if isinstance(value, bool) and {option.get("type") for option in forms(shape)} <= {"number", "integer"}:
        yield Problem(place=place, text=f"must be {_wanted(shape)}.", show_value=True)
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        below = child(form, key)
        if below is not None:
            yield from misplaced_booleans(below, item, (*place, key))
