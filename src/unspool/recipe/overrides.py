"""Change single values of a recipe by their paths, as `--set` and `set` do."""

from copy import deepcopy
from typing import Any

from unspool.core.config import did_you_mean
from unspool.core.errors import ConfigError
from unspool.core.formatting import clip
from unspool.recipe.json_schema import Shape, child, describe, dotted, form_of, forms, keys, recipe_schema, unknown_key
from unspool.recipe.yaml_lines import Marks, Place, Problem, read_yaml

LONGEST_LABEL = 100  # characters


def override_label(text: str) -> str:
    """How messages name an override such as `stages.0.lr=2e-5`: on one line, without the end of a long value."""
    return f"`overrides={clip(' '.join(text.split()), LONGEST_LABEL)!r}`"


def apply_overrides(data: dict[str, Any], marks: Marks, overrides: list[str]) -> list[Problem]:
    """Apply `--set` strings, such as `stages.0.lr=2e-5`, to the data of a recipe."""
    problems = []
    for given in overrides:
        path, equals, value_text = given.partition("=")
        where = override_label(given)
        try:
            if not equals:
                raise ConfigError("write a path and a value, such as stages.0.lr=2e-5.")
            value, _, value_problems = read_yaml(value_text, "the value")
            place = set_value(data, marks, path, value, where)
        except ConfigError as error:
            problems.append(Problem(place=(), where=where, text=str(error)))
            continue
        problems += [Problem(place=(*place, *problem.place), text=problem.text) for problem in value_problems]
    return problems


def set_value(data: dict[str, Any], marks: Marks, path: str, value: Any, where: str) -> Place:
    """Set one value of a recipe and record its origin; ConfigError if the path does not exist."""
    if not all(path.strip().split(".")):
        raise ConfigError("write a path and a value, such as stages.0.lr=2e-5.")
    changed = deepcopy(data)  # a wrong path must change nothing
    place, new = _set(changed, path.strip(), value)
    data.update(changed)
    marks.override(new, where)
    return place


def _set(data: dict[str, Any], path: str, value: Any) -> tuple[Place, Place]:
    """Set `value` at `path`, adding missing mappings; return its place and the first new place."""
    rest = path.split(".")
    place: Place = ()
    new: Place | None = None
    shape = recipe_schema()
    holder: Any = data
    while True:
        form = form_of(shape, holder)
        key, rest = _step(holder, form, rest, dotted(place))
        place = (*place, key)
        below = child(form, key)
        if below is None:
            raise ConfigError(f"{dotted(place[:-1])} must be {describe(shape)}.")
        if not rest:
            _put(holder, key, value)
            return place, new or place
        if isinstance(holder, dict) and holder.get(str(key)) is None:
            # Only mappings with known keys can be added, such as `engine` for `engine.workers`.
            if keys(form) is None:
                raise ConfigError(_no_such_name(str(key), list(holder), dotted(place[:-1])))
            _put(holder, key, [] if "array" in {form.get("type") for form in forms(below)} else {})
            new = new or place
        holder, shape = holder[key], below


def _put(holder: Any, key: str | int, value: Any) -> None:
    if isinstance(holder, list) and key == len(holder):
        holder.append(value)
    else:
        holder[key] = value


def _step(holder: Any, form: Shape, rest: list[str], path: str) -> tuple[str | int, list[str]]:
    """Split the path into its next key and the rest. Names may contain dots, so the longest match wins."""
    if isinstance(holder, list):
        return _index(holder, rest, path)
    if not isinstance(holder, dict):
        raise ConfigError(f"{path} is {holder!r}, which has no keys; it must be {describe(form)}.")
    allowed = keys(form)
    known, left = _longest(rest, list(holder) if allowed is None else allowed)
    if known is not None:
        return known, left
    if allowed is not None:
        raise ConfigError(f"{path + '.' if path else ''}{rest[0]}: {unknown_key(rest[0], allowed)}")
    return rest[0], rest[1:]


def _index(holder: list[Any], rest: list[str], path: str) -> tuple[int, list[str]]:
    if rest[0].isascii() and rest[0].isdigit():
        # The index one past the end adds an entry, but only a complete one.
        if int(rest[0]) < len(holder) + (len(rest) == 1):
            return int(rest[0]), rest[1:]
        raise ConfigError(f"{path} has entries 0 to {len(holder) - 1}; there is no {path}.{rest[0]}.")
    names = [str(item.get("name", "")) if isinstance(item, dict) else "" for item in holder]
    known, left = _longest(rest, names)
    if known is None:
        raise ConfigError(_no_such_name(rest[0], [name for name in names if name], path))
    return names.index(known), left


def _longest(rest: list[str], names: list[str]) -> tuple[str | None, list[str]]:
    for end in range(len(rest), 0, -1):
        name = ".".join(rest[:end])
        if name in names:
            return name, rest[end:]
    return None, rest


def _no_such_name(name: str, known: list[str], path: str) -> str:
    return f"{path} has no {name!r}{did_you_mean(name, known)} Known: {', '.join(known) or 'none'}."
