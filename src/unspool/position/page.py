"""The advice as one HTML file: a small plot of B(m) for each method, and the numbers as tables.

Promise: no network, no scripts, every text escaped.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from unspool import __version__
from unspool.base.html import templates_in, write_html
from unspool.base.sizes import format_size
from unspool.position.advice import Advice, MethodAdvice
from unspool.position.published import PUBLISHED
from unspool.position.wording import model_facts, reach_text, verdict

# In viewBox units.
WIDTH, HEIGHT = 320.0, 170.0
LEFT, RIGHT, TOP, BOTTOM = 34.0, 10.0, 10.0, 30.0


@dataclass(frozen=True, kw_only=True)
class MethodView:
    method: str
    summary: str
    line: str
    reach: str
    lowest: str
    is_short: bool
    plot: Markup


def write_advice(advice: Advice, model: str, out_file: Path) -> None:
    write_html(out_file, render_advice(advice, model))


def render_advice(advice: Advice, model: str) -> str:
    views = [
        MethodView(
            method=each.method,
            summary=each.summary,
            line=each.line,
            reach=reach_text(each, advice),
            lowest=f"{100 * each.lowest:.1f}%",
            is_short=each.reach[0] < advice.context_len,
            plot=_plot(each, advice),
        )
        for each in advice.methods
    ]
    return (
        templates_in(Path(__file__).parent)
        .get_template("page.html.j2")
        .render(
            model=model,
            context=format_size(advice.context_len),
            facts=model_facts(advice),
            verdict=verdict(advice),
            methods=views,
            published=PUBLISHED,
            version=__version__,
        )
    )


def _plot(each: MethodAdvice, advice: Advice) -> Markup:
    """The lowest B(m) of every bin, as a share of B(0), over distances on a logarithmic scale."""
    low, high = min(-0.25, *(min(other.curve) for other in advice.methods)), 1.0
    floor = HEIGHT - BOTTOM
    span = math.log(advice.context_len)

    def place_x(distance: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(max(1.0, distance)) / span

    def place_y(value: float) -> float:
        return floor - (floor - TOP) * (value - low) / (high - low)

    drawn = []
    for value in (0.0, 0.5, 1.0):
        style = "zero" if value == 0 else "grid"
        drawn.append(
            Markup('<line class="{}" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"></line>').format(
                style, LEFT, WIDTH - RIGHT, place_y(value), place_y(value)
            )
        )
        drawn.append(_text(LEFT - 5, place_y(value) + 4, f"{100 * value:g}%", "end"))
    for power in range(0, int(math.log2(advice.context_len)) + 1, 5 if advice.context_len > 1 << 12 else 3):
        drawn.append(_text(place_x(2.0**power), floor + 16, format_size(1 << power), "middle"))
    middles = [math.sqrt(start * stop) for start, stop in zip(advice.edges[:-1], advice.edges[1:], strict=True)]
    points = [f"{place_x(x):.1f} {place_y(y):.1f}" for x, y in zip(middles, each.curve, strict=True)]
    drawn.append(Markup('<path class="curve" d="M{}"></path>').format("L".join(points)))
    drawn += [
        Markup('<circle class="below" cx="{:.1f}" cy="{:.1f}" r="2.6"></circle>').format(place_x(x), place_y(y))
        for x, y in zip(middles, each.curve, strict=True)
        if y < 0
    ]
    about = f"{each.method}: lowest B(m) by distance, {reach_text(each, advice)} before it is negative"
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        f"{WIDTH:g}", f"{HEIGHT:g}", about, Markup("").join(drawn)
    )


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)
