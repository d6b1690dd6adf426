"""The page of commands: usage, description, arguments and options of each, from the command line's own help."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from reference.markdown import code, either, fence, page, table
from unspool.cli.default_command import DEFAULT
from unspool.cli.main import build_app

TYPES = {str: "text", int: "whole number", float: "number", Path: "path", bool: "flag"}


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its full name, such as `recipes check`."""
    root: Any = typer.main.get_command(build_app())
    yield from _below("", root.commands)


def _below(prefix: str, group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, command in group.items():
        full = f"{prefix} {name}".strip()
        # A group with a default command takes the options of that command, which has no name of its own.
        below = getattr(command, "commands", {})
        yield full, below.get(DEFAULT, command)
        yield from _below(full, {name: one for name, one in below.items() if name != DEFAULT})


def command_page() -> str:
    root: Any = typer.main.get_command(build_app())
    intro = f"{root.help}\n\nExit codes: 0 success, 2 an error that you can fix, 130 interrupted with Ctrl-C."
    rows = ((f"[`{name}`](#{anchor_of(name)})", first_line(command)) for name, command in commands())
    parts = [table(("command", "summary"), rows), "## Options of every command { #global }\n", options_table(root)]
    return page("Commands", intro, [*parts, *(section(name, command) for name, command in commands())])


def anchor_of(name: str) -> str:
    return name.replace(" ", "-")


def first_line(command: Any) -> str:
    return (command.help or "").strip().split("\n", 1)[0]


def section(name: str, command: Any) -> str:
    context = typer.Context(command, info_name=f"unspool {name}")
    pieces = [context.command_path, *command.collect_usage_pieces(context)]
    usage = " ".join(pieces).replace("{", "").replace("}", "")
    depth = "##" if " " not in name else "###"
    parts = [f"{depth} {name} {{ #{anchor_of(name)} }}\n", fence(usage, "text"), description(command.help or "")]
    return "\n".join([*parts, arguments_table(command), options_table(command)])


def description(text: str) -> str:
    """A help text as Markdown; lines that it indents are commands."""
    blocks = re.split(r"\n\s*\n", text.replace("\b", "").strip("\n"))
    shown: list[str] = []
    for block in blocks:
        if block.startswith("    "):
            lines = "\n".join(line.removeprefix("    ") for line in block.split("\n"))
            shown.append(fence(lines, "sh"))
        else:
            shown.append(" ".join(block.split()) + "\n")
    return "\n".join(shown).replace("```\n\n```sh\n", "")


def arguments_table(command: Any) -> str:
    found = [one for one in command.params if one.param_type_name == "argument"]
    rows = [(code(one.metavar or one.name.upper()), one.help or "") for one in found]
    return table(("argument", "meaning"), rows) if rows else ""


def options_table(command: Any) -> str:
    types = get_type_hints(command.callback, include_extras=True)
    found = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    rows = [(" ".join(map(code, one.opts)), value_of(one, types.get(one.name, bool)), one.help or "") for one in found]
    return table(("option", "value", "meaning"), rows, stacked=True) if rows else ""


def value_of(option: Any, annotation: Any) -> str:
    """The type of an option's value, or its choices, and the default."""
    if option.metavar:
        text = option.metavar
    elif choices := [part for part in _leaves(annotation) if isinstance(part, str)]:
        text = either(choices)
    else:
        text = next((TYPES[part] for part in _leaves(annotation) if part in TYPES), "value")
    is_set = not option.is_flag and option.default not in (None, (), [], "") and not callable(option.default)
    return f"{text}<br>default: {code(option.default)}" if is_set else text


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types and literals that an annotation is made of."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    parts = get_args(annotation)
    for part in parts:
        yield from _leaves(part)
    if not parts:
        yield annotation
