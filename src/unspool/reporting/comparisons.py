"""Paired comparisons of models on the same prompts, and a run's headline."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np

from unspool.core.formatting import MISSING, join_words
from unspool.core.sizes import format_count, format_size
from unspool.core.stats import agresti_min_interval, bootstrap, could_tell, t_quantile
from unspool.core.table import Entry, Table
from unspool.reporting.figures import Line
from unspool.reporting.measures import (
    Measure,
    format_difference,
    format_difference_range,
    format_n,
    format_with_interval,
    key_measures,
    lowercase_start,
    winner,
)
from unspool.reporting.run_results import BASE, LOSS, Cell, ModelScores, RunResults, task_suite
from unspool.reporting.suite_titles import suite_title


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Score of the second model minus the first; None if they share no prompt."""

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    enough: bool = True  # False: n pairs are too few to show a difference

    @property
    def decided(self) -> bool:
        """True if the interval excludes zero and n is large enough to show it."""
        is_apart = self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)
        return is_apart and self.enough


NONE = Difference(value=None)


def difference(measure: Measure, first: ModelScores, second: ModelScores) -> Difference:
    """Difference of one measure. For a suite of tasks: the mean over the tasks that both models answered."""
    if first.asked != second.asked:
        return NONE
    if measure.spans:
        return _loss_difference(measure, first, second)
    parts = [
        answer_difference(_score_pairs(first, second, suite, length))
        for suite in _tasks(measure.suite, first, second)
        for length in measure.lengths
    ]
    return mean_difference([part for part in parts if part.n])


def ahead_of_all(measure: Measure, models: Mapping[str, ModelScores]) -> tuple[str | None, bool]:
    """Return (the model that beats every other model, or None; True if answers were compared in pairs)."""
    pairs = {
        (one, other): difference(measure, models[other], models[one])
        for one in models
        for other in models
        if one != other
    }
    if any(pair.low is None for pair in pairs.values()):
        return winner(measure, list(models)), False
    sign = 1 if measure.higher_is_better else -1
    for one in models:
        beaten = [pairs[one, other] for other in models if other != one]
        if all(pair.decided and sign * (pair.value or 0.0) > 0 for pair in beaten):
            return one, True
    return None, True


def _tasks(suite: str, first: ModelScores, second: ModelScores) -> list[str]:
    """The tasks of a suite that both models answered, or the suite itself if it has none."""
    named = {name for name, _ in first.answers} & {name for name, _ in second.answers}
    tasks = sorted(name for name in named if name.startswith(task_suite(suite, "")))
    return tasks or ([suite] if suite in named else [])


def _score_pairs(first: ModelScores, second: ModelScores, suite: str, length: int) -> list[tuple[float, float]]:
    before, after = first.answers.get((suite, length), {}), second.answers.get((suite, length), {})
    return [(before[key], after[key]) for key in sorted(before.keys() & after.keys())]


def answer_difference(pairs: Sequence[tuple[float, float]]) -> Difference:
    """Mean difference over (first, second) score pairs of the same prompts. Scores are in [0, 1]."""
    n = len(pairs)
    if not n:
        return NONE
    gains = [after - before for before, after in pairs]
    if all(score in (0.0, 1.0) for pair in pairs for score in pair):
        low, high = agresti_min_interval(np.array(gains))
    else:
        low, high = bootstrap(gains) if could_tell(n) else (-1.0, 1.0)
    return Difference(value=fmean(gains), low=low, high=high, n=n, enough=could_tell(n))


def mean_difference(parts: Sequence[Difference]) -> Difference:
    """Mean over tasks or lengths. Their prompts are independent, so the squared half-widths of the intervals add up."""
    known = [
        (part.value, part.low, part.high, part.n)
        for part in parts
        if part.value is not None and part.low is not None and part.high is not None
    ]
    if not known:
        return NONE
    value = fmean(middle for middle, *_ in known)
    below = math.hypot(*(middle - low for middle, low, _, _ in known)) / len(known)
    above = math.hypot(*(high - middle for middle, _, high, _ in known)) / len(known)
    total = sum(n for *_, n in known)
    return Difference(value=value, low=value - below, high=value + above, n=total, enough=could_tell(total))


def _loss_difference(measure: Measure, first: ModelScores, second: ModelScores) -> Difference:
    """Mean difference over windows, with a t interval."""
    gains = []
    for length in measure.lengths:
        before, after = first.windows.get(length, {}), second.windows.get(length, {})
        for key in sorted(before.keys() & after.keys()):
            pair = [_within(windows[key], measure.spans) for windows in (before, after)]
            if pair[0] is not None and pair[1] is not None:
                gains.append(pair[1] - pair[0])
    if not gains:
        return NONE
    if len(gains) == 1:
        return Difference(value=gains[0], n=1)
    half = t_quantile(len(gains) - 1) * stdev(gains) / math.sqrt(len(gains))
    value = fmean(gains)
    return Difference(value=value, low=value - half, high=value + half, n=len(gains))


def _within(window: dict[tuple[int, int], tuple[float, int]], spans: Sequence[tuple[int, int]]) -> float | None:
    """Token-weighted mean loss of one window over position spans; None if a span is missing."""
    if not all(span in window for span in spans):
        return None
    found = [window[span] for span in spans]
    return sum(value * n for value, n in found) / sum(n for _, n in found)


# The number of pairs grows with the square of the number of models. The table's note counts the pairs not shown.
MAX_PAIRS = 24


@dataclass(frozen=True, kw_only=True)
class Comparison:
    first: str
    second: str
    measure: Measure
    found: Difference
    apart: bool  # True if the models' separate intervals do not overlap either

    @property
    def better(self) -> str | None:
        if not self.found.decided or self.found.value is None:
            return None
        return self.second if (self.found.value > 0) == self.measure.higher_is_better else self.first


def compare(lines: Sequence[Line], measures: Sequence[Measure]) -> list[Comparison]:
    """Compare every pair of models on every measure for which they share prompts; base models come first."""
    found = []
    ordered = sorted(lines, key=lambda line: line.scores.name != BASE)
    for position, first in enumerate(ordered):
        for second in ordered[position + 1 :]:
            for measure in _with_averages(measures):
                gap = difference(measure, first.scores, second.scores)
                if gap.value is None:
                    continue
                found.append(
                    Comparison(
                        first=first.label,
                        second=second.label,
                        measure=measure,
                        found=gap,
                        apart=winner(measure, [first.label, second.label]) is not None,
                    )
                )
    return found


def _with_averages(measures: Sequence[Measure]) -> list[Measure]:
    """Add the mean over all lengths of each suite: more prompts give narrower intervals."""
    shown: list[Measure] = []
    for measure in measures:
        shown.append(measure)
        if measure.suite != LOSS and len(measure.all_lengths) > 1:
            shown.append(replace(measure, place="at all lengths", lengths=measure.all_lengths, cells={}))
    return shown


def not_paired(lines: Sequence[Line]) -> list[str]:
    """One sentence for each pair of models whose answers are not compared, because backend settings differ."""
    found = []
    for position, first in enumerate(lines):
        for second in lines[position + 1 :]:
            one, other = first.scores.asked, second.scores.asked
            names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
            if one and other and names:
                values = [f"{name} {one.get(name, MISSING)} and {other.get(name, MISSING)}" for name in names]
                found.append(
                    f"{first.label} and {second.label}: no paired comparison, because settings differ: "
                    f"{'; '.join(values)}."
                )
    return found[:MAX_PAIRS]


def comparison_table(found: Sequence[Comparison]) -> Table | None:
    """Table of model pairs × measures; bold where the interval excludes zero."""
    if not found:
        return None
    titles = list(dict.fromkeys(one.measure.title for one in found))
    pairs = list(dict.fromkeys((one.first, one.second) for one in found))
    known = {(one.first, one.second, one.measure.title): one for one in found}
    rows = [
        [Entry(text=f"{first} → {second}"), *(_entry(known.get((first, second, title))) for title in titles)]
        for first, second in pairs[:MAX_PAIRS]
    ]
    return Table(
        caption="Differences on the same prompts",
        columns=["models", *titles],
        rows=rows,
        note=_note(found, len(pairs)),
        stacked=True,
    )


def comparison_lines(found: Sequence[Comparison]) -> list[str]:
    """One sentence for each measure of each pair: the difference, its interval, n, and which model is better."""
    return [f"{one.first} → {one.second}, {_verdict(one)}" for one in found]


def _verdict(one: Comparison) -> str:
    is_loss = one.measure.suite == LOSS
    interval = format_difference_range(one.found.low, one.found.high, is_loss=is_loss)
    counted = f"n = {one.found.n:,}{' windows' if is_loss else ''}"
    gap = f"{format_difference(one.found.value, is_loss=is_loss)} {'nats' if is_loss else 'points'}"
    verdict = f"{one.better} is better ({counted})" if one.better else f"no difference shown ({counted})"
    return f"{lowercase_start(one.measure.title)}: {gap}{f' ({interval})' if interval else ''}, {verdict}"


def _entry(one: Comparison | None) -> Entry:
    if one is None:
        return Entry(text=MISSING)
    is_loss = one.measure.suite == LOSS
    counted = f"n = {one.found.n:,} {'windows' if is_loss else 'prompts'}"
    tooltip = f"{one.first} → {one.second}, {one.measure.title}: {counted}, " + (
        f"{one.better} is better" if one.better else "no difference shown"
    )
    note = f"{format_difference_range(one.found.low, one.found.high, is_loss=is_loss)} · n {one.found.n:,}".strip(" ·")
    return Entry(
        text=format_difference(one.found.value, is_loss=is_loss),
        note=note,
        tooltip=tooltip,
        strong=one.better is not None,
    )


def _note(found: Sequence[Comparison], num_pairs: int) -> str:
    decided = [one for one in found if one.better]
    # Means over lengths have no per-model interval to compare with.
    gained = sum(not one.apart for one in decided if one.measure.cells)
    note = (
        "Second minus first on the prompts that both answered. Recall is in points, loss in nats (negative is better), "
        f"with 95% intervals. Bold ({len(decided)} of {len(found)}): the interval excludes 0 and n is large enough to "
        "show it"
    )
    if gained:
        note += f". For {gained} of these, the models' separate intervals overlap"
    note += ". With no true difference, about 1 in 20 such intervals excludes 0 by chance."
    return note + (f" {num_pairs - MAX_PAIRS} further pairs are in the JSON." if num_pairs > MAX_PAIRS else "")


# Arms stop after a whole batch, so token counts within this share of each other count as equal.
EQUAL_TOKENS = 0.01


def headline(results: RunResults) -> list[str]:
    """Sentences about recall, loss beyond and inside the original context, the best arm, and effective lengths."""
    title = f"{results.name}{_extension(results)}"
    if not results.models:
        return [f"{title}. No scores yet: run the recipe's evals to compare the model before and after."]
    measures = key_measures(results)
    groups = [
        [m for m in measures if m.higher_is_better],
        [m for m in measures if not m.higher_is_better],
    ]
    lines = [_sentence([_before_after(measure, results) for measure in group]) for group in groups if group]
    if not lines:
        return [f"{title}. The score files contain no numbers."]
    lines[0] = f"{title}. {lines[0]}"
    looks = [model.effective_length for model in results.models if model.effective_length]
    return [*lines, *_arms(measures, results), *looks]


def _extension(results: RunResults) -> str:
    if results.original_context and results.target_context:
        return f": {format_size(results.original_context)} → {format_size(results.target_context)}"
    return f": {format_size(results.target_context)}" if results.target_context else ""


def _sentence(parts: list[str]) -> str:
    return "; ".join([parts[0], *(lowercase_start(part) for part in parts[1:])]) + "."


def _before_after(measure: Measure, results: RunResults) -> str:
    """`Needle recall at 2K: 0% (0–9) → abf 84% (71–93), utk 91% (80–97), n = 40`."""
    before = measure.cells.get(BASE)
    after = [f"{model.name} {format_with_interval(measure.cells.get(model.name))}" for model in results.arms]
    shown = [before, *(measure.cells.get(model.name) for model in results.arms)]
    counts = list(dict.fromkeys(format_n(cell) for cell in shown if cell is not None and cell.value is not None))
    start = ""
    if results.before:
        start = format_with_interval(before) if after else f"base {format_with_interval(before)}"
    change = " → ".join(filter(None, [start, ", ".join(after)]))
    return f"{measure.title}: {change}" + (f", {' / '.join(counts)}" if counts else "")


def _arms(measures: list[Measure], results: RunResults) -> list[str]:
    names = [model.name for model in results.arms]
    if len(names) < 2:
        return []
    models = {model.name: model for model in results.arms}
    won: dict[str | None, list[str]] = {}
    paired = []
    for measure in measures:
        if not all(_has_interval(measure.cells.get(name)) for name in names):
            continue
        best, by_answers = ahead_of_all(measure, models)
        won.setdefault(best, []).append(_with_n(measure) if best is None else lowercase_start(measure.title))
        paired.append(by_answers)
    verdicts = [f"{name} wins on {join_words(titles)}" for name, titles in won.items() if name is not None]
    if None in won:
        # With three or more arms, one may still be clearly worse.
        close = "no difference shown" if len(names) == 2 else "no arm shown to be better than all others"
        verdicts.append(f"{close} on {join_words(won[None])}" + ("" if all(paired) else " (intervals overlap)"))
    if not verdicts:
        return []
    how = ", paired by prompt" if all(paired) else ""
    return [f"{join_words(names)} {_budget(names, results)}{how}: {'; '.join(verdicts)}."]


def _with_n(measure: Measure) -> str:
    """`needle recall at 2K (n = 2)`. Losses get no n here: they are means over thousands of tokens."""
    counts = [cell.n for cell in measure.cells.values() if cell is not None and not cell.is_loss]
    return lowercase_start(measure.title) + (f" (n = {min(counts):,})" if counts else "")


def _has_interval(cell: Cell | None) -> bool:
    return cell is not None and cell.low is not None and cell.high is not None


def _budget(names: list[str], results: RunResults) -> str:
    tokens = {name: results.trained_tokens(name) for name in names}
    if min(tokens.values()) == 0:
        return "(tokens not recorded)"
    if max(tokens.values()) - min(tokens.values()) <= EQUAL_TOKENS * max(tokens.values()):
        return f"at equal tokens ({format_count(max(tokens.values()))} each)"
    return "at unequal tokens (" + ", ".join(f"{name} {format_count(count)}" for name, count in tokens.items()) + ")"


def missing_parts(results: RunResults) -> list[str]:
    """One sentence for each part of the report that this run lacks."""
    if not results.is_run:
        return []
    notes = []
    if results.recipe_text is None:
        notes.append("recipe.yaml is missing, so stages are sorted by name.")
    if results.original_context is None:
        notes.append("run.json does not record the original context, so charts do not mark it.")
    if results.models and results.before is None:
        notes.append("The base model was not scored, so there are no “before” numbers.")
    unscored = [stage.name for stage in results.stages if stage.name not in {m.name for m in results.models}]
    if results.models and unscored:
        notes.append(f"Not scored: {join_words(unscored)}.")
    for suite in [*results.recall_suites, LOSS]:
        sets = {m.name: m.question_sets[suite] for m in results.models if suite in m.question_sets}
        if len(set(sets.values())) > 1:
            notes.append(
                f"{suite_title(suite)}: the models answered different questions, which may explain a difference."
            )
    return notes
