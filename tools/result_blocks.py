"""The kinds of blocks that tools/results.py writes into the pages of docs/results. Each takes its settings.

Cells of scores are percents with 95% intervals: over questions for one training seed, over questions and seeds
otherwise (`unspool.studies.two_level`).
"""

import csv
import json
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pictures import COLORS, WIDTH, group, picture, sized, text
from unspool.core.charts import HEIGHT, Frame, Point, Series, line_chart, marker
from unspool.core.errors import ConfigError
from unspool.core.formatting import MISSING, format_signed, join_words
from unspool.core.html import element, svg_line
from unspool.core.sizes import format_size, parse_size
from unspool.core.table import markdown_lines
from unspool.studies.arm_comparison import difference, holm, over_prompts
from unspool.studies.arm_scores import Answers, Measure, contributions_of
from unspool.studies.claims import Finding, judge, read_claims
from unspool.studies.metric_agreement import rank_agreement
from unspool.studies.raw_results import FACTS, Run, read_runs
from unspool.studies.raw_scores import find_measure, select_answers
from unspool.studies.two_level import Interval, arm_interval, difference_interval

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


def select(data: str, names: str | Sequence[str], where: Mapping[str, Any] | None = None) -> BySeed:
    """Return the answers of an arm (all its seeds) or of single runs, by seed; `where` selects questions."""
    wanted = [names] if isinstance(names, str) else list(names)
    runs = runs_of(data)
    found = {run.seed: _answers(data, run.name, repr(where or {})) for run in runs if {run.arm, run.name} & {*wanted}}
    unknown = [name for name in wanted if name not in {*(run.arm for run in runs), *(run.name for run in runs)}]
    if unknown:
        raise ConfigError(f"{data} has no arm or run {', '.join(unknown)}; it has {', '.join(r.name for r in runs)}.")
    return found


@cache
def _answers(data: str, run: str, where: str) -> Answers:
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
    low, high = (f"{scale * bound:.{digits}f}".replace("-", "−") for bound in (found.low, found.high))
    return f"{value} ({low} to {high})"


def show_p(p: float | None) -> str:
    return MISSING if p is None else "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def seeds_of(found: Sequence[Interval | None]) -> int:
    return max((one.seeds for one in found if one is not None), default=0)


def _counts(name: str, counts: Sequence[int]) -> str:
    return f"{name} {min(counts)}" if min(counts) == max(counts) else f"{name} {min(counts)} to {max(counts)}"


# Blocks


def scores(settings: Mapping[str, Any]) -> Output:
    """Arms by measures. Settings: data, columns (label: measure), rows (label: arm or runs), where, transpose.

    A column may select questions of its own: {measure: niah/32K, where: {needle_wording: ship}}.
    """
    data, rows = settings["data"], labeled(settings, "rows")
    lines, counts = {label: [label] for label in rows}, []
    seeds = dict.fromkeys(rows, 0)
    for given in labeled(settings, "columns").values():
        column = given if isinstance(given, dict) else {"measure": given}
        where = settings.get("where", {}) | column.get("where", {})
        arms = {label: select(data, names, where) for label, names in rows.items()}
        measure = measure_of(column["measure"], list(arms.values()))
        for label, by_seed in arms.items():
            found = arm_interval(by_seed, measure)
            lines[label].append(show(found, measure))
            seeds[label] = max(seeds[label], seeds_of([found]))
            counts += [] if found is None else [found.questions // found.seeds]
    for label, line in lines.items():
        line[0] += f", {seeds[label]} seeds" if seeds[label] > 1 else ""
    table = [[settings.get("head", "arm"), *labeled(settings, "columns")], *lines.values()]
    if settings.get("transpose"):
        table = [list(column) for column in zip(*table, strict=True)]
    note = f"{_counts('n =', counts)} questions or windows per cell and seed."
    return Output(text="\n".join([*markdown_lines(table[0], table[1:]), "", note]))


def tasks(settings: Mapping[str, Any]) -> Output:
    """Measures by length, of one arm. Settings: data, arm, rows (label: `ruler/vt/*`), lengths, where."""
    by_seed = select(settings["data"], settings["arm"], settings.get("where"))
    lines, counts = [], []
    for label, pattern in labeled(settings, "rows").items():
        cells = []
        for length in settings["lengths"]:
            measure = measure_of(pattern.replace("/*", f"/{length}"), [by_seed])
            found = arm_interval(by_seed, measure)
            cells.append(show(found, measure))
            counts += [] if found is None else [found.questions // found.seeds]
        lines.append([label, *cells])
    table = markdown_lines([settings.get("head", "task"), *settings["lengths"]], lines)
    return Output(text="\n".join([*table, "", f"{_counts('n =', counts)} questions per cell and seed."]))


def differences(settings: Mapping[str, Any]) -> Output:
    """Arms against one arm. Settings: data, baseline, columns (label: measure), rows (label: arm or runs), where, over.

    A row may name its own baseline: {arm: …, against: …}. p-values are corrected by Holm's method over the rows of a
    column. `over: questions` leaves the variation between seeds out.
    """
    data, where = settings["data"], settings.get("where")
    rows: dict[str, tuple[BySeed, BySeed]] = {}
    for label, given in labeled(settings, "rows").items():
        arm, against = (given["arm"], given["against"]) if isinstance(given, dict) else (given, settings["baseline"])
        rows[label] = select(data, arm, where), select(data, against, where)
    cells: dict[str, list[str]] = {label: [] for label in rows}
    head, found = [settings.get("head", "arm")], []
    for title, name in labeled(settings, "columns").items():
        measure = measure_of(name, [by_seed for pair in rows.values() for by_seed in pair])
        column = [_difference(*pair, measure, settings.get("over")) for pair in rows.values()]
        corrected = holm([None if one is None else one.p for one in column])
        for label, one, p in zip(rows, column, corrected, strict=True):
            cells[label] += [show_difference(one, measure), show_p(p)]
        head += [title, "p"]
        found.append(column)
    seeds = [str(seeds_of(row)) for row in zip(*found, strict=True)]
    lines = [[label, *cells[label], count] for label, count in zip(rows, seeds, strict=True)]
    counts = [one.questions for column in found for one in column if one is not None]
    note = f"{_counts('n =', counts)} pairs of questions or windows."
    return Output(text="\n".join([*markdown_lines([*head, "seeds"], lines), "", note]))


def _difference(arm: BySeed, against: BySeed, measure: Measure, over: str | None) -> Interval | None:
    pairs = contributions_of(arm, against, measure)
    bounded = measure.is_bounded
    if over is None:
        return difference_interval(pairs, bounded=bounded)
    if over != "questions":
        raise ConfigError(f"over = {over}: use `questions`, or leave it out to include the variation between seeds.")
    value, test = difference(pairs), over_prompts(pairs, bounded=bounded)
    return (
        None
        if value is None
        else Interval(value=value, low=test.low, high=test.high, p=test.p, seeds=len(pairs), questions=test.n)
    )


def figure(settings: Mapping[str, Any]) -> Output:
    """Score by length, by arm. Settings: data, file, title, measure (`niah/*`), lengths, rows (label: arm), where."""
    data, where = settings["data"], settings.get("where")
    rows = labeled(settings, "rows")
    lengths = [parse_size(length) for length in settings["lengths"]]
    series = []
    for style, (label, names) in enumerate(rows.items()):
        by_seed = select(data, names, where)
        points = []
        for length in lengths:
            measure = measure_of(settings["measure"].replace("*", format_size(length)), [by_seed])
            found = arm_interval(by_seed, measure)
            points.append(
                Point(x=length, y=None)
                if found is None
                else Point(
                    x=length, y=found.value, low=found.low, high=found.high, tooltip=f"{label}: {found.value:.0%}"
                )
            )
        series.append(Series(label=label, style=style, points=points))
    frame = Frame(
        label=settings["title"],
        x_title="context length",
        x_ticks=[(length, format_size(length)) for length in lengths],
        show_y=lambda value: f"{value:.0%}",
        log_x=True,
        y_range=(0.0, 1.0),
    )
    path = IMAGES / settings["file"]
    return Output(
        text=f"![{settings['title']}](../images/{settings['file']})",
        figures={path: line_picture(settings["title"], series, frame) + "\n"},
    )


MARKS = ".hit { fill: none; } .dot { stroke: #fff; stroke-width: 1; } .whisker { stroke-width: 1.6; } " + " ".join(
    f".m{at} .dot {{ fill: {color}; }} .m{at} .whisker {{ stroke: {color}; }}" for at, color in enumerate(COLORS)
)


def line_picture(title: str, series: Sequence[Series], frame: Frame) -> str:
    """Draw a line chart with a legend as a picture of its own, readable on light and dark pages."""
    columns = 2
    parts = [element("style", Markup(MARKS)), text(14, 24, title, "title")]
    for at, one in enumerate(series):
        x, y = 14 + at % columns * 200.0, 48 + at // columns * 20.0
        key = svg_line(x, y - 4, x + 24, y - 4, "line") + marker(one.style, x + 12, y - 4)
        parts += [element("g", key, class_=f"m{one.style % len(COLORS)}"), text(x + 31, y, one.label)]
    top = 48 + -(-len(series) // columns) * 20.0 - 8
    parts.append(group(top, sized(line_chart(series, frame), WIDTH, HEIGHT)))
    parts.append(text(14, top + HEIGHT + 18, "Vertical bars: 95% intervals."))
    return picture(top + HEIGHT + 32, title, *parts)


def claims(settings: Mapping[str, Any]) -> Output:
    """One paper's claims. Settings: file, paper."""
    listed = read_claims(RESULTS / settings["file"])
    found = [one for one in _judged(settings["file"]) if one.claim.paper == settings["paper"]]
    if not found:
        raise ConfigError(f"{settings['file']} has no claims of {settings['paper']!r}.")
    rows = []
    for claim in dict.fromkeys(id(one.claim) for one in found):
        mine = [one for one in found if id(one.claim) == claim]
        done = [one for one in mine if one.interval is not None]
        rows += [_finding(one, first=at == 0) for at, one in enumerate(done or mine[:1])]
    head = ["claim", "paper", "measure", "difference (95% interval)", "p", "n per cell", "seeds", "verdict"]
    rule = (
        f"Exploratory: fewer than {listed.rule.seeds} seeds or {listed.rule.questions} questions per seed and length. "
        "p: Holm's method over this table."
    )
    return Output(text="\n".join([*markdown_lines(head, rows), "", rule]))


@cache
def _judged(file: str) -> list[Finding]:
    listed = read_claims(RESULTS / file)
    results: dict[str, dict[str, BySeed]] = {}
    for data in listed.data:
        arms = results.setdefault(data.folder, {})
        for run in runs_of(data.folder):
            arms.setdefault(run.arm, {})[run.seed] = _answers(data.folder, run.name, "{}")
    return judge(listed, results)


def _finding(one: Finding, *, first: bool) -> list[str]:
    note = f" ({one.claim.note})" if one.claim.note and one.interval else ""
    paper = [f"{one.claim.claim}{note}", f"{one.claim.source}: {one.claim.theirs}"] if first else ["", ""]
    if one.interval is None or one.measure is None:
        return [*paper, *[MISSING] * 5, one.verdict]
    verdict = f"{one.verdict}, exploratory" if one.exploratory else f"**{one.verdict}**"
    cells = [show_difference(one.interval, one.measure), show_p(one.p), str(one.questions), str(one.interval.seeds)]
    return [*paper, f"`{one.metric}`", *cells, verdict]


def agreement(settings: Mapping[str, Any]) -> Output:
    """Rank correlation of measures with one of them, over the arms of all folders.

    Arms are means over the seeds that all arms of a folder have, since other seeds have other questions. Settings: data
    (list of folders), target (label), columns (label: measure), without (arms to leave out), seconds (label: device
    seconds per arm).
    """
    columns, seconds = labeled(settings, "columns"), settings.get("seconds", {})
    arms: dict[str, BySeed] = {}
    for data in settings["data"]:
        found = {run.arm: select(data, run.arm) for run in runs_of(data) if run.arm not in settings.get("without", ())}
        common = set.intersection(*(set(by_seed) for by_seed in found.values()))
        if not common:
            raise ConfigError(f"{data}: no seed is common to all arms; leave arms out with `without`.")
        arms |= {f"{data}/{arm}": {seed: found[arm][seed] for seed in sorted(common)} for arm in found}
    values: dict[str, dict[str, float]] = {}
    for label, name in columns.items():
        measure = measure_of(name, list(arms.values()))
        means = {arm: arm_interval(by_seed, measure) for arm, by_seed in arms.items()}
        sign = -1 if measure.is_loss else 1
        values[label] = {arm: sign * one.value for arm, one in means.items() if one is not None}
    rows = []
    for one in rank_agreement(values, settings["target"]):
        interval = MISSING if one.low is None else f"{one.low:.2f} to {one.high:.2f}".replace("-", "−")
        value = MISSING if one.value is None else format_signed(one.value, 2)
        rows.append([one.measure, value, interval, str(one.arms), str(seconds.get(one.measure, MISSING))])
    head = ["measure", f"rank correlation with {settings['target']}", "95% interval", "arms", "device seconds"]
    note = "Spearman's correlation; losses count with a minus. Intervals: bootstrap over arms."
    return Output(text="\n".join([*markdown_lines(head, rows), "", note]))


def coverage(settings: Mapping[str, Any]) -> Output:
    """How often intervals contain the truth, from the file that tools/coverage.py writes. Settings: file."""
    with (RESULTS / settings["file"]).open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    methods = {"questions": "over questions", "bootstrap": "hierarchical bootstrap", "t": "t over seeds"}
    methods |= {"two-level": "two-level"}
    rows = [
        [row["study"], row["seeds"], row["questions"], *(_covered(row, method) for method in methods)] for row in found
    ]
    head = ["simulated study", "seeds", "n", *methods.values()]
    note = f"Coverage of the truth, and mean width in points. {found[0]['trials']} studies per row."
    return Output(text="\n".join([*markdown_lines(head, rows), "", note]))


def _covered(row: Mapping[str, str], method: str) -> str:
    return f"{100 * float(row[f'{method} coverage']):.1f}% ({100 * float(row[f'{method} width']):.0f})"


def inventory(settings: Mapping[str, Any]) -> Output:
    """The committed data. Settings: data (list of folders)."""
    rows = []
    for data in settings["data"]:
        runs = runs_of(data)
        suites = sorted({part.suite for run in runs for part in _answers(data, run.name, "{}")})
        size = sum(path.stat().st_size for run in runs for path in run.folder.iterdir())
        arms, answers = len({run.arm for run in runs}), sum(len(run.samples) for run in runs)
        spent = [seconds for run in runs if (seconds := _seconds(run)) is not None]
        minutes = f"{sum(spent) / 60:,.0f}" if len(spent) == len(runs) else MISSING
        numbers = [str(arms), str(len(runs)), join_words(suites), f"{answers:,}", f"{size / 1000:,.0f} KB", minutes]
        rows.append([f"`{data}`", *numbers])
    head = ["folder", "arms", "runs", "suites", "answers", "size", "minutes"]
    note = "minutes: training and scoring of all runs, where they were kept."
    return Output(text="\n".join([*markdown_lines(head, rows), "", note]))


def _seconds(run: Run) -> float | None:
    """Return the seconds of the stages and scores of an arm; None if they were not kept."""
    path = run.folder / FACTS
    if not path.is_file():
        return None
    facts = json.loads(path.read_text(encoding="utf-8"))
    steps = [f"scores/{facts['stage']}", *(f"stages/{name}" for name in facts["stages"])]
    return float(sum(facts["seconds"].get(step, 0.0) for step in steps))


BLOCKS: dict[str, Callable[[Mapping[str, Any]], Output]] = {
    "scores": scores,
    "tasks": tasks,
    "differences": differences,
    "figure": figure,
    "claims": claims,
    "agreement": agreement,
    "coverage": coverage,
    "inventory": inventory,
}
