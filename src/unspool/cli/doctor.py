"""`unspool doctor`: print what a bug report needs."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from unspool.core.console import print_json
from unspool.core.formatting import MISSING, format_bytes


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Print what a bug report needs.

    Versions, devices, memory, disk, compilers, optional packages, cache
    folders and environment variables. Keys, tokens and passwords are never
    printed, only whether they are set.
    """
    from unspool.core.environment import diagnose

    found = diagnose()
    if as_json:
        print_json(found)
        return
    for title, section in found.items():
        typer.echo(f"{_title(title)}:")
        # Names of environment variables stay as they are.
        for line in _lines(section, str if title == "environment" else _title):
            typer.echo(f"  {line}")


def _lines(section: Any, title: Callable[[str], str]) -> list[str]:
    if isinstance(section, list):
        return [_joined(entry) for entry in section] or ["none"]
    shown = {
        title(key): _joined(value) if isinstance(value, dict) else _value(key, value) for key, value in section.items()
    }
    width = max(map(len, shown), default=0)
    return [f"{key:<{width}}  {value}" for key, value in shown.items()] or ["none"]


def _joined(entry: dict[str, Any]) -> str:
    return ", ".join(f"{_title(key)} {_value(key, value)}" for key, value in entry.items())


def _title(key: str) -> str:
    return key.removesuffix("_bytes").replace("_", " ")


def _value(key: str, value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_bytes(value) if key.endswith("_bytes") else str(value)
