"""`--set stages.0.lr=2e-5`: change a recipe from the command line.

In: the recipe's data and `path=value` texts. Out: the data changed in place, and the problems met.
A path goes by key, list index or stage name; the value is read as YAML. What the file leaves
out can be set as long as the schema knows it; a name that stands for nothing is refused.
"""

from copy import deepcopy
from typing import Any

from unspool.base.errors import ConfigError
from unspool.base.lookup import nearest
from unspool.recipes.lines import Marks, Place, Problem, read_yaml
from unspool.recipes.problems import unknown_key
from unspool.recipes.shape import Shape, child, describe, form_of, forms, keys, recipe_schema


def apply_overrides(data: dict[str, Any], marks: Marks, overrides: list[str]) -> list[Problem]:
    problems = []
    for given in overrides:
        path, equals, value_text = given.partition("=")
        text = " ".join(given.split())  # sentences quote it on one line
        try:
            if not equals or not all(path.strip().split(".")):
                raise ConfigError("write a path and a value, such as stages.0.lr=2e-5.")
            value, _, value_problems = read_yaml(value_text, "the value")
            changed = deepcopy(data)  # a path that leads nowhere must leave no half of itself behind
            place, new = _set(changed, path.strip(), value)
        except ConfigError as error:
            problems.append(Problem(place=(), where=f"--set {text}", text=str(error)))
            continue
        data.update(changed)
        marks.override(new, text)
        problems += [Problem(place=(*place, *problem.place), text=problem.text) for problem in value_problems]
    return problems


def _set(data: dict[str, Any], path: str, value: Any) -> tuple[Place, Place]:
    """Put `value` at `path`, making the mappings the file leaves out: its place, and the first place that is new."""
    rest = path.split(".")
    place: Place = ()
    new: Place | None = None
    shape = recipe_schema()
    holder: Any = data
    while True:
        form = form_of(shape, holder)
        key, rest = _step(holder, form, rest, _dotted(place))
        place = (*place, key)
        below = child(form, key)
        if below is None:
            raise ConfigError(f"{_dotted(place[:-1])} may only be {describe(shape)}.")
        if not rest:
            _put(holder, key, value)
            return place, new or place
        if isinstance(holder, dict) and holder.get(str(key)) is None:
            # Only mappings with known keys can be begun here: `engine.workers` without `engine`.
            if keys(form) is None:
                raise ConfigError(_no_such_name(str(key), list(holder), _dotted(place[:-1])))
            _put(holder, key, [] if "array" in {form.get("type") for form in forms(below)} else {})
            new = new or place
        holder, shape = holder[key], below


def _put(holder: Any, key: str | int, value: Any) -> None:
    if isinstance(holder, list) and key == len(holder):
        holder.append(value)
    else:
        holder[key] = value


def _step(holder: Any, form: Shape, rest: list[str], path: str) -> tuple[str | int, list[str]]:
    """The next key of the path and what is left of it. Names may contain dots, so the longest that fits is taken."""
    if isinstance(holder, list):
        return _index(holder, rest, path)
    if not isinstance(holder, dict):
        raise ConfigError(f"{path} is {holder!r} and has nothing below it; it may be {describe(form)}.")
    allowed = keys(form)
    known, left = _longest(rest, list(holder) if allowed is None else allowed)
    if known is not None:
        return known, left
    if allowed is not None:
        raise ConfigError(f"{path + '.' if path else ''}{rest[0]}: {unknown_key(rest[0], allowed)}")
    return rest[0], rest[1:]


def _index(holder: list[Any], rest: list[str], path: str) -> tuple[int, list[str]]:
    if rest[0].isascii() and rest[0].isdigit():
        # One past the end adds a whole entry, but there is nothing yet to change a part of.
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


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))


def _no_such_name(name: str, known: list[str], path: str) -> str:
    guess = nearest(name, known)
    hint = f"; did you mean {guess!r}?" if guess else "."
    return f"{path} has no {name!r}{hint} Known: {', '.join(known) or 'none'}."
