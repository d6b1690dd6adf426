"""Key measures of a run, before and after training, and the formats of scores.

The key measures are recall at the longest length of each suite, loss at the farthest positions, and loss inside the
original context. The tiles, the headline and the comparison of arms use them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from unspool.core.formatting import MISSING, format_percent, format_signed
from unspool.core.sizes import format_size
from unspool.core.stats import could_tell
from unspool.reporting.run_results import LOSS, Cell, ModelScores, RunResults, main_suites
from unspool.reporting.suite_titles import suite_title


def format_value(cell: Cell | None) -> str:
    if cell is None or cell.value is None:
        return MISSING
    return f"{cell.value:.2f}" if cell.is_loss else format_percent(cell.value)


def format_interval(cell: Cell | None) -> str:
    """`±0.09` for a loss, `71–93` (percent) for recall, empty without an interval."""
    if cell is None or cell.value is None or cell.low is None or cell.high is None:
        return ""
    if cell.is_loss:
        return f"±{(cell.high - cell.low) / 2:.2f}"
    return f"{100 * cell.low:.0f}–{100 * cell.high:.0f}"


def format_with_interval(cell: Cell | None) -> str:
    """`84% (71–93)` or `3.70 ±0.09`."""
    interval = format_interval(cell)
    if cell is None or not interval:
        return format_value(cell)
    return f"{format_value(cell)} {interval}" if cell.is_loss else f"{format_value(cell)} ({interval})"


def format_n(cell: Cell) -> str:
    return f"n = {cell.n:,} tokens" if cell.is_loss else f"n = {cell.n:,}"


def format_difference(value: float | None, *, is_loss: bool) -> str:
    """`+12` in percentage points, or `−0.050` in nats."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    # Whole points, unless rounding would hide the difference.
    return format_signed(value, 3) if is_loss else format_signed(100 * value, 1 if abs(value) < 0.005 else 0)


def format_difference_range(low: float | None, high: float | None, *, is_loss: bool) -> str:
    if low is None or high is None:
        return ""
    return f"{format_difference(low, is_loss=is_loss)} to {format_difference(high, is_loss=is_loss)}"


def format_positions(start: int, stop: int) -> str:
    return f"{format_size(start)}–{format_size(stop)}"


def lowercase_start(title: str) -> str:
    """Title for use inside a sentence: `needle recall at 2K`, but `RULER at 64K`."""
    is_name = len(title) > 1 and title[1].isupper()
    return title if is_name else title[:1].lower() + title[1:]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number per model; None where it was not measured."""

    subject: str  # "Needle recall"
    place: str  # "at 2K"
    higher_is_better: bool
    cells: dict[str, Cell | None]
    suite: str
    lengths: tuple[int, ...]
    spans: tuple[tuple[int, int], ...] = ()  # of positions, for a loss
    all_lengths: tuple[int, ...] = ()  # every length of the suite

    @property
    def title(self) -> str:
        return f"{self.subject} {self.place}"


def key_measures(results: RunResults) -> list[Measure]:
    return measures_for({model.name: model for model in results.models}, results.original_context)


def measures_for(models: Mapping[str, ModelScores], original_context: int | None) -> list[Measure]:
    """Key measures of labeled models. Models of different runs may lack some lengths."""
    return [*_recalls(models), *_losses(models, original_context)]


def _recalls(models: Mapping[str, ModelScores]) -> list[Measure]:
    measures = []
    for suite in main_suites(models.values()):
        lengths = sorted({cell.length for model in models.values() for cell in model.cells if cell.suite == suite})
        measures.append(
            Measure(
                subject=suite_title(suite),
                place=f"at {format_size(lengths[-1])}",
                higher_is_better=True,
                cells={name: model.recall(suite, lengths[-1]) for name, model in models.items()},
                suite=suite,
                lengths=(lengths[-1],),
                all_lengths=tuple(lengths),
            )
        )
    return measures


def _losses(models: Mapping[str, ModelScores], old: int | None) -> list[Measure]:
    buckets = {name: model.losses() for name, model in models.items()}
    spans = sorted({(cell.start or 0, cell.stop or 0) for cells in buckets.values() for cell in cells})
    if not spans:
        return []
    last = spans[-1]
    measures = []
    if old is None or last[0] >= old:
        farthest = {name: _at(cells, last) for name, cells in buckets.items()}
        measures.append(_loss(f"at {format_positions(*last)}", farthest, (last,)))
    inside = tuple(span for span in spans if old is not None and span[1] <= old)
    if old is not None and inside:
        pooled = {name: pool([c for c in cells if (c.stop or 0) <= old]) for name, cells in buckets.items()}
        measures.append(_loss(f"inside {format_size(old)}", pooled, inside))
    return measures


def _loss(place: str, cells: dict[str, Cell | None], spans: tuple[tuple[int, int], ...]) -> Measure:
    lengths = tuple(sorted({cell.length for cell in cells.values() if cell is not None}))
    return Measure(
        subject="Loss", place=place, higher_is_better=False, cells=cells, suite=LOSS, lengths=lengths, spans=spans
    )


def average(cells: Sequence[Cell | None]) -> Cell | None:
    """Return the plain mean over lengths, tasks or categories, or None if one of them is missing.

    The prompts are independent, so the squared half-widths of their intervals add up.
    """
    known = [cell for cell in cells if cell is not None and cell.value is not None]
    if not known or len(known) < len(cells):
        return None
    value = fmean(cell.value or 0.0 for cell in known)
    low: float | None = None
    high: float | None = None
    if all(cell.low is not None and cell.high is not None for cell in known):
        low = value - math.hypot(*((cell.value or 0.0) - (cell.low or 0.0) for cell in known)) / len(known)
        high = value + math.hypot(*((cell.high or 0.0) - (cell.value or 0.0) for cell in known)) / len(known)
    return Cell(
        suite=known[0].suite,
        metric="mean",
        length=max(cell.length for cell in known),
        value=value,
        n=sum(cell.n for cell in known),
        low=low,
        high=high,
    )


def _at(cells: tuple[Cell, ...], span: tuple[int, int]) -> Cell | None:
    return next((cell for cell in cells if (cell.start, cell.stop) == span), None)


def pool(cells: list[Cell]) -> Cell | None:
    """Return the mean over several position buckets, weighted by tokens.

    Buckets of one window are correlated by an unknown amount. The interval is therefore the widest possible one: the
    half-widths are averaged, as if the buckets were fully correlated.
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
    """Return the model whose interval is better than every other interval without overlap, or None.

    These intervals describe each model alone. Paired comparisons on the same questions (comparisons.py) find smaller
    differences, so None is the conservative verdict.
    """
    ranges = {name: _good_range(measure, name) for name in names}
    best = max(names, key=lambda name: ranges[name][0])
    clear = all(ranges[best][0] > ranges[name][1] for name in names if name != best)
    return best if clear else None


def trusted_range(cell: Cell | None) -> tuple[float, float] | None:
    """Interval of a mean. None if there is none, or if n is too small to show a difference."""
    if cell is None or cell.low is None or cell.high is None or not (cell.is_loss or could_tell(cell.n)):
        return None
    return cell.low, cell.high


def _good_range(measure: Measure, name: str) -> tuple[float, float]:
    """(worst, best) plausible value, signed so that higher is better; infinite where not measured."""
    low, high = trusted_range(measure.cells.get(name)) or (-math.inf, math.inf)
    return (low, high) if measure.higher_is_better else (-high, -low)
