"""The recipe's JSON schema, and messages about values that it does not allow.

Editors (`unspool recipes schema`), error messages and `--set` paths all use this schema. A shape is a node of the
schema; a form is one of its alternatives.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from unspool.core.config import did_you_mean, nearest, registry_version
from unspool.core.errors import ConfigError
from unspool.core.formatting import clip
from unspool.core.http_client import hide_credentials
from unspool.recipe.schema import Recipe
from unspool.recipe.yaml_lines import Marks, Place, Problem

Shape = dict[str, Any]

MOST_SHOWN = 200  # characters shown of a value
SIZE_TYPES = {"integer", "number", "string"}


def recipe_schema() -> Shape:
    """Return the JSON schema of recipes, with every kind, method and strategy that is registered now."""
    return _build_schema(registry_version())


def editor_schema() -> Shape:
    """The JSON schema of recipe files, including those that extend another recipe (extends.py)."""
    schema = recipe_schema()
    names = {
        "type": "array",
        "items": {"type": "string"},
        "description": "Stages of the extended recipe to keep, by name.",
    }
    own = {
        "extends": {"type": "string", "description": "Bundled recipe or file whose values this recipe changes."},
        "set": {
            "type": "object",
            "description": "Single values to change, by path, such as stages.0.lr: 2e-5.",
            "additionalProperties": {},
        },
        "stages": {"anyOf": [schema["properties"]["stages"], names], "description": "Training stages, in order."},
    }
    needed = {"if": {"required": ["extends"]}, "else": {"required": schema["required"]}}
    return {**schema, "properties": schema["properties"] | own, "required": ["name"], **needed}


@lru_cache(maxsize=1)
def _build_schema(version: object) -> Shape:
    schema = Recipe.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def forms(shape: Shape) -> list[Shape]:
    """List the alternatives of a shape, with references resolved and without `null`."""
    if "$ref" in shape:
        return forms(recipe_schema()["$defs"][shape["$ref"].rsplit("/", 1)[-1]])
    nested = shape.get("anyOf") or shape.get("oneOf")
    if nested:
        return [form for option in nested for form in forms(option)]
    return [] if shape.get("type") == "null" else [shape]


def tag_of(shape: Shape) -> tuple[str, dict[str, str]] | None:
    """Return the key that selects the form, such as `kind`, and its values; None if there is none."""
    found = shape.get("discriminator")
    return (found["propertyName"], found["mapping"]) if found else None


def form_of(shape: Shape, value: Any) -> Shape:
    """Choose the form of a shape that fits `value` best."""
    tag = tag_of(shape)
    if tag and isinstance(value, dict):
        key, mapping = tag
        ref = mapping.get(str(value.get(key)))
        # Without a known tag, all keys of all forms are possible.
        if ref:
            return forms({"$ref": ref})[0]
        found = {name: below for form in forms(shape) for name, below in form.get("properties", {}).items()}
        return {"type": "object", "properties": found}
    kind = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else None
    options = forms(shape)
    return next((form for form in options if kind and form.get("type") == kind), options[0])


def keys(form: Shape) -> list[str] | None:
    """List the keys that a mapping may have; None if any name is allowed, or for a form that is not a mapping."""
    return sorted(form["properties"]) if "properties" in form else None


def child(form: Shape, key: str | int) -> Shape | None:
    """Return the shape below `key`; None if the key is not allowed."""
    if form.get("type") == "array" and isinstance(key, int):
        fixed = form.get("prefixItems", [])
        return fixed[key] if key < len(fixed) else form.get("items")
    if "properties" in form:
        below: Shape | None = form["properties"].get(key)
        return below
    free = form.get("additionalProperties")
    return free if isinstance(free, dict) else None


def shape_at(place: Place, data: Any) -> Shape | None:
    """Return the shape at a place in `data`."""
    shape: Shape | None = recipe_schema()
    for key in place:
        if shape is None:
            return None
        shape = child(form_of(shape, data), key)
        data = value_at((key,), data)
    return shape


def value_at(place: Place, data: Any) -> Any:
    """Return the value at a place; None if there is none."""
    for key in place:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def describe(shape: Shape) -> str:
    """Describe the allowed values, such as `a number above 0`, `one of concat, truncate, best_fit`."""
    tag = tag_of(shape)
    if tag:
        return f"a mapping with {tag[0]}: one of {', '.join(tag[1])}"
    options = forms(shape)
    if {form.get("type") for form in options} == SIZE_TYPES:
        return "a size such as 64K, 20B, 8e6 or 4096"
    return " or ".join(dict.fromkeys(_describe_form(form) for form in options))


def _describe_form(form: Shape) -> str:
    if "enum" in form:
        return f"one of {', '.join(form['enum'])}"
    if "properties" in form:
        return f"a mapping with the keys {', '.join(form['properties'])}"
    if form.get("type") == "object":
        return f"a mapping from names to {describe(form.get('additionalProperties', {}))}"
    if form.get("type") == "array":
        return _describe_list(form)
    names = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
    words = {
        "exclusiveMinimum": "above {}",
        "minimum": "of at least {}",
        "exclusiveMaximum": "below {}",
        "maximum": "of at most {}",
        "maxLength": "of at most {} characters",
        "pattern": "made of letters, digits, '-', '_' and '.', beginning with a letter or digit",
    }
    limits = [text.format(form[key]) for key, text in words.items() if key in form]
    return " ".join([names.get(form.get("type", ""), "a value"), " and ".join(limits)]).strip()


def _describe_list(form: Shape) -> str:
    fixed = form.get("prefixItems")
    if fixed:
        return f"a list of {len(fixed)} values, each {describe(fixed[0])}"
    least = " with at least one entry" if form.get("minItems") else ""
    return f"a list{least}, each {describe(form.get('items', {}))}"


def refuse(problems: Sequence[Problem], marks: Marks, data: Any) -> None:
    """Raise one ConfigError with a line per problem, in the order of the file."""
    unique: dict[tuple[Place, str | None], Problem] = {}
    for problem in problems:
        unique.setdefault((problem.place, problem.where), problem)
    if unique:
        ordered = sorted(unique.values(), key=lambda problem: marks.line(problem.place))
        raise ConfigError("\n".join(message(problem, marks, data) for problem in ordered))


def message(problem: Problem, marks: Marks, data: Any) -> str:
    """Format a problem: `file:line: key = value: what is wrong and what is allowed.`"""
    where = problem.where or marks.where(problem.place)
    value = _spell(value_at(problem.place, data)) if problem.show_value else ""
    return ": ".join(part for part in (where, dotted(problem.place) + value, problem.text) if part)


def dotted(place: Place) -> str:
    return ".".join(map(str, place))


def _spell(value: Any) -> str:
    if value is None:
        return " is empty"
    if isinstance(value, dict | list):
        return ""
    if isinstance(value, bool):
        return f" = {str(value).lower()}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    # Addresses may hold passwords.
    text = clip(hide_credentials(text) if re.search(r"://|:.*@", text) else text, MOST_SHOWN)
    plain = text.isprintable() and text == text.strip() != ""
    return f" = {text if plain else repr(text)}"


def validation_problems(error: ValidationError, data: Any) -> Iterator[Problem]:
    """Turn pydantic's errors into messages that a user can act on."""
    placed = [(details, _place(details, data)) for details in error.errors(include_url=False)]
    unknown = [place for details, place in placed if place and details["type"] == "extra_forbidden"]
    misspelled = {(*place[:-1], nearest(str(place[-1]), _allowed_keys(place, data))) for place in unknown}
    for details, place in placed:
        # A misspelled key is one mistake, although the correct key is missing too.
        if place and not (details["type"] == "missing" and place in misspelled):
            yield _problem(details, place, data)


# A consequence of another error.
IGNORED = {"default_factory_not_called"}
# A value fails once per member of a union. Such a failure only means that the value is not this member.
WRONG_MEMBER = {"string_type", "dict_type", "model_type", "model_attributes_type"}


def _place(details: ErrorDetails, data: Any) -> Place | None:
    """The place in the data; None if the problem follows from another error. Pydantic's place names union members."""
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
    if details["loc"][-1] == "[key]" and kind == "literal_error":
        expected = details["ctx"]["expected"].replace("'", "")
        return Problem(place=place, text=f"the key {place[-1]!r} is not known; write {expected}.")
    if details["loc"][-1] == "[key]":
        return Problem(place=place, text=f"the key {place[-1]!r} must be a whole number.")
    if kind == "missing":
        return Problem(place=place, text=f"missing; write {_wanted(shape)}")
    if kind == "union_tag_not_found" and tag:
        return Problem(place=(*place, tag[0]), text=f"missing; write one of {', '.join(tag[1])}.")
    if kind == "union_tag_invalid" and tag:
        value = value_at((*place, tag[0]), data)
        return Problem(place=(*place, tag[0]), text=_not_one_of(value, list(tag[1])), show_value=True)
    if kind == "value_error":
        return _class_problem(str(details.get("ctx", {}).get("error", "")), place, data)
    if kind == "literal_error" and shape:
        return Problem(place=place, text=_not_one_of(value_at(place, data), _choices(shape)), show_value=True)
    hint = _quotes_hint(value_at(place, data), kind)
    return Problem(place=place, text=f"must be {_wanted(shape, hint)}", show_value=True)


def _allowed_keys(place: Place, data: Any) -> list[str]:
    """List the keys that are allowed where `place` ends."""
    holder = place[:-1]
    return keys(form_of(shape_at(holder, data) or {}, value_at(holder, data))) or []


def unknown_key(key: str, allowed: Sequence[str]) -> str:
    return f"unknown key{did_you_mean(key, allowed)} Allowed here: {', '.join(allowed)}."


def _class_problem(text: str, place: Place, data: Any) -> Problem:
    """Convert the message of a config class, which begins with the wrong key if the class checks several."""
    first = tuple(text.split(" ", 1)[0].rstrip(":").split("."))
    value = value_at(place, data)
    if isinstance(value, dict) and value_at(first, value) is not None:
        place = (*place, *first)
    return Problem(place=place, text=f"{text.rstrip('.')}.", show_value=True)


def _not_one_of(value: Any, choices: list[str]) -> str:
    return f"not known{did_you_mean(value, choices)} Allowed: {', '.join(choices)}."


def _choices(shape: Shape) -> list[str]:
    return [str(choice) for form in forms(shape) for choice in form.get("enum", [form.get("const")])]


def _wanted(shape: Shape | None, hint: str = "") -> str:
    """The allowed values and the first sentence of the key's description: `a number above 0. Peak learning rate.`"""
    if shape is None:
        return f"another value{hint}."
    meaning = "" if "properties" in shape else shape.get("description", "").partition(". ")[0].rstrip(".")
    return f"{describe(shape)}{hint}." + (f" {meaning}." if meaning and "\n" not in meaning else "")


def _quotes_hint(value: Any, kind: str) -> str:
    spelled = str(value).lower() if isinstance(value, bool) else value
    return f"; put it in quotes: '{spelled}'" if kind == "string_type" and isinstance(value, bool | int | float) else ""


def misplaced_booleans(shape: Shape, value: Any, place: Place = ()) -> Iterator[Problem]:
    """Reject `true` and `false` for numbers; pydantic would read them as 1 and 0."""
    form = form_of(shape, value)
    if isinstance(value, bool) and {option.get("type") for option in forms(shape)} <= {"number", "integer"}:
        yield Problem(place=place, text=f"must be {_wanted(shape)}", show_value=True)
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        below = child(form, key)
        if below is not None:
            yield from misplaced_booleans(below, item, (*place, key))
