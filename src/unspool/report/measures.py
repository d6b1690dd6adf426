"""The few numbers a run is judged by, each before and after.

Recall at the longest length of each suite, the loss at the farthest positions, and the loss inside
the original context. The tiles, the headline and the comparison of arms all read these.
"""

import math
from dataclasses import dataclass

from unspool.base.sizes import format_size
from unspool.report.results import Cell, RunResults
from unspool.report.wording import show_span, suite_title


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number of every model; a model it was not measured for has None."""

    subject: str  # "Needle recall"
    place: str  # "at 2K"
    higher_is_better: bool
    cells: dict[str, Cell | None]

    @property
    def title(self) -> str:
        return f"{self.subject} {self.place}"


def key_measures(results: RunResults) -> list[Measure]:
    return [*_recalls(results), *_losses(results)]


def _recalls(results: RunResults) -> list[Measure]:
    measures = []
    for suite in results.main_suites:
        longest = results.lengths(suite)[-1]
        measures.append(
            Measure(
                subject=suite_title(suite),
                place=f"at {format_size(longest)}",
                higher_is_better=True,
                cells={model.name: model.recall(suite, longest) for model in results.models},
            )
        )
    return measures


def _losses(results: RunResults) -> list[Measure]:
    buckets = {model.name: model.losses() for model in results.models}
    spans = sorted({(cell.start or 0, cell.stop or 0) for cells in buckets.values() for cell in cells})
    if not spans:
        return []
    old, last = results.original_context, spans[-1]
    measures = []
    if old is None or last[0] >= old:
        farthest = {name: _at(cells, last) for name, cells in buckets.items()}
        measures.append(Measure(subject="Loss", place=f"at {show_span(*last)}", higher_is_better=False, cells=farthest))
    if old is not None and any(stop <= old for _, stop in spans):
        inside = {name: pool([c for c in cells if (c.stop or 0) <= old]) for name, cells in buckets.items()}
        measures.append(
            Measure(subject="Loss", place=f"inside {format_size(old)}", higher_is_better=False, cells=inside)
        )
    return measures


def _at(cells: tuple[Cell, ...], span: tuple[int, int]) -> Cell | None:
    return next((cell for cell in cells if (cell.start, cell.stop) == span), None)


def pool(cells: list[Cell]) -> Cell | None:
    """The mean over several position buckets, weighted by tokens.

    Buckets of one window are correlated in a way the files do not tell, so the interval is the widest
    it could be: half-widths are averaged as if the buckets moved together.
    """
    known = [cell for cell in cells if cell.value is not None and cell.n > 0]
    if not known:
        return None
    total = sum(cell.n for cell in known)
    value = sum((cell.value or 0.0) * cell.n for cell in known) / total
    halves = [(cell.high - cell.low) / 2 for cell in known if cell.high is not None and cell.low is not None]
    half = None
    if len(halves) == len(known):
        half = sum(width * cell.n for width, cell in zip(halves, known, strict=True)) / total
    return Cell(
        suite=known[0].suite,
        metric=known[0].metric,
        length=known[0].length,
        value=value,
        n=total,
        low=None if half is None else value - half,
        high=None if half is None else value + half,
        start=min(cell.start or 0 for cell in known),
        stop=max(cell.stop or 0 for cell in known),
    )


def winner(measure: Measure, names: list[str]) -> str | None:
    """The model whose interval clears all others' on the good side; None: too close to call.

    The intervals are of each model alone. Models that answer the same questions could be told apart
    sooner by comparing answer with answer, so "too close" here is the careful verdict.
    """
    ranges = {name: _good_range(measure, name) for name in names}
    best = max(names, key=lambda name: ranges[name][0])
    clear = all(ranges[best][0] > ranges[name][1] for name in names if name != best)
    return best if clear else None


def _good_range(measure: Measure, name: str) -> tuple[float, float]:
    """(worst, best) plausible value, turned so that more is better; unbounded where not measured."""
    cell = measure.cells.get(name)
    if cell is None or cell.low is None or cell.high is None:
        return (-math.inf, math.inf)
    return (cell.low, cell.high) if measure.higher_is_better else (-cell.high, -cell.low)
