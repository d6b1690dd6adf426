"""Read YAML into plain data and record the line of every key.

Tags are rejected, keys are always strings, and duplicate keys are reported. Scalars follow YAML 1.2: `8e6` and `1e-5`
are numbers; `on`, `no` and `yes` are strings.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from unspool.core.errors import ConfigError

Place = tuple[str | int, ...]  # a path into a recipe, such as ("stages", 0, "lr")

# A few lines with anchors can expand to billions of values.
MAX_VALUES = 100_000


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem to fix. `where` overrides the line of its place; `show_value` adds the value to the message."""

    place: Place
    text: str
    where: str | None = None
    show_value: bool = False


@dataclass
class Marks:
    """The origin of each value of a recipe: a line of the file, or the override that set it."""

    file: str
    lines: dict[Place, int] = field(default_factory=dict)
    overrides: dict[Place, str] = field(default_factory=dict)  # `--set TEXT`, or a line of the recipe that extends it

    def where(self, place: Place) -> str:
        for end in range(len(place), -1, -1):
            if place[:end] in self.overrides:
                return self.overrides[place[:end]]
            if place[:end] in self.lines:
                return f"{self.file}:{self.lines[place[:end]]}"
        return self.file

    def line(self, place: Place) -> int:
        """Line number for sorting; overrides sort last."""
        known = re.fullmatch(r".*:(\d+)", self.where(place), re.DOTALL)
        return int(known[1]) if known and not self.where(place).startswith("`overrides=") else 1 << 30

    def override(self, place: Place, where: str) -> None:
        """Record that everything at and below `place` comes from `where`."""
        for known in (self.lines, self.overrides):
            for below in [key for key in known if key[: len(place)] == place]:
                del known[below]
        self.overrides[place] = where


# Plain scalars by YAML 1.2's core schema, without octal, hexadecimal and infinities; PyYAML follows YAML 1.1. The key
# `None` matches any first character.
RESOLVERS: dict[Any, Any] = {
    None: [
        ("tag:yaml.org,2002:null", re.compile(r"(~|null|Null|NULL|)\Z")),
        ("tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z")),
        # Longer digit strings become floats, which Python converts at any length.
        ("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9]{1,18}\Z")),
        ("tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")),
    ]
}


class CoreLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = RESOLVERS


class CoreDumper(yaml.SafeDumper):
    """Dump YAML; quote strings that `CoreLoader` would read as another type."""

    yaml_implicit_resolvers = RESOLVERS

    def ignore_aliases(self, data: Any) -> bool:
        return True


def read_yaml(text: str, file: str) -> tuple[Any, Marks, list[Problem]]:
    """Return the data, the lines of its keys, and its problems; ConfigError if the text is not valid YAML."""
    try:
        node = CoreLoader(text).get_single_node()
        reader = _Reader(file)
        data = None if node is None else reader.build(node, ())
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_sentence(error, file)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise ConfigError(f"{file}: it is nested too deeply for a recipe.") from None
    return data, reader.marks, reader.problems


def _syntax_sentence(error: yaml.MarkedYAMLError, file: str) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{file}:{mark.line + 1}" if mark else file
    column = f" at column {mark.column + 1}" if mark else ""
    what = " ".join(str(error.problem or error.context or "it cannot be read").split())
    return f"{where}: not valid YAML: {what}{column}; check indentation, colons, brackets and quotes."


SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": int,
    "float": float,
    "str": str,
}


class _Reader:
    def __init__(self, file: str) -> None:
        self.marks = Marks(file, {(): 1})
        self.problems: list[Problem] = []
        self.num_values = 0
        self.open: set[int] = set()

    def build(self, node: yaml.Node, place: Place) -> Any:
        self.num_values += 1
        if self.num_values > MAX_VALUES or id(node) in self.open:
            raise ConfigError(
                f"{self.marks.where(place)}: its anchors expand to too many values; write the values out."
            )
        self.open.add(id(node))
        value = self._value(node, place)
        self.open.discard(id(node))
        return value

    def _value(self, node: yaml.Node, place: Place) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            for index, item in enumerate(node.value):
                self.marks.lines[(*place, index)] = item.start_mark.line + 1
            return [self.build(item, (*place, index)) for index, item in enumerate(node.value)]
        if "\0" in node.value:
            self.problems.append(
                Problem(place=place, text="a NUL character; remove it, because paths and names cannot contain one.")
            )
            return None
        try:
            return SCALARS[kind](node.value)
        except (KeyError, ValueError, TypeError):
            self.problems.append(
                Problem(place=place, text=f"the YAML tag {node.tag!r} is not allowed; write plain values.")
            )
            return None

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                where = f"{self.marks.file}:{line}"
                self.problems.append(
                    Problem(place=place, where=where, text="a key must be plain text, not a list or mapping.")
                )
                continue
            key = str(key_node.value)
            below = (*place, key)
            if key in built:
                text = f"duplicate key, first given on line {self.marks.lines[below]}; keep one of them."
                self.problems.append(Problem(place=below, where=f"{self.marks.file}:{line}", text=text))
                continue
            self.marks.lines[below] = line
            built[key] = self.build(value_node, below)
        return built
