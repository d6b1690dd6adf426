"""Show messages of the Python API with the options of the command.

Messages name arguments in backquotes, as Python writes them: `context_length` or `rope="yarn", context="32K"`. The
command line shows `--context-length` and `--rope yarn --context 32K`. Other text stays unchanged.
"""

import ast
import re
import shlex
from collections.abc import Mapping
from typing import Any

_CODE = re.compile(r"`([^`\n]+)`")


def option_names(command: Any) -> dict[str, str]:
    """Options and arguments of a click command, or of all commands of a group, by the name of their parameter."""
    found: dict[str, str] = {}
    for each in [command, *getattr(command, "commands", {}).values()]:
        for param in each.params:
            is_option = param.param_type_name == "option"
            found[param.name] = max(param.opts, key=len) if is_option else param.metavar or param.name.upper()
    return found


def with_options(text: str, options: Mapping[str, str]) -> str:
    """Replace arguments in backquotes by the command's options."""
    return _CODE.sub(lambda found: _words(found[1], options) or found[0], text)


def _words(code: str, options: Mapping[str, str]) -> str | None:
    """`rope="yarn"` as `--rope yarn`; None if it does not name arguments of the command only."""
    try:
        call = ast.parse(f"f({code})", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(call, ast.Call) or not all(isinstance(each, ast.Name) for each in call.args):
        return None
    given: list[tuple[str | None, ast.expr | None]] = [(each.id, None) for each in call.args]  # type: ignore[attr-defined]
    given += [(each.arg, each.value) for each in call.keywords]
    if any(name not in options for name, _ in given):
        return None
    return " ".join(f"{options[name or '']}{'' if value is None else _value(value)}" for name, value in given)


def _value(value: ast.expr) -> str:
    try:
        found = ast.literal_eval(value)
    except ValueError:
        return f" {ast.unparse(value)}"  # a placeholder, such as LENGTH
    if found is True:
        return ""
    words = ",".join(map(str, found)) if isinstance(found, list | tuple) else str(found)
    return f" {shlex.quote(words)}"
