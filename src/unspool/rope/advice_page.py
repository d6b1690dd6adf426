"""The advice as text, for the terminal and for one HTML file with a small plot of B(m) per method.

The page loads nothing and runs no scripts; all text is escaped.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from unspool import __version__
from unspool.core.html import templates_in, write_html
from unspool.core.sizes import format_size
from unspool.rope.advice import PUBLISHED, Advice, MethodAdvice
from unspool.rope.tables import format_base

_LEVELS = "▁▂▃▄▅▆▇█"
_NEGATIVE = "×"


def model_facts(advice: Advice) -> list[tuple[str, str]]:
    rope = advice.rope
    heads = f"{rope.num_kv_heads} KV heads" if rope.num_kv_heads > 1 else "a single KV head"
    rotated = f"{rope.rotary_dim} dimensions of each head rotate"
    if rope.rotary_dim != advice.head_dim:
        rotated += f", of {advice.head_dim}"
    scaling = advice.parameters["rope_type"]
    own = f"base {format_base(rope.base)}" + ("" if scaling == "default" else f", scaled: {scaling}")
    if advice.head_bases:
        own = "a base per head (HARPE)"
    facts = [("rotary shape", f"{rotated}, {heads}"), ("positions now", own)]
    made = f"{format_size(rope.original_len)} tokens"
    if rope.max_positions != rope.original_len:
        made += f", claims {format_size(rope.max_positions)}"
    facts.append(("made for", made))
    if advice.local_layers:
        facts.append(("sliding layers", "keep their own frequencies; the numbers below are for the other layers"))
    return facts


def verdict(advice: Advice) -> list[tuple[str, str]]:
    """Return the two rules of thumb for one base."""
    target = format_size(advice.context_len)
    if advice.bound is None:
        men = "no base up to 1e16 passes"
    else:
        passing = f"the smallest base of two digits with B(m) ≥ 0 at every distance below {target}"
        men = f"{format_base(advice.bound)}, {passing}; good models have been trained on both sides of it"
    factor = advice.context_len / advice.rope.original_len
    ntk = f"{format_base(advice.ntk_base)}, for {factor:g} times the length (ProLong trained with twice what it gives)"
    return [("bound of Men et al.", men), ("NTK rule", ntk)]


def reach_text(each: MethodAdvice, advice: Advice) -> str:
    worst, best = (_distance(reach, advice) for reach in each.reach)
    return worst if worst == best else f"{worst} to {best}"


def _distance(reach: int, advice: Advice) -> str:
    return f"over {format_size(advice.looked_until)}" if reach >= advice.looked_until else f"{reach:,}"


def sparkline(each: MethodAdvice, width: int) -> str:
    """Draw the lowest B(m) by distance, on a logarithmic scale; × where it is negative."""
    parts = [
        each.curve[len(each.curve) * number // width : len(each.curve) * (number + 1) // width]
        for number in range(min(width, len(each.curve)))
    ]
    lowest = [min(part) for part in parts]
    return "".join(_NEGATIVE if low < 0 else _LEVELS[min(7, int(8 * low))] for low in lowest)


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
        .get_template("advice_page.html.j2")
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
