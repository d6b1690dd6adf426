"""Attention maps with axes, document boundaries and color scales, as SVG: for the page, and as a figure file.

Every text is escaped, and each picture has a text description. Thin lines mark where documents begin; a dotted line
separates near from far.
"""

import base64
import struct
import zlib
from dataclasses import dataclass
from itertools import accumulate, pairwise
from textwrap import wrap

import numpy as np
from markupsafe import Markup

from unspool.core.formatting import one_line
from unspool.core.html import element, svg, svg_line, svg_text
from unspool.core.sizes import format_size
from unspool.inspection.attention.measure import Attention, Head, head_name, show_share

# Entry 0 of a palette is transparent; the others are the scale.
_STEPS = 255


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Colors by the logarithm of a value, from `lowest` to 1."""

    decades: int
    colors: tuple[str, ...]
    signed: bool = False  # then the middle color is for 0 and absolute values below `lowest`

    @property
    def lowest(self) -> float:
        return float(10.0**-self.decades)

    def places(self, values: np.ndarray) -> np.ndarray:
        """Map values to positions along the colors, from 0 to 1."""
        sizes = np.log10(np.maximum(np.abs(values), self.lowest) / self.lowest) / self.decades
        found: np.ndarray = np.clip(sizes, 0, 1)
        return (found * np.sign(values) + 1) / 2 if self.signed else found

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions from 0 to 1 and their labels."""
        shares = [(at / self.decades, f"{100 * self.lowest * 10**at:g}%") for at in range(self.decades + 1)]
        if not self.signed:
            return shares
        ups = [((place + 1) / 2, name) for place, name in shares[self.decades % 2 or 2 :: 2]]
        downs = [(1 - place, f"−{name}") for place, name in reversed(ups)]
        return [*downs, (0.5, "0"), *((place, f"+{name}") for place, name in ups)]


# Dark to bright, readable with red-green color blindness.
MAP = Scale(decades=5, colors=("#0d1233", "#3a2d78", "#7c3a8c", "#c14d7a", "#f0785a", "#fbb65f", "#fdf3b4"))
DIFFERENCE = Scale(
    decades=4,
    colors=("#08306b", "#2171b5", "#7fb3dc", "#e8e8ea", "#f2a184", "#cb2f2a", "#67000d"),
    signed=True,
)


def map_png(values: np.ndarray, scale: Scale) -> bytes:
    """Render a square map as PNG; the part above the diagonal is transparent."""
    indices = (1 + np.rint(scale.places(values) * (_STEPS - 1))).astype(np.uint8)
    indices[np.triu_indices(len(indices), 1)] = 0
    return _png(indices, _palette(scale.colors))


def scale_png(scale: Scale) -> bytes:
    """Render the colors of a scale from lowest to highest, one pixel high."""
    return _png(np.arange(1, _STEPS + 1, dtype=np.uint8)[None], _palette(scale.colors))


def _palette(anchors: tuple[str, ...]) -> bytes:
    rgb = np.array([[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in anchors])
    places, steps = np.linspace(0, 1, len(anchors)), np.linspace(0, 1, _STEPS)
    mixed = np.stack([np.interp(steps, places, channel) for channel in rgb.T], axis=1)
    entries: bytes = np.rint(mixed).astype(np.uint8).tobytes()
    return bytes(3) + entries


def _png(indices: np.ndarray, palette: bytes) -> bytes:
    # A palette PNG needs 15 lines, which do not justify a dependency on an imaging library.
    height, width = indices.shape
    lines = np.pad(indices, ((0, 0), (1, 0)))  # each line begins with its filter, none
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette), (b"tRNS", b"\0"), (b"IDAT", zlib.compress(lines.tobytes(), 9)))
    body = b"".join(_chunk(name, content) for name, content in (*chunks, (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + body


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _image(png: bytes, **box: float) -> Markup:
    """Embed a picture, which needs no file and no network."""
    href = "data:image/png;base64," + base64.b64encode(png).decode()
    return element("image", href=href, preserveAspectRatio="none", **box)


# In viewBox units: about a phone's width, so that text stays readable there.
SIDE = 320.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 24.0, 10.0, 42.0
WIDTH, HEIGHT = LEFT + SIDE + RIGHT, TOP + SIDE + BOTTOM
SCALE_HEIGHT = 44.0
_GAP = 18.0
_PER_LINE = 2  # maps of one model in a line of a figure
_LETTER = 6.2  # about the width of a letter
# Labels of pieces below this share of the text would overlap.
_MIN_NAMED_SHARE = 0.035
_STYLE = """
text { font: 12px system-ui, "Liberation Sans", sans-serif; fill: #444b55; }
.strong { font-weight: 600; fill: #171b22; }
.border { stroke: #fff; stroke-opacity: .6; stroke-width: .8; }
.near { stroke: #fff; stroke-opacity: .8; stroke-dasharray: 2 3; }
.difference .border { stroke: #171b22; stroke-opacity: .4; }
.difference .near { stroke: #171b22; stroke-opacity: .6; }
.axis { stroke: #9aa5b4; } image { image-rendering: pixelated; }
"""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One map, or the difference of two."""

    title: str
    svg: Markup


@dataclass(frozen=True, kw_only=True)
class Line:
    """Maps side by side."""

    title: str
    panels: list[Panel]


def panels_of(attention: Attention, head: Head) -> list[Panel]:
    """Draw the map of each model and, for two models, the difference second minus first."""
    panels = [
        _panel(attention, model.name, _describe_map(attention, number, head), stats.maps[head], MAP)
        for number, (model, stats) in enumerate(zip(attention.models, attention.stats, strict=True))
    ]
    if len(attention.models) == 2:
        change = attention.difference(head)
        about = (
            f"Difference of the maps of {head_name(head)}: {attention.models[1].name} minus "
            f"{attention.models[0].name}. Higher in {_share_of_cells(change > DIFFERENCE.lowest)} of cells, lower in "
            f"{_share_of_cells(change < -DIFFERENCE.lowest)}."
        )
        panels.append(_panel(attention, "difference", about, change, DIFFERENCE))
    return panels


def scale_svg(scale: Scale, title: str) -> Markup:
    """Draw a color bar with its labels."""
    ticks = scale.ticks()
    return svg(
        WIDTH,
        SCALE_HEIGHT,
        f"Color scale: {title}, from {ticks[0][1]} to {ticks[-1][1]}, by powers of ten",
        _image(scale_png(scale), x=LEFT, y=0, width=SIDE, height=12),
        *(svg_text(LEFT + place * SIDE, 25, name) for place, name in ticks),
        svg_text(LEFT + SIDE / 2, 38, title),
    )


def scale_titles(attention: Attention) -> list[tuple[Scale, str]]:
    found = [(MAP, "largest probability in a cell, log scale")]
    return [*found, (DIFFERENCE, "second model minus first, log scale")] if len(attention.models) == 2 else found


def lines_of(attention: Attention) -> list[Line]:
    """Arrange maps: for two models a line per head; for one model, heads side by side."""
    panels = [panels_of(attention, head) for head in attention.heads]
    if len(attention.models) == 2:
        return [
            Line(title=head_line(attention, head), panels=each)
            for head, each in zip(attention.heads, panels, strict=True)
        ]
    named = [
        Panel(title=f"{head_name(head)}: {show_share(attention.stats[0].far_of(head))} far back", svg=panel.svg)
        for head, (panel,) in zip(attention.heads, panels, strict=True)
    ]
    return [Line(title="", panels=named[at : at + _PER_LINE]) for at in range(0, len(named), _PER_LINE)]


def render_figure(attention: Attention) -> str:
    """Render one SVG file: lines of maps, and the color scales."""
    lines = lines_of(attention)
    width = max(len(line.panels) for line in lines) * (WIDTH + _GAP) - _GAP
    head = [title_line(attention), *wrap(about_line(attention), int(width / _LETTER))]
    drawn = [_figure_text(0, 16 + 17 * at, text, strong=not at) for at, text in enumerate(head)]
    down = 17.0 * len(head) + 14
    for line in lines:
        if line.title:
            drawn.append(_figure_text(0, down + 12, line.title, strong=True))
            down += 26
        for number, panel in enumerate(line.panels):
            across = number * (WIDTH + _GAP)
            drawn.append(_figure_text(across + LEFT, down + 10, panel.title))
            drawn.append(_placed(panel.svg, across, down + 12, HEIGHT))
        down += HEIGHT + 22
    for number, (scale, title) in enumerate(scale_titles(attention)):
        # Each scale is below its maps; the difference is on the right.
        drawn.append(_placed(scale_svg(scale, title), number * (width - WIDTH), down, SCALE_HEIGHT))
    whole_width, height = width + 32, down + SCALE_HEIGHT + 24
    whole = element(
        "svg",
        element("style", Markup(_STYLE)),
        element("rect", x=-16, y=-12, width="100%", height="100%", fill="#fff"),
        Markup("\n"),
        Markup("\n").join(drawn),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"-16 -12 {whole_width:g} {height:g}",
        width=whole_width,
        height=height,
        role="img",
        aria_label=head[0],
    )
    return f"{whole}\n"


def _figure_text(x: float, y: float, text: str, *, strong: bool = False) -> Markup:
    return element("text", text, class_="strong" if strong else None, x=x, y=y)


def title_line(attention: Attention) -> str:
    names = " and ".join(one_line(model.name) for model in attention.models)
    return f"Attention of {names} on {format_size(len(attention.text.tokens))} tokens"


def about_line(attention: Attention) -> str:
    """Describe what a point of a map shows."""
    block, cell = attention.block, attention.settings.cell
    pooled = f" ({cell // block} × {cell // block} blocks of {block}, pooled for drawing)" if cell > block else ""
    borders = ", thin lines: boundaries of documents and pieces" if len(attention.text.piece_lens) > 1 else ""
    return (
        f"Each point: the largest probability in {cell} × {cell} tokens{pooled}. Dotted line: "
        f"{attention.settings.beyond:,} tokens back{borders}."
    )


def head_line(attention: Attention, head: Head) -> str:
    far = " → ".join(show_share(stats.far_of(head)) for stats in attention.stats)
    own = " → ".join(show_share(stats.same_of(head)) for stats in attention.stats)
    within = f", {own} within the same document" if attention.has_pieces else ""
    beyond = f"{attention.settings.beyond:,}"
    return f"{head_name(head).capitalize()}: {far} of attention goes more than {beyond} tokens back{within}"


def _placed(drawing: Markup, x: float, y: float, height: float) -> Markup:
    """Place a drawing inside another one, at its own size."""
    place = f'<svg x="{x:g}" y="{y:g}" width="{WIDTH:g}" height="{height:g}"'
    return Markup(str(drawing).replace("<svg", place, 1))


def _panel(attention: Attention, title: str, about: str, values: np.ndarray, scale: Scale) -> Panel:
    extent = len(values) * attention.settings.cell  # tokens per side, with the last cell in full
    image = _image(map_png(values, scale), x=LEFT, y=TOP, width=SIDE, height=SIDE)
    kind = "chart map difference" if scale.signed else "chart map"
    drawn = svg(WIDTH, HEIGHT, about, image, *_borders(attention, extent), *_axes(extent), class_=kind)
    return Panel(title=one_line(title), svg=drawn)


def _borders(attention: Attention, extent: int) -> list[Markup]:
    """Draw lines where pieces begin, their names above the diagonal, and the line between near and far."""
    per = SIDE / extent
    drawn = []
    borders = list(accumulate(attention.text.piece_lens, initial=0))
    for at in borders[1:-1]:
        place = at * per
        path = f"M{LEFT:.1f} {TOP + place:.1f}H{LEFT + place:.1f}V{TOP + SIDE:.1f}"
        drawn.append(element("path", class_="border", fill="none", d=path))
    for name, (start, stop) in zip(attention.text.piece_names, pairwise(borders), strict=True):
        if len(borders) > 2 and stop - start >= _MIN_NAMED_SHARE * extent:
            middle = (start + stop) / 2 * per
            drawn.append(_figure_text(LEFT + middle + 5, TOP + middle - 1, name))
    near = attention.settings.beyond * per
    return [*drawn, svg_line(LEFT, TOP + near, LEFT + SIDE - near, TOP + SIDE, "near")]


def _axes(extent: int) -> list[Markup]:
    floor = TOP + SIDE
    drawn = [element("path", class_="axis", fill="none", d=f"M{LEFT:g} {TOP:g}V{floor:g}H{LEFT + SIDE:g}")]
    for part in (0, 1, 2, 3, 4):
        tokens = extent * part / 4
        name = f"{tokens / 1024:.3g}K" if extent >= 4096 and part else f"{tokens:.0f}"
        place = part / 4 * SIDE
        drawn.append(svg_text(LEFT + place, floor + 15, name, "middle" if part < 4 else "end"))
        drawn += [svg_text(LEFT - 5, TOP + place + 4, name, "end")] if part else []
    turn = f"translate(12 {TOP + SIDE / 2:g}) rotate(-90)"
    return [
        *drawn,
        svg_text(LEFT + SIDE / 2, floor + 33, "key (token)"),
        element("text", "query (token)", transform=turn, text_anchor="middle"),
    ]


def _describe_map(attention: Attention, number: int, head: Head) -> str:
    stats, settings = attention.stats[number], attention.settings
    own = stats.same_of(head) if attention.has_pieces else None
    within = f", {show_share(own)} within the same document" if own is not None else ""
    return (
        f"Map of {head_name(head)} of {attention.models[number].name}: {show_share(stats.far_of(head))} of attention "
        f"goes more than {settings.beyond:,} tokens back{within}."
    )


def _share_of_cells(cells: np.ndarray) -> str:
    """Return the share of cells at and below the diagonal."""
    return show_share(float(cells[np.tril_indices(len(cells))].mean()))
