"""A command group with a default command: `unspool study NAME` and `unspool study list`."""

import copy
from typing import Any

from typer.core import TyperGroup

DEFAULT = "at"  # hidden; its help is that of the group


class DefaultGroup(TyperGroup):
    """Runs the command `DEFAULT` if the first argument is none of the group's commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        whole = copy.copy(self)
        whole.help, whole.params = self.commands[DEFAULT].help, self.commands[DEFAULT].params
        TyperGroup.format_help(whole, ctx, formatter)
