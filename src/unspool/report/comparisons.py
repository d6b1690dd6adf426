"""Tables of paired differences: which model is better on the same prompts, and whether that can be told.

In: models of one run or of several. Out: a table of pairs × measures, and what pairing decided.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unspool.report.figures import Line
from unspool.report.measures import Measure, winner
from unspool.report.paired import Difference, difference
from unspool.report.results import BASE, LOSS
from unspool.report.tables import Entry, Table
from unspool.report.wording import MISSING, show_gain, show_gain_range

# Pairs grow with the square of the models; those left out are counted.
MAX_PAIRS = 24


@dataclass(frozen=True, kw_only=True)
class Comparison:
    first: str
    second: str
    measure: Measure
    found: Difference
    apart: bool  # whether the intervals of the two models alone would have told as well

    @property
    def better(self) -> str | None:
        if not self.found.decided or self.found.value is None:
            return None
        return self.second if (self.found.value > 0) == self.measure.higher_is_better else self.first


def compare(lines: Sequence[Line], measures: Sequence[Measure]) -> list[Comparison]:
    """Every pair of lines and every measure that some of the prompts of both belong to, base models first."""
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
    """Beside the longest length, all lengths together: more prompts decide more."""
    shown: list[Measure] = []
    for measure in measures:
        shown.append(measure)
        if measure.suite != LOSS and len(measure.all_lengths) > 1:
            shown.append(replace(measure, place="over all lengths", lengths=measure.all_lengths, cells={}))
    return shown


def comparison_table(found: Sequence[Comparison]) -> Table | None:
    """Pairs × measures; bold where the interval leaves out zero."""
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


def _entry(one: Comparison | None) -> Entry:
    if one is None:
        return Entry(text=MISSING)
    is_loss = one.measure.suite == LOSS
    counted = f"n = {one.found.n:,} {'windows' if is_loss else 'prompts'}"
    tooltip = f"{one.first} → {one.second}, {one.measure.title}: {counted}, " + (
        f"{one.better} is better" if one.better else "too close to call"
    )
    note = f"{show_gain_range(one.found.low, one.found.high, is_loss=is_loss)} · n {one.found.n:,}".strip(" ·")
    return Entry(
        text=show_gain(one.found.value, is_loss=is_loss), note=note, tooltip=tooltip, strong=one.better is not None
    )


def _note(found: Sequence[Comparison], num_pairs: int) -> str:
    told = [one for one in found if one.better]
    # A mean over lengths has no interval of its own to compare with.
    gained = sum(not one.apart for one in told if one.measure.cells)
    note = (
        "Second minus first on the prompts that both answered: recall in points, loss in nats (negative is better), "
        f"with 95% intervals of the difference. Bold where they leave out 0: {len(told)} of {len(found)}"
    )
    if gained:
        note += f"; {gained} of these the models' own intervals could not tell apart"
    note += ". Of twenty such intervals about one leaves out 0 by chance."
    return note + (f" {num_pairs - MAX_PAIRS} further pairs are in the JSON." if num_pairs > MAX_PAIRS else "")
