"""The kinds of blocks that tools/results.py writes into the pages of docs/results. Each takes its settings.

Cells of scores are percents with 95% intervals: over questions for one training seed, over questions and seeds
otherwise (`unspool.studies.two_level`).
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import fmean, stdev
from typing import Any

from cost_blocks import COST_BLOCKS
from result_costs import prompt_tokens, scoring_rate
from result_data import (
    RESULTS,
    BySeed,
    Output,
    answers_of_run,
    labeled,
    measure_of,
    runs_named,
    runs_of,
    seeds_of,
    select,
    show,
    show_counts,
    show_difference,
    show_p,
)
from result_figures import figure
from unspool.core.errors import ConfigError
from unspool.core.formatting import MISSING, format_signed, join_words
from unspool.core.sizes import format_size
from unspool.core.stats import t_quantile
from unspool.core.table import markdown_lines
from unspool.evals.scoring.effective_length import effective_length, relative_effective_length
from unspool.studies.arm_comparison import difference, holm, over_prompts
from unspool.studies.arm_scores import Measure, contributions_of
from unspool.studies.claims import Finding, judge, read_claims
from unspool.studies.metric_agreement import rank_agreement
from unspool.studies.raw_results import FACTS, Run
from unspool.studies.raw_scores import OLD_NAMES, find_measure
from unspool.studies.two_level import Interval, arm_interval, difference_interval


def scores(settings: Mapping[str, Any]) -> Output:
    """Arms by measures. Settings: data, columns (label: measure), rows (label: arm or runs), where, transpose.

    A column may select questions of its own: {measure: niah/32K, where: {needle_wording: ship}}. `each: ruler/32K` is a
    column per task.
    """
    data, rows = settings["data"], labeled(settings, "rows")
    columns = _columns(settings, [select(data, names, settings.get("where")) for names in rows.values()])
    lines, counts = {label: [label] for label in rows}, []
    seeds = dict.fromkeys(rows, 0)
    for given in columns.values():
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
    table = [[settings.get("head", "arm"), *columns], *lines.values()]
    if settings.get("transpose"):
        table = [list(column) for column in zip(*table, strict=True)]
    note = f"{show_counts('n =', counts)} questions or windows per cell and seed."
    return Output(text="\n".join([*markdown_lines(table[0], table[1:]), "", note]))


def _columns(settings: Mapping[str, Any], arms: Sequence[BySeed]) -> dict[str, Any]:
    columns = labeled(settings, "columns")
    each = columns.pop("each", None)
    if each is not None:
        suite, length = each.split("/")
        names = [str(part.task) for _, part in measure_of(each, arms).parts]
        columns |= {f"`{name}`": f"{suite}/{name}/{length}" for name in names}
    return columns


def by_seed(settings: Mapping[str, Any]) -> Output:
    """One measure by arm and training seed. Settings: data, measure, rows (label: arm), where."""
    arms = {
        label: select(settings["data"], names, settings.get("where"))
        for label, names in labeled(settings, "rows").items()
    }
    measure = measure_of(settings["measure"], list(arms.values()))
    seeds = sorted({seed for found in arms.values() for seed in found})
    lines, counts = [], []
    for label, found in arms.items():
        cells = [arm_interval({seed: found[seed]}, measure) if seed in found else None for seed in seeds]
        lines.append([label, *(show(one, measure) for one in cells)])
        counts += [one.questions for one in cells if one is not None]
    table = markdown_lines([settings.get("head", "arm"), *(f"seed {seed}" for seed in seeds)], lines)
    return Output(text="\n".join([*table, "", f"{show_counts('n =', counts)} questions or windows per cell."]))


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
    return Output(text="\n".join([*table, "", f"{show_counts('n =', counts)} questions per cell and seed."]))


def by_task(settings: Mapping[str, Any]) -> Output:
    """Every task of a suite by arm, all lengths in one cell. Settings: data, suite, lengths, rows, where.

    A task or length that an arm was not asked is missing. The note has n and the largest distance of a value from an
    end of its interval.
    """
    arms = {
        label: select(settings["data"], names, settings.get("where"))
        for label, names in labeled(settings, "rows").items()
    }
    found = [measure_of(f"{settings['suite']}/{length}", list(arms.values())) for length in settings["lengths"]]
    names = sorted({str(part.task) for measure in found for _, part in measure.parts})
    lines, counts, distances = [], [], [0.0]
    for name in names:
        line = [f"`{name}`"]
        for by_seed in arms.values():
            values = []
            for length in settings["lengths"]:
                one = _interval_of(by_seed, f"{settings['suite']}/{name}/{length}")
                values.append(MISSING if one is None else f"{round(100 * one.value, 9):.0f}")
                counts += [] if one is None else [one.questions // one.seeds]
                distances += [] if one is None else [abs((end or 0.0) - one.value) for end in (one.low, one.high)]
            line.append("/".join(values))
        lines.append(line)
    note = f"Percent at {'/'.join(settings['lengths'])}. {show_counts('n =', counts)} questions per cell and seed; 95% "
    note += f"intervals reach at most {100 * max(distances):.0f} points from the value."
    return Output(text="\n".join([*markdown_lines(["task", *arms], lines), "", note]))


def _interval_of(by_seed: BySeed, name: str) -> Interval | None:
    measure = find_measure(name, {part for answers in by_seed.values() for part in answers})
    return None if measure is None else arm_interval(by_seed, measure)


def effective(settings: Mapping[str, Any]) -> Output:
    """Effective length by arm. Settings: data, measure (`ruler/*`), lengths, rows (label: arm or runs), where.

    Relative: the longest length that keeps 85% of the score at the shortest length, with its interval. RULER's: the
    longest length with a mean of at least 85.6%. Questions of all seeds count alike.
    """
    rows = []
    for label, names in labeled(settings, "rows").items():
        by_seed = select(settings["data"], names, settings.get("where"))
        scores: dict[int, dict[str, list[float]]] = {}
        for length in settings["lengths"]:
            for _, part in measure_of(settings["measure"].replace("/*", f"/{length}"), [by_seed]).parts:
                found = [one.score for answers in by_seed.values() for one in answers.get(part, {}).values()]
                scores.setdefault(part.length, {})[str(part.task)] = found
        relative = relative_effective_length(scores)
        absolute = effective_length(
            {length: [fmean(map(fmean, by_task.values()))] for length, by_task in scores.items()}
        )
        interval = f"{format_size(relative.value)} ({format_size(relative.low)}–{format_size(relative.high)})"
        several = f", {len(by_seed)} seeds" if len(by_seed) > 1 else ""
        rows.append([label + several, interval, MISSING if absolute is None else format_size(absolute)])
    shortest = settings["lengths"][0]
    head = [settings.get("head", "arm"), f"keeps 85% of its score at {shortest}, up to", "85.6% or more, up to"]
    return Output(text="\n".join(markdown_lines(head, rows)))


def short(settings: Mapping[str, Any]) -> Output:
    """lm-eval's short tasks by arm. Settings: data, rows (label: arm or runs), tasks (label: task).

    Their questions are not kept, so intervals are lm-eval's for one seed. For several seeds, which share the questions,
    Student's t over seeds is used where it is wider.
    """
    tasks, lines = labeled(settings, "tasks"), []
    for label, names in labeled(settings, "rows").items():
        cells: dict[str, list[dict[str, Any]]] = {}
        for run in runs_named(settings["data"], names):
            for sample in run.samples:
                for cell in sample.get("cells", []):
                    if cell["value"] is not None and cell["low"] is not None:
                        cells.setdefault(cell["task"], []).append(cell)
        found = [_short(cells.get(task, [])) for task in tasks.values()]
        means = [one for one in found if one is not None]
        whole = None
        if len(means) == len(tasks):
            half = math.sqrt(sum(one**2 for _, one in means)) / len(means)
            whole = fmean(value for value, _ in means), half
        count = max((len(cells.get(task, [])) for task in tasks.values()), default=0)
        shown = [MISSING if one is None else f"{100 * one[0]:.1f}% ±{100 * one[1]:.1f}" for one in [*found, whole]]
        lines.append([label + (f", {count} seeds" if count > 1 else ""), *shown])
    return Output(text="\n".join(markdown_lines([settings.get("head", "arm"), *tasks, "mean"], lines)))


def _short(cells: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return mean and half of the interval of one task over seeds."""
    if not cells:
        return None
    values = [cell["value"] for cell in cells]
    half = fmean((cell["high"] - cell["low"]) / 2 for cell in cells)
    over_seeds = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return fmean(values), max(half, over_seeds)


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
    note = f"{show_counts('n =', counts)} pairs of questions or windows."
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


def claims(settings: Mapping[str, Any]) -> Output:
    """One paper's claims. Settings: file, paper."""
    listed = read_claims(RESULTS / settings["file"])
    found = [one for one in _judged(settings["file"]) if one.claim.paper == settings["paper"]]
    if not found:
        raise ConfigError(f"{settings['file']} has no claims of {settings['paper']!r}.")
    rows, not_run = [], []
    for claim in dict.fromkeys(id(one.claim) for one in found):
        mine = [one for one in found if id(one.claim) == claim]
        done = [one for one in mine if one.interval is not None]
        rows += [_finding(one, first=at == 0) for at, one in enumerate(done)]
        if not done:
            not_run.append(f"- {mine[0].claim.claim}")
    head = ["claim", "paper", "measure", "difference (95% interval)", "p", "n per cell", "seeds", "verdict"]
    rule = (
        f"Exploratory: fewer than {listed.rule.seeds} seeds or {listed.rule.questions} questions per seed and length. "
        "p: Holm's method, over the comparisons that were planned together or else over the rest of this table."
    )
    table = [*markdown_lines(head, rows), "", rule, ""] if rows else []
    return Output(text="\n".join([*table, *(["Not run:", "", *not_run] if not_run else [])]).rstrip())


@cache
def _judged(file: str) -> list[Finding]:
    listed = read_claims(RESULTS / file)
    results: dict[str, dict[str, BySeed]] = {}
    for data in listed.data:
        arms = results.setdefault(data.folder, {})
        for run in runs_of(data.folder) if (RESULTS / data.folder).is_dir() else ():
            answers = answers_of_run(data.folder, run.name, "{}")
            for suite, where in data.where.items():
                counted = answers_of_run(data.folder, run.name, repr(where))
                answers = {part: found for part, found in answers.items() if part.suite != suite} | {
                    part: found for part, found in counted.items() if part.suite == suite
                }
            arms.setdefault(run.arm, {})[run.seed] = answers
    return judge(listed, results)


def _finding(one: Finding, *, first: bool) -> list[str]:
    paper = [one.claim.claim, f"{one.claim.source}: {one.claim.theirs}"] if first else ["", ""]
    assert one.interval is not None and one.measure is not None
    verdict = f"{one.verdict}, exploratory" if one.exploratory else f"**{one.verdict}**"
    cells = [show_difference(one.interval, one.measure), show_p(one.p), str(one.questions), str(one.interval.seeds)]
    return [*paper, f"`{one.metric}`", *cells, verdict]


def agreement(settings: Mapping[str, Any]) -> Output:
    """Rank correlation of measures with one of them, over the arms of all folders.

    Arms are means over the seeds that all arms of a folder have, since other seeds have other questions. Device seconds
    are those of one arm and seed: its prompt tokens at the mean rate at which the runs were scored. Settings: data
    (list of folders), target (label), columns (label: measure), without (arms to leave out), at_once (runs that shared
    the device; default 1), seconds (label: measured device seconds, in place of the computed ones).
    """
    columns, seconds = labeled(settings, "columns"), dict(settings.get("seconds", {}))
    runs = [run for data in settings["data"] for run in runs_of(data) if run.arm not in settings.get("without", ())]
    rate = scoring_rate(runs)
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
        tokens = prompt_tokens(runs, measure)
        if rate and tokens:
            seconds.setdefault(label, f"{tokens / rate / settings.get('at_once', 1):,.1f}")
    rows = []
    for one in rank_agreement(values, settings["target"]):
        interval = MISSING if one.low is None else f"{one.low:.2f} to {one.high:.2f}".replace("-", "−")
        value = MISSING if one.value is None else format_signed(one.value, 2)
        rows.append([one.measure, value, interval, str(one.arms), str(seconds.get(one.measure, MISSING))])
    head = ["measure", f"rank correlation with {settings['target']}", "95% interval", "arms", "device seconds"]
    note = "Spearman's correlation; losses count with a minus. Intervals: bootstrap over arms."
    target = seconds.get(settings["target"])
    if target is not None:
        note += f" The target takes {target} device seconds."
    return Output(text="\n".join([*markdown_lines(head, rows), "", note]))


def inventory(settings: Mapping[str, Any]) -> Output:
    """The committed data. Settings: data (list of folders)."""
    rows = []
    for data in settings["data"]:
        runs = runs_of(data)
        suites = sorted({OLD_NAMES.get(one["suite"], one["suite"]) for run in runs for one in run.samples})
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
    "by_seed": by_seed,
    "tasks": tasks,
    "by_task": by_task,
    "effective": effective,
    "short": short,
    "differences": differences,
    "figure": figure,
    "claims": claims,
    "agreement": agreement,
    "inventory": inventory,
    **COST_BLOCKS,
}
