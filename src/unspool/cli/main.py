"""The `unspool` command: its subcommands, log level and error messages.

Each subcommand is a function in its own file. So that --help is fast, no file imports torch, transformers or the recipe
schema at its top: a command imports what it needs when it is called.
"""

import locale
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from unspool.cli import (
    audit,
    doctor,
    eval,
    export,
    generate,
    inspect,
    judge,
    launch,
    merge,
    plan,
    recipes,
    report,
    rope,
    run,
    study,
    synth,
    verify,
)
from unspool.cli.option_names import option_names, with_options
from unspool.core.console import escaped_streams
from unspool.core.errors import ConfigError, explain
from unspool.core.formatting import format_bytes, printable
from unspool.core.logging import set_up_logging
from unspool.core.process_environment import set_process_environment

logger = logging.getLogger(__name__)

USER_ERROR = 2
EXTENSIONS = "UNSPOOL_EXTENSIONS"  # modules to import first, separated by commas
INTERRUPTED = 130  # exit code of a command ended by Ctrl-C, as in shells


class Commands(TyperGroup):
    """Prints errors that the user can fix without a traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        with escaped_streams():
            return super().main(*args, **options)

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _printable_usage():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _printable_usage():
                result = super().invoke(ctx)
            sys.stdout.flush()  # here, because Python could not report a full disk at exit
            return result
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            message = explain(error)
            if message is None:
                raise
            logger.debug("where it was raised:", exc_info=error)
            for line in with_options(message, _options(ctx)).split("\n"):
                print(f"error: {line}", file=sys.stderr)
            raise typer.Exit(USER_ERROR) from None


def _options(ctx: Any) -> dict[str, str]:
    """Options of the command that runs, by the name of their parameter."""
    command = ctx.command.commands.get(ctx.invoked_subcommand)
    return {} if command is None else option_names(command)


@contextmanager
def _printable_usage() -> Iterator[None]:
    """Escape arguments in errors about usage, which a console of typer's own prints."""
    try:
        yield
    except Exception as error:
        if isinstance(text := getattr(error, "message", None), str):
            error.message = printable(text)  # type: ignore[attr-defined]
        raise


def _print_version(wanted: bool) -> None:
    if wanted:
        from unspool.core.environment import gpus, versions

        for name, version in versions().items():
            print(f"{name} {version}")
        for gpu in gpus():
            print(f"GPU {gpu['name']}, {format_bytes(gpu['memory_bytes'])}")
        raise typer.Exit


def unspool(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions of Unspool and its main libraries, and the devices.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also print debug messages.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Extend the context window of open language models: one recipe from raw text to a longer, scored checkpoint."""
    options = _options(ctx)
    level = logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO
    set_up_logging(level, lambda text: with_options(text, options))
    import_extensions()


def import_extensions() -> None:
    """Import the modules that UNSPOOL_EXTENSIONS names, so that they register their classes; ranks do this too."""
    for name in filter(None, map(str.strip, os.environ.get(EXTENSIONS, "").split(","))):
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # after installed packages, so that no file here hides one
        try:
            import_module(name)
        except Exception as error:
            raise ConfigError(
                f"{EXTENSIONS}: cannot import {name}: {type(error).__name__}: {error}. Put the module into this folder "
                "or on PYTHONPATH, or unset the variable."
            ) from error


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="unspool",
        cls=Commands,
        callback=unspool,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command("plan")(plan.plan)
    app.command("rope")(rope.rope)
    app.command("run")(run.run)
    app.command("tokenize")(run.tokenize)
    app.command("pack")(run.pack)
    app.command("train")(run.train)
    app.command("launch")(launch.launch)
    app.command("eval")(eval.eval_)
    app.command("generate")(generate.generate)
    app.command("judge")(judge.judge)
    app.command("synth")(synth.synth)
    app.command("report")(report.report)
    app.add_typer(study.build_group(), name="study")
    app.command("verify")(verify.verify)
    app.command("audit")(audit.audit)
    app.command("export")(export.export)
    app.command("merge")(merge.merge)
    app.command("doctor")(doctor.doctor)
    app.add_typer(inspect.build_group(), name="inspect")

    group = typer.Typer(callback=recipes.list_recipes, invoke_without_command=True)
    group.command("show")(recipes.show)
    group.command("check")(recipes.check)
    group.command("schema")(recipes.schema)
    app.add_typer(group, name="recipes")
    return app


def main() -> None:
    _require_utf8()
    set_process_environment()
    build_app()(prog_name="unspool")  # also as `python -m`, for completion


def _require_utf8() -> None:
    """Start again in UTF-8 mode if the locale has another encoding: files are UTF-8 everywhere."""
    if not sys.flags.utf8_mode and locale.getpreferredencoding(False).upper() not in ("UTF-8", "UTF8"):
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    main()
