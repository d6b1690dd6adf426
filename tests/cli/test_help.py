"""`--help` shows every description in full, and its examples use commands and options that exist."""

import re
import shlex

import pytest
import typer.main
from typer.testing import CliRunner

from unspool.cli.main import build_app


def commands(command, path=()):
    """Every command with its words, such as `inspect rows`."""
    if path[-1:] != ("at",):
        yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(build_app())))


def shown(path) -> str:
    done = CliRunner().invoke(build_app(), [*path, "--help"], env={"COLUMNS": "4000"})
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_description_is_shown_in_full(path):
    """Words in brackets would be taken for markup."""
    command = COMMANDS[path]
    text = shown(path)
    for param in command.params:
        if param.name not in ("install_completion", "show_completion", "help"):
            assert param.help and param.help.endswith((".", ">")), (path, param.name, param.help)
            assert " ".join(param.help.split()) in text, (path, param.name)


def examples(command) -> list[str]:
    return re.findall(r"^ +(?:cat \S+ \| )?unspool (.*(?:\n +--.*)?)$", command.help or "", re.MULTILINE)


def test_commands_have_examples():
    # `doctor` needs none, `show`, `check` and `schema` are subcommands of `recipes`.
    without = {path[0] for path, command in COMMANDS.items() if len(path) == 1 and not has_examples(command)}
    assert without <= {"doctor", "recipes"}


def has_examples(command) -> bool:
    return bool(examples(getattr(command, "commands", {}).get("at", command)))


@pytest.mark.parametrize("path", [path for path in COMMANDS if path], ids=" ".join)
def test_examples_use_commands_and_options_that_exist(path):
    for example in examples(getattr(COMMANDS[path], "commands", {}).get("at", COMMANDS[path])):
        words = shlex.split(example.split(" |")[0].split(" > ")[0])
        known = tuple(words[:2]) if tuple(words[:2]) in COMMANDS else tuple(words[:1])
        command = (
            COMMANDS[known].commands["at"] if "at" in getattr(COMMANDS[known], "commands", {}) else COMMANDS[known]
        )
        options = {option for param in command.params for option in param.opts}
        unknown = [word for word in words if word.startswith("--") and word not in options]
        assert not unknown, (example, unknown)
