"""Parsing of `unspool eval --rope` and `--html`, the check of `--out`, and how eval and judge show results."""

import json
import logging
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import TypeAdapter, ValidationError

from unspool.core.artifacts import read_manifest, write_atomic
from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size, parse_size
from unspool.evals.backends.base import Backend, BackendOptions
from unspool.evals.beyond_context import footnote
from unspool.evals.config import EvalConfig
from unspool.evals.suites import SUITES
from unspool.recipe.json_schema import message, validation_problems
from unspool.recipe.schema import Recipe
from unspool.recipe.yaml_lines import Marks
from unspool.rope.methods import AnyRopeMethod
from unspool.rope.tables import RopeMethod

logger = logging.getLogger(__name__)

OPTION = "--rope"
DEFAULT_LENGTHS = "2K,8K"
# The same key of a recipe, whose error messages are used.
PLACE = ("stages", 0, "rope")
FAILED = 1
BEYOND = " †"  # after a length beyond the model's context


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
    try:
        found: RopeMethod = TypeAdapter[Any](AnyRopeMethod).validate_python(value)
    except ValidationError as error:
        raise ConfigError(_explain(value)) from error
    return found


def _explain(value: dict[str, Any]) -> str:
    data = {"stages": [{"rope": value}]}
    try:
        Recipe.model_validate(data)
    except ValidationError as error:
        # The other problems are the missing keys of a recipe.
        for problem in validation_problems(error, data):
            if problem.place[:3] == PLACE:
                own = replace(problem, place=problem.place[3:], where=OPTION)
                return message(own, Marks(OPTION), value)
    raise AssertionError("a RoPE method was refused without a message")


def check_folder(out_dir: Path) -> None:
    """Refuse a folder with other files, because scores replace the whole folder."""
    if not out_dir.exists():
        return
    holds_scores = (read_manifest(out_dir) or {}).get("kind") == "scores"
    if not out_dir.is_dir() or (any(out_dir.iterdir()) and not holds_scores):
        raise ConfigError(
            f"--out {out_dir} exists and holds no scores; give a new folder, since this one would be replaced."
        )


def page_file(given: Path) -> Path:
    """The page that `--html` names: a file, or `report.html` in a folder; ConfigError before any question is asked."""
    page = given / "report.html" if given.is_dir() or not given.suffix else given
    if page.is_dir():
        raise ConfigError(f"--html {page} is a folder; name another file.")
    if page.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--html {given}: a page ends in .html; use {given.with_suffix('.html')}, or a folder.")
    return page


def show_results(summary: dict[str, Any], folder: Path, *, as_json: bool, page: Path | None, kept: bool) -> None:
    """Print a summary, write its page, and say where the results are and how to see them."""
    if as_json:
        print_json(summary)
    else:
        print_table(summary)
    if page is not None:
        from unspool.reporting.page import write_report

        page.parent.mkdir(parents=True, exist_ok=True)
        write_report([folder], page)
        logger.info(f"page: {page}")
    if kept:
        see = "" if page is not None else f"; see them with: unspool report {shlex.quote(str(folder))}"
        logger.info(f"results: {folder}{see}")
    elif page is None:
        logger.info("results were not kept; --out FOLDER keeps answers and scores, --html PAGE writes a page")


def score_short(
    options: BackendOptions,
    tasks: list[str],
    preset: str | None,
    *,
    samples: int | None,
    include: str | None,
    sandboxed: bool,
    out: Path,
) -> dict[str, Any]:
    from unspool.evals.suites.short import chosen_tasks, run_short

    names = chosen_tasks(tasks, preset, sandboxed=sandboxed)
    summary = run_short(options, names, samples=samples, include=include, sandboxed=sandboxed)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary


def compare_answers(first: Backend, second: Backend, evals: list[EvalConfig], seed: int, as_json: bool) -> None:
    """Print how many answers of two backends are equal; exit code 1 if some differ."""
    from unspool.core.http_client import printable_line
    from unspool.evals.eval_plan import EvalPlan
    from unspool.evals.run import compare_backends

    plan = EvalPlan(evals, first.tokenizer, seed=seed, root=Path.cwd(), form=first.form)
    found = compare_backends(plan, first, second)
    if as_json:
        print_json(found)
    else:
        typer.echo(f"{found['equal']} of {found['n']} answers are equal.")
        for one in found["differences"][:1]:
            typer.echo(f"First difference: {one['name']}, question {one['index']}, character {one['at']}:")
            typer.echo(f"  {printable_line(one['first'])!r}\n  {printable_line(one['second'])!r}")
    if found["differences"]:
        raise typer.Exit(FAILED)


def print_table(summary: dict[str, Any]) -> None:
    """Print the cells of a summary, and below them the means of its suites."""
    from rich.table import Table

    table = Table("suite", "length", "positions or depth")
    for column in ("value", "95% interval", "n"):
        table.add_column(column, justify="right")
    for cell in summary["cells"]:
        # Depths of tasks are only in summary.json and in the report, since they would bury the tasks.
        is_depth_of_nothing = cell.get("depth") is not None and not cell["n"]
        if (not cell.get("task") or cell["depth"] is None) and not is_depth_of_nothing:
            table.add_row(*table_row(cell))
    console = PlainConsole(highlight=True)
    console.print(table)
    asked = summary.get("backend", {})
    if "endpoint" in asked:
        context = f"context {asked['context']}" if asked["context"] else "context not listed"
        console.print(
            f"asked of {asked['model']} at {asked['url']}, endpoint {asked['endpoint']}, {context}, chat template "
            f"{asked['template']}",
            highlight=False,
        )
    beyond = summary.get("beyond_context")
    if beyond:
        policies = dict.fromkeys(beyond["policies"].values())
        console.print(f"{BEYOND.strip()} {'; '.join(footnote(beyond, policy) for policy in policies)}", highlight=False)
    for suite in summary.get("suites", []):
        _print_means(console, suite, beyond and beyond["context"])
        length, rate = suite["effective_length"], suite["adaptation_rate"]
        holds = f"holds up to {format_size(length)}" if length else "does not hold at any length"
        kept = f"; {_kept(rate)}" if rate and rate["value"] is not None else ""
        average = suite.get("average")
        if average:
            over = ", ".join(map(format_size, average["lengths"]))
            kept = f"; {average['of']} {100 * average['value']:.1f}, averaged over {over}{kept}"
        worded = f", wording {suite['wording']}" if suite.get("wording") else ""
        console.print(f"{suite['suite']} ({suite['mode']}{worded}): {holds}{kept}", highlight=False)
        if "comparability" in suite:
            console.print(f"{suite['suite']}: {suite['comparability']}", highlight=False)


def _kept(rate: dict[str, Any]) -> str:
    kept = f"adaptation rate {100 * rate['value']:.0f}%"
    return f"{kept} ({format_size(rate['to'])} ÷ {format_size(rate['from'])})"


def preset_lengths(suites: str, preset: str | None) -> str:
    """The lengths of a preset, of which one suite at a time can have one; else the default."""
    names = [name.strip() for name in suites.split(",")]
    if preset is not None and len(names) != 1:
        raise ConfigError("--preset is for one suite at a time; name it with --suite, such as --suite lveval.")
    known = SUITES[names[0]].config.presets if preset and names[0] in SUITES else {}
    return ",".join(map(str, known.get(preset or "", {}).get("lengths", []))) or DEFAULT_LENGTHS


def read_paths(given: list[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--path {text!r}: write NAME=PATH, such as --path haystack=essays.txt.")
        found[name] = path
    return found


def read_rate(text: str | None) -> dict[str, int]:
    """Parse `128K/32K`: the target and the reference length of the adaptation rate."""
    if text is None:
        return {}
    try:
        target, reference = map(parse_size, text.split("/"))
    except ValueError as error:
        raise ConfigError(f"--rate {text!r}: write TARGET/REFERENCE, two of --lengths, such as 128K/32K.") from error
    return {"target_length": target, "reference_length": reference}


def _print_means(console: Any, suite: dict[str, Any], context: int | None) -> None:
    """Print a suite's means and categories by length."""
    from rich.table import Table

    lengths = list(dict.fromkeys(mean["length"] for mean in suite.get("means", [])))
    names = [format_size(length) + BEYOND * (context is not None and length > context) for length in lengths]
    table = Table(suite["suite"], *names)
    for name in dict.fromkeys(mean["name"] for mean in suite.get("means", [])):
        row = [mean for mean in suite["means"] if mean["name"] == name]
        known = [mean for mean in row if mean["n"]] or row
        table.add_row(_mean_name(min(known, key=lambda mean: mean["tasks"])), *(_mean_text(mean) for mean in row))
    if lengths:
        console.print(table, highlight=False)


def _mean_name(mean: dict[str, Any]) -> str:
    if mean["name"] == "overall":
        return f"overall, mean of {mean['of_categories']} categories"
    counted = f"{mean['tasks']} task{'s' if mean['tasks'] != 1 else ''}"
    counted += f" of {mean['of_tasks']}" if mean["tasks"] < mean["of_tasks"] else ""
    return f"mean of {counted}" if mean["name"] == "mean" else f"{mean['name']}, {counted}"


def _mean_text(mean: dict[str, Any]) -> str:
    if mean["value"] is None:
        return f"– ({mean['categories']} of {mean['of_categories']} known)" if "categories" in mean else "–"
    return f"{100 * mean['value']:.1f}% ({100 * mean['low']:.0f}–{100 * mean['high']:.0f}, n {mean['n']})"


def table_row(cell: dict[str, Any]) -> tuple[str, ...]:
    """Format one cell of a summary: shares in percent, losses in nats."""

    def shown(number: float | None) -> str:
        if number is None:
            return "not judged" if cell.get("not_judged") else "–"
        return f"{number:.3f}" if cell["metric"] == "loss" else f"{100 * number:.0f}%"

    if cell["metric"] == "loss":
        part = f"{format_size(cell['from'])}–{format_size(cell['to'])}"
    elif cell["metric"] == "mean":
        part = f"mean of {cell['tasks']} task{'s' if cell['tasks'] != 1 else ''}" + (
            f" of {cell['of_tasks']}" if cell["tasks"] < cell["of_tasks"] else ""
        )
    else:
        part = "all" if cell["depth"] is None else f"depth {cell['depth']:g}"
    if cell.get("task"):
        part = f"{cell['task']} ({cell['metric']})" + ("" if part == "all" else f", {part}")
    interval = "–" if cell["low"] is None else f"{shown(cell['low'])} to {shown(cell['high'])}"
    length = (format_size(cell["length"]) if cell["length"] else "short") + BEYOND * ("beyond_context" in cell)
    return cell["suite"], length, part, shown(cell["value"]), interval, str(cell["n"])
