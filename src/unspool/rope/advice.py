"""Advice before extending a model to a context length: bounds, settings, curves, and an HTML page with them.

Every suggested base and factor is the one that a recipe with the printed line uses. The page is one HTML file that
loads nothing and runs no scripts; all text is escaped.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from unspool import __version__
from unspool.core.errors import ConfigError
from unspool.core.html import element, load_templates, svg, svg_line, svg_text
from unspool.core.sizes import format_size
from unspool.rope.bound import bound, curve, first_negative
from unspool.rope.methods import ROPE_METHODS, Unchanged
from unspool.rope.tables import (
    RopeMethod,
    RopeShape,
    config_frequencies,
    format_base,
    global_parameters,
    is_nested,
    ntk_base,
    shape_of,
)

NUM_BINS = 60
# The search for the first negative B ends at this multiple of the context length.
SEARCH_FACTOR = 4


@dataclass(frozen=True, kw_only=True)
class MethodAdvice:
    method: str
    line: str  # line to paste into a stage of a recipe
    summary: str  # description of the settings
    parameters: dict[str, Any] | None  # `rope_parameters`; None if transformers cannot express the method
    max_positions: int
    reach: tuple[int, int]  # B ≥ 0 below this distance, for the worst and the best head
    lowest: float  # B within the context, relative to its value at distance 0
    curve: tuple[float, ...]  # lowest relative B in each bin, as a mean over heads


@dataclass(frozen=True, kw_only=True)
class Advice:
    rope: RopeShape
    head_dim: int
    parameters: dict[str, Any]  # the model's own, for the layers with full attention
    head_bases: Any  # if the model already has a base per head
    local_layers: bool  # whether other layers keep frequencies of their own
    context_len: int
    bound: float | None
    ntk_base: float
    looked_until: int  # searched up to this distance; a reach of this value means "at least"
    edges: tuple[int, ...]  # of the bins of the curves
    methods: tuple[MethodAdvice, ...]


def advise(
    config: Mapping[str, Any], context_len: int, *, advance: Callable[[int], None] = lambda done: None
) -> Advice:
    """Compute the advice for a model's config as a plain dict; `advance` is called for each base that is tried."""
    rope, parameters = shape_of(config), global_parameters(config)
    smallest, ntk = _bases(rope, context_len, advance)
    looked_until = SEARCH_FACTOR * context_len
    edges = np.unique(np.geomspace(1, context_len, NUM_BINS + 1).round().astype(np.int64))
    own_frequencies, own_summary = config_frequencies(config, context_len)
    methods = [
        MethodAdvice(
            method=Unchanged().method,
            line=_recipe_line(Unchanged()),
            summary=own_summary,
            parameters=parameters,
            max_positions=rope.max_positions,
            **_measure(own_frequencies, looked_until, edges),
        )
    ]
    for cls in ROPE_METHODS.values():
        position = cls.suggest(rope, context_len, smallest or float(format_base(ntk)))
        if position is None:
            continue
        settled = position.resolve(rope, context_len)
        inv_freq = np.atleast_2d(settled.tables(rope, context_len).inv_freq).astype(np.float64)
        methods.append(
            MethodAdvice(
                method=position.method,
                line=_recipe_line(position),
                summary=settled.summary(rope, context_len),
                parameters=settled.parameters,
                max_positions=settled.max_positions,
                **_measure(inv_freq, looked_until, edges),
            )
        )
    return Advice(
        rope=rope,
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        parameters=parameters,
        head_bases=config.get("head_bases"),
        local_layers=is_nested(config.get("rope_parameters") or {}),
        context_len=context_len,
        bound=smallest,
        ntk_base=ntk,
        looked_until=looked_until,
        edges=tuple(int(edge) for edge in edges),
        methods=tuple(methods),
    )


def advised_base(config: Mapping[str, Any], context_len: int) -> float:
    """Return the advised base for `ABF`: the bound of Men et al., or else the base of the NTK rule."""
    smallest, ntk = _bases(shape_of(config), context_len)
    return smallest or float(format_base(ntk))


def _bases(
    rope: RopeShape, context_len: int, advance: Callable[[int], None] = lambda done: None
) -> tuple[float | None, float]:
    """Return the smallest base that passes the bound of Men et al. (None without one), and the base of the NTK rule."""
    if context_len <= rope.original_len:
        raise ConfigError(
            f"`context_length={format_size(context_len)!r}`: the model was trained for "
            f"{format_size(rope.original_len)} already; give a longer context."
        )
    smallest = bound(context_len, rope.rotary_dim, advance=advance)
    return smallest, ntk_base(rope.base, context_len / rope.original_len, rope.rotary_dim)


def _recipe_line(position: RopeMethod) -> str:
    given = position.model_dump(exclude_defaults=True) | {"method": position.method}
    words = (f"{key}: {format_base(value) if isinstance(value, float) else value}" for key, value in given.items())
    return f"rope: {{{', '.join(sorted(words, key=lambda word: not word.startswith('method')))}}}"


def _measure(inv_freq: np.ndarray, looked_until: int, edges: np.ndarray) -> dict[str, Any]:
    inv_freq = np.unique(inv_freq, axis=0)  # heads and layers may share bases
    reaches = [first_negative(line, looked_until) or looked_until for line in inv_freq]
    values = np.mean([curve(line, int(edges[-1])) for line in inv_freq], axis=0) / inv_freq.shape[1]
    lowest = np.minimum.reduceat(values, edges[:-1])
    return {
        "reach": (min(reaches), max(reaches)),
        "lowest": float(values.min()),
        "curve": tuple(float(value) for value in lowest),
    }


@dataclass(frozen=True)
class Published:
    """How a published model extended its context."""

    model: str
    lengths: str
    positions: str
    source: str


PUBLISHED = (
    Published(
        "Llama 3.1 405B",
        "8K → 128K in six steps",
        "base 5e5 from the start; released with llama3 scaling",
        "arXiv 2407.21783",
    ),
    Published("Qwen2.5-1M", "64K → 128K → 256K", "base 1e6, 5e6, 1e7", "arXiv 2501.15383"),
    Published("Qwen3", "32K", "base 1e4 → 1e6; YaRN ×4 without training", "arXiv 2505.09388"),
    Published("ProLong (Llama-3-8B)", "64K, then 512K", "base 8e6, 1.28e8", "arXiv 2410.02660"),
    Published("Untie the Knots (Qwen2-7B)", "32K → 128K", "base 1e6 → 5e6", "arXiv 2409.04774"),
    Published("HARPE (Llama-2-7B)", "4K → 128K", "a base per head, 1e6 to 5e6", "arXiv 2412.07171"),
    Published("Olmo 3", "8K → 64K", "base 5e5, YaRN ×8 on layers with full attention", "Olmo 3 report"),
    Published("SmolLM3 3B", "32K, 64K", "base 1.5e6, 5e6; YaRN to 128K without training", "SmolLM3 blog"),
    Published("DeepSeek-V3", "32K, 128K", "YaRN, factor 40", "arXiv 2412.19437"),
    Published("Gemma 3", "32K → 128K", "global layers base 1e6, then PI ×8; local layers 1e4", "arXiv 2503.19786"),
    Published(
        "Gradient Llama-3-8B", "64K, 256K, 512K, 1M", "base 1.53e7, 2.07e8, 1.06e9, 2.8e9", "model cards on the Hub"
    ),
)


# The advice as text and as a page

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
        made += f", max_position_embeddings {format_size(rope.max_positions)}"
    facts.append(("trained for", made))
    if advice.local_layers:
        facts.append(("sliding layers", "keep their own frequencies; the numbers below are for the other layers"))
    return facts


def verdict(advice: Advice) -> list[tuple[str, str]]:
    """Return a sentence about one base by the two rules of thumb."""
    target = format_size(advice.context_len)
    if advice.bound is None:
        men = "no base up to 1e16 passes"
    else:
        passing = f"the smallest base of two digits with B(m) ≥ 0 at every distance below {target}"
        men = f"{format_base(advice.bound)}, {passing}; good models have been trained on both sides of it"
    factor = advice.context_len / advice.rope.original_len
    ntk = f"{format_base(advice.ntk_base)}, for {factor:g} times the length (ProLong trained with twice this base)"
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


def render_advice(advice: Advice, model: str) -> str:
    methods = [
        {
            "advice": each,
            "reach": reach_text(each, advice),
            "is_short": each.reach[0] < advice.context_len,
            "plot": _plot(each, advice),
        }
        for each in advice.methods
    ]
    template = load_templates(Path(__file__).parent).get_template("advice.html.j2")
    return template.render(
        model=model,
        context=format_size(advice.context_len),
        facts=model_facts(advice),
        verdict=verdict(advice),
        methods=methods,
        published=PUBLISHED,
        version=__version__,
    )


def _plot(each: MethodAdvice, advice: Advice) -> Markup:
    """Plot the lowest B(m) of every bin, relative to B(0), over distances on a logarithmic scale."""
    low, high = min(-0.25, *(min(other.curve) for other in advice.methods)), 1.0
    floor = HEIGHT - BOTTOM
    span = math.log(advice.context_len)

    def place_x(distance: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(max(1.0, distance)) / span

    def place_y(value: float) -> float:
        return floor - (floor - TOP) * (value - low) / (high - low)

    drawn = []
    for value in (0.0, 0.5, 1.0):
        y = place_y(value)
        drawn.append(svg_line(LEFT, y, WIDTH - RIGHT, y, "grid" if value else "zero"))
        drawn.append(svg_text(LEFT - 5, y + 4, f"{100 * value:g}%", "end"))
    for power in range(0, int(math.log2(advice.context_len)) + 1, 5 if advice.context_len > 1 << 12 else 3):
        drawn.append(svg_text(place_x(2.0**power), floor + 16, format_size(1 << power)))
    middles = [math.sqrt(start * stop) for start, stop in zip(advice.edges[:-1], advice.edges[1:], strict=True)]
    points = [(place_x(x), place_y(y)) for x, y in zip(middles, each.curve, strict=True)]
    drawn.append(element("path", class_="curve", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)))
    drawn += [
        element("circle", class_="below", cx=x, cy=y, r=2.6)
        for (x, y), value in zip(points, each.curve, strict=True)
        if value < 0
    ]
    about = f"{each.method}: lowest B(m) by distance, {reach_text(each, advice)} before it is negative"
    return svg(WIDTH, HEIGHT, about, *drawn, class_=None)
