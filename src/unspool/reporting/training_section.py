"""The training section: curves by trained tokens, and a table with one row per stage.

Curves have points only where a number was logged. Long curves are averaged over neighboring steps, not truncated.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from unspool.core.charts import Figure, Frame, Point, Series, line_chart, nice_ticks
from unspool.core.formatting import MISSING, excerpt, format_duration, format_exponent, format_percent, join_words
from unspool.core.sizes import format_count, format_size
from unspool.core.table import Entry, Table, entries
from unspool.reporting.measures import format_positions
from unspool.reporting.run_results import RunResults, Stage, Step

# More points than pixels would only enlarge the page.
MAX_CURVE_POINTS = 300
MAX_DOTS = 40


@dataclass(frozen=True, kw_only=True)
class _Curve:
    title: str
    note: str
    value: Callable[[Step], float | None]
    show: Callable[[float], str] = lambda value: f"{value:g}"
    from_zero: bool = False


_CURVES = (
    _Curve(title="Training loss", note="nats per token, each step", value=lambda step: step.loss),
    _Curve(title="Learning rate", note="each step", value=lambda step: step.lr, show=format_exponent, from_zero=True),
    _Curve(title="Gradient norm", note="before clipping, each step", value=lambda step: step.grad_norm, from_zero=True),
    _Curve(
        title="Tokens per second",
        note="each step",
        value=lambda step: step.tokens_per_second,
        show=lambda value: format_count(value) if value else "0",
        from_zero=True,
    ),
    _Curve(
        title="MFU",
        note="share of the device's peak FLOPS used by the model, each step",
        value=lambda step: step.mfu,
        show=lambda value: f"{100 * value:g}%",
        from_zero=True,
    ),
)


def training_figures(stages: Sequence[Stage], styles: dict[str, int]) -> list[Figure]:
    """Draw each curve by trained tokens, one line per stage. Skip curves that no stage recorded."""
    trained = [stage for stage in stages if len(stage.steps) > 1]
    if not trained:
        return []
    ticks = nice_ticks(0.0, float(max(stage.tokens for stage in trained)))
    x_ticks = [(tick, format_count(tick) if tick else "0") for tick in ticks[:-1]]
    return [
        _figure(curve, trained, styles, x_ticks)
        for curve in _CURVES
        if any(curve.value(step) is not None for stage in trained for step in stage.steps)
    ]


def _figure(
    curve: _Curve, trained: Sequence[Stage], styles: dict[str, int], x_ticks: list[tuple[float, str]]
) -> Figure:
    lines = {stage.name: [(step.tokens, curve.value(step)) for step in stage.steps] for stage in trained}
    known = [value for line in lines.values() for _, value in line if value is not None]
    frame = Frame(
        label=f"{curve.title} by tokens trained, one curve per stage.",
        x_title="tokens trained in the stage",
        x_ticks=x_ticks,
        show_y=curve.show,
        y_range=(0.0, max(known) or 1.0) if curve.from_zero else None,
        dots=False,
    )
    averaged = max(len(line) for line in lines.values()) > MAX_CURVE_POINTS
    series = [Series(label=name, style=styles[name], points=_points(line)) for name, line in lines.items()]
    note = curve.note + (", averaged over neighboring steps" if averaged else "")
    return Figure(title=curve.title, note=note, drawing=line_chart(series, frame))


def validation_figures(stages: Sequence[Stage], styles: dict[str, int]) -> list[Figure]:
    """Draw held-out loss by trained tokens: over all positions, and at the farthest ones."""
    validated = [stage for stage in stages if len(stage.validation) > 1]
    if not validated:
        return []
    ticks = nice_ticks(0.0, float(max(stage.validation[-1].tokens for stage in validated)))
    spans = sorted({one.span for stage in validated for one in stage.validation if one.span})
    farthest = join_words([format_positions(*span) for span in spans])
    figures = []
    for title, note, name in (
        ("Validation loss", "nats per token, held-out rows", "loss"),
        ("Validation loss at far positions", f"the same at positions {farthest}", "farthest"),
    ):
        curves = {stage.name: [(one.tokens, getattr(one, name)) for one in stage.validation] for stage in validated}
        series = [Series(label=key, style=styles[key], points=_points(curve)) for key, curve in curves.items()]
        frame = Frame(
            label=f"{title} by tokens trained, one curve per stage.",
            x_title="tokens trained in the stage",
            x_ticks=[(tick, format_count(tick) if tick else "0") for tick in ticks[:-1]],
            show_y=lambda value: f"{value:g}",
            dots=max(map(len, curves.values())) <= MAX_DOTS,
        )
        figures.append(Figure(title=title, note=note, drawing=line_chart(series, frame)))
    return figures


def _points(values: list[tuple[int, float | None]]) -> list[Point]:
    size = math.ceil(len(values) / MAX_CURVE_POINTS)
    points = []
    for first in range(0, len(values), size):
        group = values[first : first + size]
        known = [value for _, value in group if value is not None]
        points.append(Point(x=float(group[-1][0]), y=sum(known) / len(known) if known else None))
    return points


def training_table(results: RunResults) -> Table:
    columns = ["stage", "starts from", "context", "steps", "tokens", "tokens/s", "MFU", "memory", "time", "last loss"]
    rows = [_row(stage, results.seconds.get(f"stages/{stage.name}")) for stage in results.stages]
    return Table(caption="Stages", columns=[*columns, "last loss by dataset"], rows=rows)


def _row(stage: Stage, seconds: float | None) -> list[Entry]:
    tail = stage.steps[-max(1, len(stage.steps) // 10) :]
    broken = sum(step.loss is None for step in stage.steps)
    steps = f"{stage.steps[-1].step:,}" if stage.steps else MISSING
    names = sorted({name for step in tail for name in step.losses})
    by_dataset = [f"{name} {_mean(step.losses.get(name) for step in tail)}" for name in names]
    speed = _median(step.tokens_per_second for step in stage.steps)
    mfu = _median(step.mfu for step in stage.steps)
    memory = max((step.memory_gib for step in stage.steps if step.memory_gib is not None), default=None)
    return [
        Entry(text=stage.name, note=_state(stage)),
        *entries(
            stage.parent or "base model", format_size(stage.context_length) if stage.context_length else MISSING, steps
        ),
        Entry(text=format_count(stage.tokens) if stage.steps else MISSING, tooltip=f"{stage.tokens:,} tokens"),
        Entry(text=MISSING if speed is None else format_count(speed), tooltip="median over steps"),
        Entry(text=format_percent(mfu), tooltip="median over steps"),
        Entry(text=MISSING if memory is None else f"{memory:.3g} GiB", tooltip="maximum over steps"),
        Entry(text=format_duration(seconds) if seconds is not None else MISSING),
        Entry(
            text=_mean(step.loss for step in tail),
            note=f"non-finite loss: {broken:,} of {len(stage.steps):,} steps" if broken else "",
            tooltip=f"mean of the last {len(tail)} steps",
        ),
        *entries(", ".join(by_dataset) or MISSING),
    ]


def _state(stage: Stage) -> str:
    """State of an unfinished stage. A killed stage has steps but no finished model."""
    if stage.finished:
        return ""
    if not stage.steps:
        return "not trained yet"
    planned = f" of {format_count(stage.planned_tokens)}" if stage.planned_tokens else ""
    return f"not finished: {format_count(stage.tokens)}{planned} tokens"


def wrong_steps(stages: Sequence[Stage]) -> list[str]:
    """One sentence per stage with faulty steps; it names the first of them."""
    notes = []
    for stage in stages:
        wrong = [step for step in stage.steps if step.wrong or step.skipped]
        if wrong:
            skipped = sum(step.skipped for step in wrong)
            said = f" ({excerpt(wrong[0].wrong)})" if wrong[0].wrong else ""
            notes.append(
                f"{stage.name}: {len(wrong):,} of {len(stage.steps):,} steps were faulty, {skipped:,} were skipped; "
                f"the first is step {wrong[0].step:,}{said}."
            )
    return notes


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.2f}" if known else MISSING
