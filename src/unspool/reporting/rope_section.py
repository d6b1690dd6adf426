"""The RoPE section: period of each dimension, and the bound B(m) of rope/bound.py.

Values come from each model's config.json, not from the recipe. Models with the same frequencies share a curve. B(m) is
computed at every distance of the context.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from unspool.core.charts import Figure, Frame, Point, Series, line_chart, nice_ticks
from unspool.core.errors import ConfigError
from unspool.core.formatting import MISSING, format_percent, join_words
from unspool.core.sizes import format_count, format_size
from unspool.core.table import Entry, Table, entries
from unspool.reporting.figures import context_mark
from unspool.reporting.run_results import BASE, RunResults
from unspool.rope.bound import curve
from unspool.rope.tables import config_frequencies

NUM_BINS = 96
MAX_DIMENSIONS = 16  # rows of the table; the chart shows all dimensions
MAX_HEADS = 64


@dataclass(frozen=True, kw_only=True)
class Rope:
    """One set of frequencies and the models that use it."""

    names: tuple[str, ...]
    style: int
    summary: str
    context: int
    inv_freq: np.ndarray  # float64[1 or number of distinct heads, d/2]
    reach: int | None  # first distance with B < 0 in any head; None if there is none in the context
    lowest: float  # minimum of B in the context, as a share of B(0)
    curve: tuple[tuple[float, float], ...]  # (distance, lowest share of B(0) around it), mean over heads

    @property
    def label(self) -> str:
        return join_words(list(self.names))

    @property
    def periods(self) -> np.ndarray:
        """Tokens per rotation of each dimension, of the slowest head."""
        return np.asarray(2 * np.pi / self.inv_freq.min(axis=0))


def ropes(results: RunResults, styles: Mapping[str, int]) -> list[Rope]:
    """Read the RoPE settings of each model, base model first; configs without RoPE are skipped."""
    target = results.target_context or results.original_context
    configs = {BASE: results.base_config} | {stage.name: stage.config for stage in results.stages}
    found: dict[tuple[bytes, int], list[str]] = {}
    known: dict[tuple[bytes, int], tuple[np.ndarray, str, int]] = {}
    for name, config in configs.items():
        context = target if name == BASE else results.context_of(name)
        read = _frequencies(config, context) if config and context else None
        if read is None or context is None:
            continue
        key = (read[0].tobytes(), context)
        found.setdefault(key, []).append(name)
        known[key] = (*read, context)
    return [_rope(names, styles[names[0]], *known[key]) for key, names in found.items()]


def _frequencies(config: dict[str, Any], context: int) -> tuple[np.ndarray, str] | None:
    """(frequencies of each distinct head, a summary of the settings)."""
    try:
        lines, summary = config_frequencies(config, context)
        return lines[:MAX_HEADS], summary
    except (ConfigError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _rope(names: Sequence[str], style: int, inv_freq: np.ndarray, summary: str, context: int) -> Rope:
    mean, reaches = np.zeros(context), []
    # One head at a time: at long contexts, all heads together would need gigabytes.
    for line in inv_freq:
        values = curve(line, context) / inv_freq.shape[1]
        mean += values / len(inv_freq)
        below = np.flatnonzero(values < 0)
        reaches += [int(below[0])] if len(below) else []
    edges = np.unique(np.geomspace(1, context, NUM_BINS + 1).round().astype(np.int64))
    lowest = np.minimum.reduceat(mean, edges[:-1]) if len(edges) > 1 else mean[1:2]
    middles = [math.sqrt(start * stop) for start, stop in pairwise(edges)]
    return Rope(
        names=tuple(names),
        style=style,
        summary=summary,
        context=context,
        inv_freq=inv_freq,
        reach=min(reaches) if reaches else None,
        lowest=float(mean.min()),
        curve=tuple((at, float(value)) for at, value in zip(middles, lowest, strict=False)),
    )


def position_figures(found: Sequence[Rope], original_context: int | None) -> list[Figure]:
    if not found:
        return []
    longest = max(rope.context for rope in found)
    powers = range(0, int(math.log2(longest)) + 1, 4 if longest > 1 << 12 else 3)
    series = [
        Series(label=rope.label, style=rope.style, points=[Point(x=x, y=y) for x, y in rope.curve]) for rope in found
    ]
    frame = Frame(
        label="B(m), how much higher a similar key scores than a random one at distance m, one curve per RoPE setting.",
        x_title="distance m (tokens, log scale)",
        x_ticks=[(float(1 << power), format_size(1 << power)) for power in powers],
        show_y=lambda value: f"{100 * value:g}%".replace("-", "−"),
        log_x=True,
        mark=context_mark(original_context),
        dots=False,
    )
    note = "lowest share of B(0) around each distance; below 0, a similar key scores lower than a random one"
    return [Figure(title="B(m)", note=note, drawing=line_chart(series, frame)), _period_figure(found)]


def _period_figure(found: Sequence[Rope]) -> Figure:
    series = [
        Series(
            label=rope.label,
            style=rope.style,
            points=[Point(x=float(at), y=math.log2(period)) for at, period in enumerate(rope.periods)],
        )
        for rope in found
    ]
    count = max(len(rope.periods) for rope in found)
    frame = Frame(
        label="Tokens per rotation of each RoPE dimension, one curve per RoPE setting.",
        x_title="RoPE dimension, highest frequency first",
        x_ticks=[(tick, f"{tick:g}") for tick in nice_ticks(0.0, float(count - 1)) if tick <= count - 1],
        show_y=lambda value: format_count(2**value),
        dots=False,
    )
    return Figure(title="Tokens per rotation", note="log scale", drawing=line_chart(series, frame))


def position_tables(found: Sequence[Rope], results: RunResults) -> list[Table]:
    if not found:
        return []
    methods = {stage.name: str(stage.rope.get("method", "unchanged")) for stage in results.stages}
    rows = []
    for rope in found:
        used = list(dict.fromkeys(methods.get(name, "original") for name in rope.names))
        inside = int((rope.periods <= rope.context).sum())
        rows.append(
            [
                Entry(text=rope.label),
                *entries(join_words(used), rope.summary, format_size(rope.context)),
                Entry(
                    text=f"{inside} of {len(rope.periods)}",
                    tooltip="dimensions that complete a rotation within the context",
                ),
                *entries(format_count(float(rope.periods.max()))),
                *entries(
                    "the whole context" if rope.reach is None else f"{rope.reach:,}",
                    format_percent(rope.lowest).replace("-", "−"),
                ),
            ]
        )
    columns = ["model", "method", "settings", "context", "dimensions with a full rotation", "slowest rotation, tokens"]
    table = Table(caption="RoPE", columns=[*columns, "B(m) ≥ 0 below", "lowest B(m)"], rows=rows)
    return [table, _period_table(found)]


def _period_table(found: Sequence[Rope]) -> Table:
    count = max(len(rope.periods) for rope in found)
    chosen = sorted({round(at) for at in np.linspace(0, count - 1, min(count, MAX_DIMENSIONS))})
    rows = []
    for at in chosen:
        shown = []
        for rope in found:
            if at >= len(rope.periods):
                shown.append(Entry(text=MISSING))
                continue
            shown.append(Entry(text=f"{rope.periods[at]:,.4g}", note=f"θ {rope.inv_freq.min(axis=0)[at]:.2e}"))
        rows.append([Entry(text=str(at)), *shown])
    columns = ["dimension", *(rope.label for rope in found)]
    note = "Of the slowest head." if any(len(rope.inv_freq) > 1 for rope in found) else ""
    return Table(caption="Tokens per rotation by dimension", columns=columns, rows=rows, note=note)
