"""Answers and cells of the results pages: select arms, runs and measures; format values with intervals."""

from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from unspool.core.errors import ConfigError
from unspool.core.formatting import MISSING, format_signed
from unspool.evals.suites.needle_wordings import expand_wordings
from unspool.studies.arm_scores import Answers, Measure
from unspool.studies.raw_results import Run, read_runs
from unspool.studies.raw_scores import find_measure, select_answers
from unspool.studies.two_level import Interval

RESULTS = Path(__file__).parents[1] / "docs" / "results"
IMAGES = RESULTS.parent / "images"
BySeed = dict[int, Answers]


@dataclass(frozen=True, kw_only=True)
class Output:
    text: str
    figures: Mapping[Path, str] = field(default_factory=dict)


# Data


@cache
def runs_of(data: str) -> list[Run]:
    return read_runs(RESULTS / data)


def runs_named(data: str, names: str | Sequence[str]) -> list[Run]:
    """Return the runs of arms (all their seeds) or of single runs."""
    wanted, runs = [names] if isinstance(names, str) else list(names), runs_of(data)
    unknown = [name for name in wanted if name not in {known for run in runs for known in (run.arm, run.name)}]
    if unknown:
        raise ConfigError(f"{data} has no arm or run {', '.join(unknown)}; it has {', '.join(r.name for r in runs)}.")
    found = [run for run in runs if {run.arm, run.name} & {*wanted}]
    if len({run.seed for run in found}) < len(found):
        raise ConfigError(f"{data}: {', '.join(wanted)} has several runs with one seed; a row is one arm.")
    return found


def select(data: str, row: str | Sequence[str] | Mapping[str, Any], where: Mapping[str, Any] | None = None) -> BySeed:
    """Return the answers of an arm (all its seeds) or of single runs, by seed; `where` selects questions.

    A row of another folder is {data: FOLDER, arm: …}. `needle_wording: development` selects all wordings of a set.
    """
    where = dict(where or {})
    if isinstance(where.get("needle_wording"), str):
        try:
            where["needle_wording"] = expand_wordings([where["needle_wording"]])
        except ValueError as error:
            raise ConfigError(f"where: {error}") from None
    data, names = (row["data"], row["arm"]) if isinstance(row, Mapping) else (data, row)
    return {run.seed: answers_of_run(data, run.name, repr(where)) for run in runs_named(data, names)}


@cache
def answers_of_run(data: str, run: str, where: str) -> Answers:
    samples = next(one.samples for one in runs_of(data) if one.name == run)
    return select_answers(samples, literal_eval(where))


def measure_of(name: str, arms: Sequence[BySeed]) -> Measure:
    """Return a measure that at least one of the arms has."""
    found = find_measure(name, {part for by_seed in arms for answers in by_seed.values() for part in answers})
    if found is None:
        raise ConfigError(f"{name} was not measured in any of the rows.")
    return found


def labeled(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a setting that is a mapping from labels, or a list whose values are their own labels."""
    given = settings[key]
    return dict(given) if isinstance(given, dict) else {str(one): one for one in given}


# Cells


def show(found: Interval | None, measure: Measure) -> str:
    """Format a value with its interval: `52% (37–67)`, or `2.97 ±0.17` for a loss."""
    if found is None:
        return MISSING
    if not measure.is_bounded:
        half = (
            None if found.low is None or found.high is None else max(found.value - found.low, found.high - found.value)
        )
        return f"{found.value:.2f}" + ("" if half is None else f" ±{half:.2f}")
    # Sums of parts are off by a last digit, which must not decide how a half is rounded.
    value, low, high = (f"{round(100 * (one or 0.0), 9):.0f}" for one in (found.value, found.low, found.high))
    return f"{value}% ({low}–{high})"


def show_difference(found: Interval | None, measure: Measure) -> str:
    """Format a difference with its interval, in points or in the measure's unit: `+12.5 (3.1 to 21.9)`."""
    if found is None:
        return MISSING
    scale, digits = (100, 1) if measure.is_bounded else (1, 3)
    value = format_signed(scale * found.value, digits) if round(scale * found.value, digits) else f"{0:.{digits}f}"
    if found.low is None or found.high is None:
        return value
    # `+ 0.0` makes 0 of −0.
    low, high = (f"{round(scale * one, digits) + 0.0:.{digits}f}".replace("-", "−") for one in (found.low, found.high))
    return f"{value} ({low} to {high})"


def show_p(p: float | None) -> str:
    return MISSING if p is None else "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def seeds_of(found: Sequence[Interval | None]) -> int:
    return max((one.seeds for one in found if one is not None), default=0)


def show_counts(name: str, counts: Sequence[int]) -> str:
    if not counts:
        return f"{name} 0"
    return f"{name} {min(counts)}" if min(counts) == max(counts) else f"{name} {min(counts)} to {max(counts)}"
