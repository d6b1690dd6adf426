"""`unspool eval MODEL` without a suite: how long is this model's context really?"""

import logging
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.cli.eval_options import check_folder
from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError
from unspool.core.formatting import MISSING, format_duration, format_percent
from unspool.core.lock import lock_output
from unspool.core.sizes import format_size
from unspool.evals.backends.base import Backend, BackendOptions

logger = logging.getLogger(__name__)

BUDGET = "10m"
PAGE = "look.html"
UNITS = {"s": 1, "m": 60, "h": 3600}
BAR = 10  # characters of 100%


def parse_duration(text: str) -> float:
    """`90s`, `10m`, `1.5h` in seconds; ConfigError for anything else."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([smh])", text.strip().lower())
    seconds = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not 1 <= seconds <= 30 * 86_400:
        raise ConfigError(f"--budget {text!r}: write a time from 1s to 720h, such as 90s, 10m or 2h.")
    return seconds


def refuse_options(given: Mapping[str, Any]) -> None:
    """Refuse options of suites, rather than ignore them."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"--{name} needs --suite or --lengths; without them, eval chooses the questions itself.")


@dataclass(frozen=True, kw_only=True)
class LookOptions:
    budget: str | None
    samples: int | None
    text: str | None
    seed: int
    out: Path | None
    page: Path | None
    as_json: bool


def look(name: str, options: BackendOptions, backend: Backend, scope: LookOptions) -> None:
    """Ask, print the result, and write its page."""
    from unspool.evals.one_look import MAX_SAMPLES, OneLook, default_folder, look_evals, look_lengths
    from unspool.evals.run import Scoring
    from unspool.reporting.look_page import write_look

    seconds = parse_duration(scope.budget or BUDGET)
    folder = scope.out or default_folder(name, options.identity)
    page = scope.page or folder / PAGE
    backend.connect()
    context = backend.context_limit
    lengths = look_lengths(None if context is None else context.tokens)
    claimed = f"context {context.tokens} ({context.source})" if context else "context not known"
    logger.info(
        f"{name}: {claimed}; asking at {format_size(lengths[0])} to {format_size(lengths[-1])} tokens for up to "
        f"{format_duration(seconds)}"
    )
    with lock_output(folder):
        check_folder(folder)
        scoring = Scoring(
            model=name if options.rope is None else options.rope.name_of(name),
            model_hash=options.identity,
            evals=look_evals(lengths, samples=scope.samples or MAX_SAMPLES, text=scope.text),
            seed=scope.seed,
            out_dir=folder,
            root=Path.cwd(),
        )
        try:
            summary = OneLook(scoring, backend, budget=seconds).run()
        except KeyboardInterrupt:
            logger.warning(f"answers so far are kept in {folder}.work; the same command continues from there")
            raise
        write_look(summary, page)
    if scope.as_json:
        print_json(summary)
    else:
        print_look(summary["look"])
    logger.info(f"page: {page}")
    logger.info(f"results: {folder}; see all numbers with: unspool report {shlex.quote(str(folder))}")


def print_look(facts: Mapping[str, Any]) -> None:
    """Print scores by length with bars, what was left out, and the sentence."""
    from rich.table import Table

    from unspool.evals.look_facts import TASK_TITLES

    rows = facts["lengths"]
    tasks = list(rows[0]["tasks"]) if rows else []
    table = Table("length", "score")
    for column in ("", "95% interval", "n", *(TASK_TITLES.get(task, task) for task in tasks)):
        table.add_column(column, justify="right")
    for row in rows:
        bar = "█" * round(BAR * row["value"])
        interval = f"{format_percent(row['low'])} to {format_percent(row['high'])}"
        cells = [row["tasks"][task] for task in tasks]
        shown = [f"{format_percent(cell['value'])} of {cell['n']}" for cell in cells]
        table.add_row(format_size(row["length"]), bar, format_percent(row["value"]), interval, str(row["n"]), *shown)
    for length in facts["not_asked"][:1]:
        more = " and more" if len(facts["not_asked"]) > 1 else ""
        table.add_row(format_size(length) + more, "not asked", *[MISSING] * (3 + len(tasks)))
    console = PlainConsole()
    if rows:
        console.print(table)
    for note in facts["notes"]:
        console.print(note)
    console.print(f"{facts['questions']} questions in {format_duration(facts['seconds'])}.")
    console.print(facts["sentence"])
