"""Bars in pairs as inline SVG: how long documents are, and what was asked for beside what came.

In: shares and labels. Out: markup that is safe to put into the page.
Promise: every text is escaped; the two bars of a pair differ in shade and in outline, not in hue alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from unspool.reporting.charts import element, nice_ticks, svg
from unspool.reporting.number_format import clipped

# As wide as a heatmap, beside which it has the same size of text.
WIDTH, HEIGHT = 320.0, 168.0
LEFT, TOP, BOTTOM, TITLE = 44.0, 10.0, 24.0, 18.0
MAX_LABELS, MAX_BAR, LETTER = 6, 26.0, 6.6


@dataclass(frozen=True, kw_only=True)
class Pair:
    label: str
    first: float  # shares, 0 to 1
    second: float | None
    tooltip: str


def pair_bars(pairs: Sequence[Pair], *, label: str, x_title: str) -> Markup:
    """Two bars at each place; None draws none."""
    top = max((share for pair in pairs for share in (pair.first, pair.second or 0.0)), default=0.0) or 1.0
    ticks = nice_ticks(0.0, top, 4)
    floor = HEIGHT - BOTTOM - TITLE
    wide = (WIDTH - LEFT - 6) / max(1, len(pairs))
    parts = [_grid(tick, floor - (floor - TOP) * tick / ticks[-1]) for tick in ticks]
    stride = -(-len(pairs) // MAX_LABELS)
    for at, pair in enumerate(pairs):
        left, bar = LEFT + wide * at, min(wide * 0.4, MAX_BAR)
        drawn = [
            element("title", pair.tooltip),
            element("rect", class_="hit", x=left, y=TOP, width=wide, height=floor - TOP),
        ]
        for share, name, x in ((pair.first, "first", -bar), (pair.second, "second", 0.0)):
            if share is not None:
                high = (floor - TOP) * share / ticks[-1]
                box = {"x": left + wide / 2 + x, "y": floor - high, "width": bar, "height": high}
                drawn.append(element("rect", class_=f"bar-{name}", **box))
        parts.append(element("g", *drawn))
        # Counted from the last, which is the one that matters.
        if (len(pairs) - 1 - at) % stride == 0:
            name = clipped(pair.label, max(4, int(wide * stride / LETTER)))
            parts.append(element("text", name, class_="tick", x=left + wide / 2, y=floor + 15, text_anchor="middle"))
    middle = (LEFT + WIDTH) / 2
    parts.append(element("text", x_title, class_="title", x=middle, y=HEIGHT - 6, text_anchor="middle"))
    return svg(WIDTH, HEIGHT, label, *parts)


def _grid(tick: float, y: float) -> Markup:
    line = element("line", class_="grid", x1=LEFT, x2=WIDTH, y1=y, y2=y)
    return line + element("text", f"{100 * tick:g}%", class_="tick", x=LEFT - 6, y=y + 4, text_anchor="end")


def bar_key(style: str) -> Markup:
    """A legend's key: `first` or `second`."""
    box = element("rect", class_=f"bar-{style}", x=1, y=1, width=12, height=12)
    return element("svg", box, class_="key", viewBox="0 0 14 14", width=14, height=14, aria_hidden="true")
