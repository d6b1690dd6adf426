"""Parsing of `unspool eval --rope`, `--html` and `--rate`, and how it shows results."""

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import yaml

from unspool.core.artifacts import check_writable
from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError
from unspool.core.sizes import parse_size
from unspool.evals.eval_request import EvalSettings
from unspool.recipe.part_of_recipe import check_rope
from unspool.rope.tables import RopeMethod

if TYPE_CHECKING:
    from unspool.reporting.evaluate import EvalResult

logger = logging.getLogger(__name__)

OPTION = "--rope"
LOOK_PAGE = "look.html"
FAILED = 1


def read_rope(text: str) -> RopeMethod:
    """Parse `yarn` or `{method: abf, base: 8e6}`."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{OPTION} {text!r} cannot be read; write a method, or {{method: abf, base: 8e6}}."
        ) from error
    value = {"method": value} if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ConfigError(f"{OPTION} {text!r}: write a method, such as yarn, or {{method: abf, base: 8e6}}.")
    return check_rope(value, OPTION)


def page_file(given: Path) -> Path:
    """The page that `--html` names: a file, or `report.html` in a folder; ConfigError before any question is asked."""
    page = given / "report.html" if given.is_dir() or not given.suffix else given
    if page.is_dir():
        raise ConfigError(f"--html {page} is a folder; name another file.")
    if page.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--html {given}: a page ends in .html; use {given.with_suffix('.html')}, or a folder.")
    check_writable(page, "--html")
    return page


def show_results(result: "EvalResult", *, as_json: bool, page: Path | None, kept: bool) -> None:
    """Print scores, write their page, and say where the results are and how to see them."""
    if as_json:
        print_json(result.summary)
    else:
        result.print(PlainConsole(highlight="look" not in result.summary))
    report = f"unspool report {shlex.quote(str(result.folder))}"
    see = "" if page is not None else f"; see them with: {report}"
    if "look" in result.summary:  # these are always kept, and have a page
        page, kept, see = page or result.folder / LOOK_PAGE, True, f"; see all numbers with: {report}"
    if page is not None:
        result.save(page)
        logger.info(f"page: {page}")
    if kept:
        logger.info(f"results: {result.folder}{see}")
    elif page is None:
        logger.info("results were not kept; --out FOLDER keeps answers and scores, --html PAGE writes a page")


def print_parity(found: dict[str, Any], as_json: bool) -> None:
    """Print how many answers of two backends are equal; exit code 1 if some differ."""
    from unspool.core.http_client import printable_line

    if as_json:
        print_json(found)
    else:
        typer.echo(f"{found['equal']} of {found['n']} answers are equal.")
        for one in found["differences"][:1]:
            typer.echo(f"First difference: {one['name']}, question {one['index']}, character {one['at']}:")
            typer.echo(f"  {printable_line(one['first'])!r}\n  {printable_line(one['second'])!r}")
    if found["differences"]:
        raise typer.Exit(FAILED)


def read_settings(given: list[str], *, example: str) -> dict[str, Any]:
    """Parse `KEY=VALUE` pairs; a value with commas is a list."""
    found: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key or not value:
            raise ConfigError(f"--set {text!r}: write KEY=VALUE, such as --set {example}.")
        try:
            found[key] = yaml.safe_load(f"[{value}]" if "," in value and value[0] not in "[{" else value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {text!r}: the value is not valid YAML; write it as in a recipe.") from error
    return found


def read_rate(text: str | None) -> EvalSettings:
    """Parse `128K/32K`: the target and the reference length of the adaptation rate."""
    if text is None:
        return {}
    try:
        target, reference = map(parse_size, text.split("/"))
    except ValueError as error:
        raise ConfigError(f"--rate {text!r}: write TARGET/REFERENCE, two of --lengths, such as 128K/32K.") from error
    return {"target_length": target, "reference_length": reference}
