"""Attention maps with axes, document borders and scales, as SVG: for the page, and as a figure of its own.

Promise: every text is escaped; each picture says in words what it shows; documents have thin lines where they begin,
and a dotted line parts what is near from what is far.
"""

import base64
import struct
import zlib
from dataclasses import dataclass
from itertools import accumulate, pairwise
from textwrap import wrap

import numpy as np
from markupsafe import Markup

from unspool.core.sizes import format_size
from unspool.inspection.attention.head_table import head_name, show_share
from unspool.inspection.attention.measure import Attention, Head
from unspool.inspection.items import one_line

# Maps as pictures: PNG with a palette, as a `data:` address that needs no file and no network.


# Entry 0 of a palette is transparent; the others are the scale.
_STEPS = 255


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Colours by the logarithm of a value, from `lowest` to 1."""

    decades: int
    colours: tuple[str, ...]
    signed: bool = False  # then the middle colour is that of 0, and what is nearer to it than `lowest`

    @property
    def lowest(self) -> float:
        return float(10.0**-self.decades)

    def places(self, values: np.ndarray) -> np.ndarray:
        """From 0 to 1 along the colours."""
        sizes = np.log10(np.maximum(np.abs(values), self.lowest) / self.lowest) / self.decades
        found: np.ndarray = np.clip(sizes, 0, 1)
        return (found * np.sign(values) + 1) / 2 if self.signed else found

    def ticks(self) -> list[tuple[float, str]]:
        """Places from 0 to 1, and what stands there."""
        shares = [(at / self.decades, f"{100 * self.lowest * 10**at:g}%") for at in range(self.decades + 1)]
        if not self.signed:
            return shares
        ups = [((place + 1) / 2, name) for place, name in shares[self.decades % 2 or 2 :: 2]]
        downs = [(1 - place, f"−{name}") for place, name in reversed(ups)]
        return [*downs, (0.5, "0"), *((place, f"+{name}") for place, name in ups)]


# Dark to bright, also for eyes that do not tell red from green.
MAP = Scale(decades=5, colours=("#0d1233", "#3a2d78", "#7c3a8c", "#c14d7a", "#f0785a", "#fbb65f", "#fdf3b4"))
DIFFERENCE = Scale(
    decades=4,
    colours=("#08306b", "#2171b5", "#7fb3dc", "#e8e8ea", "#f2a184", "#cb2f2a", "#67000d"),
    signed=True,
)


def map_png(values: np.ndarray, scale: Scale) -> bytes:
    """A square map; what lies above the diagonal is transparent."""
    indices = (1 + np.rint(scale.places(values) * (_STEPS - 1))).astype(np.uint8)
    indices[np.triu_indices(len(indices), 1)] = 0
    return _png(indices, _palette(scale.colours))


def scale_png(scale: Scale) -> bytes:
    """The colours of a scale from its lowest to its highest, one point high."""
    return _png(np.arange(1, _STEPS + 1, dtype=np.uint8)[None], _palette(scale.colours))


def data_address(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _palette(anchors: tuple[str, ...]) -> bytes:
    rgb = np.array([[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in anchors])
    places, steps = np.linspace(0, 1, len(anchors)), np.linspace(0, 1, _STEPS)
    mixed = np.stack([np.interp(steps, places, channel) for channel in rgb.T], axis=1)
    entries: bytes = np.rint(mixed).astype(np.uint8).tobytes()
    return bytes(3) + entries


def _png(indices: np.ndarray, palette: bytes) -> bytes:
    height, width = indices.shape
    lines = np.pad(indices, ((0, 0), (1, 0)))  # each line begins with its filter, none
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette), (b"tRNS", b"\0"), (b"IDAT", zlib.compress(lines.tobytes(), 9)))
    body = b"".join(_chunk(name, content) for name, content in (*chunks, (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + body


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


# In viewBox units: about a phone's width, so that text stays readable there.
SIDE = 320.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 24.0, 10.0, 42.0
WIDTH, HEIGHT = LEFT + SIDE + RIGHT, TOP + SIDE + BOTTOM
SCALE_HEIGHT = 44.0
_GAP = 18.0
# Maps of one model in a line of a figure, and about how wide a letter is.
_BESIDE, _LETTER = 2, 6.2
# Names of pieces that are shorter than this part of the text would lie over each other.
_SHORTEST_NAMED = 0.035
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
    """Maps that stand beside each other."""

    title: str
    panels: list[Panel]


def panels_of(attention: Attention, head: Head) -> list[Panel]:
    """The map of each model and, of two, what the second has more."""
    panels = [
        _panel(attention, model.name, _map_words(attention, number, head), seen.maps[head], MAP)
        for number, (model, seen) in enumerate(zip(attention.models, attention.seen, strict=True))
    ]
    if len(attention.models) == 2:
        change = attention.difference(head)
        about = (
            f"Difference of the maps of {head_name(head)}: {attention.models[1].name} minus "
            f"{attention.models[0].name}. Higher in {_part(change > DIFFERENCE.lowest)} of cells, lower in "
            f"{_part(change < -DIFFERENCE.lowest)}."
        )
        panels.append(_panel(attention, "difference", about, change, DIFFERENCE))
    return panels


def scale_svg(scale: Scale, title: str) -> Markup:
    """A bar of colours with what they stand for."""
    ticks = [
        Markup('<text x="{:.1f}" y="25" text-anchor="{}">{}</text>').format(LEFT + place * SIDE, "middle", name)
        for place, name in scale.ticks()
    ]
    bar = Markup('<image href="{}" x="{:g}" y="0" width="{:g}" height="12" preserveAspectRatio="none"></image>')
    return Markup('<svg class="chart" viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">{}{}{}</svg>').format(
        WIDTH,
        SCALE_HEIGHT,
        f"Scale of colours: {title}, from {scale.ticks()[0][1]} to {scale.ticks()[-1][1]}, by powers of ten",
        bar.format(data_address(scale_png(scale)), LEFT, SIDE),
        Markup("").join(ticks),
        Markup('<text x="{:g}" y="38" text-anchor="middle">{}</text>').format(LEFT + SIDE / 2, title),
    )


def scale_titles(attention: Attention) -> list[tuple[Scale, str]]:
    found = [(MAP, "largest probability in a cell, log scale")]
    return [*found, (DIFFERENCE, "second model minus first, log scale")] if len(attention.models) == 2 else found


def lines_of(attention: Attention) -> list[Line]:
    """Of two models a line for each head; of one, heads side by side."""
    panels = [panels_of(attention, head) for head in attention.heads]
    if len(attention.models) == 2:
        return [
            Line(title=head_line(attention, head), panels=each)
            for head, each in zip(attention.heads, panels, strict=True)
        ]
    named = [
        Panel(title=f"{head_name(head)}: {show_share(attention.seen[0].far_of(head))} far back", svg=panel.svg)
        for head, (panel,) in zip(attention.heads, panels, strict=True)
    ]
    return [Line(title="", panels=named[at : at + _BESIDE]) for at in range(0, len(named), _BESIDE)]


def render_figure(attention: Attention) -> str:
    """One SVG file: lines of maps, and the scales."""
    lines = lines_of(attention)
    width = max(len(line.panels) for line in lines) * (WIDTH + _GAP) - _GAP
    head = [title_line(attention), *wrap(about_line(attention), int(width / _LETTER))]
    drawn = [
        Markup('<text{} x="0" y="{:g}">{}</text>').format(Markup("" if at else ' class="strong"'), 16 + 17 * at, text)
        for at, text in enumerate(head)
    ]
    down = 17.0 * len(head) + 14
    for line in lines:
        if line.title:
            drawn.append(Markup('<text class="strong" x="0" y="{:g}">{}</text>').format(down + 12, line.title))
            down += 26
        for number, panel in enumerate(line.panels):
            across = number * (WIDTH + _GAP)
            drawn.append(Markup('<text x="{:g}" y="{:g}">{}</text>').format(across + LEFT, down + 10, panel.title))
            drawn.append(_placed(panel.svg, across, down + 12, HEIGHT))
        down += HEIGHT + 22
    for number, (scale, title) in enumerate(scale_titles(attention)):
        # Each below what it is for: maps on the left, the difference on the right.
        across = number * (width - WIDTH)
        drawn.append(_placed(scale_svg(scale, title), across, down, SCALE_HEIGHT))
    whole = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="-16 -12 {0:g} {1:g}" width="{0:g}" height="{1:g}" role="img" '
        'aria-label="{2}"><style>{3}</style><rect x="-16" y="-12" width="100%" height="100%" fill="#fff"></rect>\n'
        "{4}</svg>"
    )
    size = (width + 32, down + SCALE_HEIGHT + 24)
    return str(whole.format(*size, head[0], Markup(_STYLE), Markup("\n").join(drawn))) + "\n"


def title_line(attention: Attention) -> str:
    names = " and ".join(one_line(model.name) for model in attention.models)
    return f"Attention of {names} on {format_size(len(attention.text.tokens))} tokens"


def about_line(attention: Attention) -> str:
    """What a point of a map is."""
    block, cell = attention.block, attention.look.cell
    pooled = f" ({cell // block} × {cell // block} blocks of {block}), to be drawn" if cell > block else ""
    borders = ", thin lines: borders of documents and pieces" if len(attention.text.piece_lens) > 1 else ""
    return (
        f"Each point: the largest probability in {cell} × {cell} tokens{pooled}. Dotted line: "
        f"{attention.look.beyond:,} tokens back{borders}."
    )


def head_line(attention: Attention, head: Head) -> str:
    far = " → ".join(show_share(seen.far_of(head)) for seen in attention.seen)
    own = " → ".join(show_share(seen.same_of(head)) for seen in attention.seen)
    within = f", {own} within the same document" if attention.has_pieces else ""
    beyond = f"{attention.look.beyond:,}"
    return f"{head_name(head).capitalize()}: {far} of attention goes more than {beyond} tokens back{within}"


def _placed(svg: Markup, x: float, y: float, height: float) -> Markup:
    """A drawing inside another; it knows only its own size."""
    place = Markup('<svg x="{:g}" y="{:g}" width="{:g}" height="{:g}"').format(x, y, WIDTH, height)
    return Markup(str(svg).replace("<svg", place, 1))


def _panel(attention: Attention, title: str, about: str, values: np.ndarray, scale: Scale) -> Panel:
    extent = len(values) * attention.look.cell  # tokens to a side, the last cell in full
    image = Markup(
        '<image href="{}" x="{:g}" y="{:g}" width="{:g}" height="{:g}" preserveAspectRatio="none"></image>'
    ).format(data_address(map_png(values, scale)), LEFT, TOP, SIDE, SIDE)
    svg = Markup('<svg class="chart map{}" viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">{}{}{}</svg>').format(
        " difference" if scale.signed else "", WIDTH, HEIGHT, about, image, _borders(attention, extent), _axes(extent)
    )
    return Panel(title=one_line(title), svg=svg)


def _borders(attention: Attention, extent: int) -> Markup:
    """Lines where pieces begin, with their names above the diagonal, and how far near goes."""
    per = SIDE / extent
    drawn = []
    borders = list(accumulate(attention.text.piece_lens, initial=0))
    for at in borders[1:-1]:
        place = at * per
        line = Markup('<path class="border" fill="none" d="M{0:.1f} {1:.1f}H{2:.1f}V{3:.1f}"></path>')
        drawn.append(line.format(LEFT, TOP + place, LEFT + place, TOP + SIDE))
    for name, (start, stop) in zip(attention.text.piece_names, pairwise(borders), strict=True):
        if len(borders) > 2 and stop - start >= _SHORTEST_NAMED * extent:
            middle = (start + stop) / 2 * per
            drawn.append(
                Markup('<text x="{:.1f}" y="{:.1f}">{}</text>').format(LEFT + middle + 5, TOP + middle - 1, name)
            )
    near = attention.look.beyond * per
    line = Markup('<line class="near" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"></line>')
    return Markup("").join([*drawn, line.format(LEFT, TOP + near, LEFT + SIDE - near, TOP + SIDE)])


def _axes(extent: int) -> Markup:
    floor = TOP + SIDE
    drawn = [
        Markup('<path class="axis" fill="none" d="M{0:g} {1:g}V{2:g}H{3:g}"></path>').format(
            LEFT, TOP, floor, LEFT + SIDE
        )
    ]
    for part in (0, 1, 2, 3, 4):
        tokens = extent * part / 4
        name = f"{tokens / 1024:.3g}K" if extent >= 4096 and part else f"{tokens:.0f}"
        place = part / 4 * SIDE
        anchor = "middle" if part < 4 else "end"
        drawn.append(_text(LEFT + place, floor + 15, name, anchor))
        drawn.append(_text(LEFT - 5, TOP + place + 4, name, "end") if part else Markup(""))
    drawn.append(_text(LEFT + SIDE / 2, floor + 33, "is looked at (token)", "middle"))
    turned = Markup('<text transform="translate(12 {:g}) rotate(-90)" text-anchor="middle">{}</text>')
    drawn.append(turned.format(TOP + SIDE / 2, "looks (token)"))
    return Markup("").join(drawn)


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def _map_words(attention: Attention, number: int, head: Head) -> str:
    seen, look = attention.seen[number], attention.look
    own = seen.same_of(head) if attention.has_pieces else None
    within = f", {show_share(own)} within the same document" if own is not None else ""
    return (
        f"Map of {head_name(head)} of {attention.models[number].name}: {show_share(seen.far_of(head))} of attention "
        f"goes more than {look.beyond:,} tokens back{within}."
    )


def _part(cells: np.ndarray) -> str:
    """The share of cells at and below the diagonal."""
    return show_share(float(cells[np.tril_indices(len(cells))].mean()))
