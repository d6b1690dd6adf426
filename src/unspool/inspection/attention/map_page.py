"""Attention of one model or two as one HTML file: maps, where in the model the heads are that look far, and numbers.

Promise: as page.py: no network, no scripts, every text escaped; pictures are in the page and told in words.
"""

from pathlib import Path

from markupsafe import Markup

from unspool import __version__
from unspool.core.artifacts import write_atomic
from unspool.core.html import templates_in, write_html
from unspool.core.sizes import format_size
from unspool.inspection.attention.head_table import describe_text, head_name, notes_of, number_table, show_share
from unspool.inspection.attention.maps import about_line, lines_of, render_figure, scale_svg, scale_titles, title_line
from unspool.inspection.attention.measure import Attention
from unspool.inspection.items import one_line

# Heads in the table.
_SHOWN = 20
# Points to a side of a square in the grid of layers and heads.
_SQUARE = 12


def write_attention(attention: Attention, out_file: Path) -> None:
    write_html(out_file, render_attention(attention))


def write_figure(attention: Attention, out_file: Path) -> None:
    """The maps alone, as SVG."""
    out_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out_file, render_figure(attention).encode("utf-8", "replace").decode("utf-8"))


def render_attention(attention: Attention) -> str:
    top = max((value for seen in attention.seen for row in seen.far if row for value in row), default=0.0)
    return (
        templates_in(Path(__file__).parent, Path(__file__).parents[1])
        .get_template("map_page.html.j2")
        .render(
            title=title_line(attention),
            text=describe_text(attention),
            about=about_line(attention),
            notes=[one_line(note) for note in notes_of(attention)],
            facts=_facts(attention),
            documents=_documents(attention),
            lines=lines_of(attention),
            scales=[scale_svg(scale, title) for scale, title in scale_titles(attention)],
            grids=[
                (one_line(model.name), _grid(attention, number, top)) for number, model in enumerate(attention.models)
            ],
            top=show_share(top),
            numbers=number_table(attention, _SHOWN),
            look=attention.look,
            names=[one_line(model.name) for model in attention.models],
            chosen=not attention.named,
            version=__version__,
        )
    )


def _facts(attention: Attention) -> list[tuple[str, str]]:
    models = [
        (
            label,
            f"{one_line(model.name)}, {one_line(model.ref)}"
            + (f", context {format_size(model.context)}" if model.context else ""),
        )
        for label, model in zip(("model", "second model"), attention.models, strict=False)
    ]
    return [*models, ("text", describe_text(attention)), ("attention", attention.look.attention)]


def _documents(attention: Attention) -> list[tuple[str, str]]:
    """Each piece and where it is from."""
    text = attention.text
    return [
        (f"{name} ({size:,} tokens)", one_line(text.doc_names[doc]))
        for name, size, doc in zip(text.piece_names, text.piece_lens, text.chunk_ids, strict=True)
    ]


def _grid(attention: Attention, number: int, top: float) -> Markup:
    """A square for each head: layers down, heads across; the stronger, the more it looks far back."""
    seen, model = attention.seen[number], attention.models[number]
    squares = []
    for layer, row in enumerate(seen.far):
        for head, value in enumerate(row or ()):
            drawn = " drawn" if (layer, head) in attention.heads else ""
            square = Markup(
                '<rect class="head{}" x="{}" y="{}" width="{}" height="{}" fill-opacity="{:.3f}">'
                "<title>{}</title></rect>"
            )
            tip = f"{head_name((layer, head))}: {show_share(value)}"
            size = _SQUARE - 2
            squares.append(
                square.format(drawn, 30 + head * _SQUARE, 14 + layer * _SQUARE, size, size, value / (top or 1), tip)
            )
    layers = len(seen.far)
    names = [_label(26, 14 + at * _SQUARE + 9, at) for at in range(0, layers, max(1, -(-layers // 8)))]
    names += [
        _label(30 + at * _SQUARE + 9, 10, at) for at in range(0, model.num_heads, max(1, -(-model.num_heads // 8)))
    ]
    width, height = 30 + model.num_heads * _SQUARE, 16 + layers * _SQUARE
    best = seen.ranked("far")[:1]
    about = f"Long-range attention of each head of {model.name}, layers down and heads across"
    about += f"; most in {head_name(best[0])}, {show_share(seen.far_of(best[0]))}" if best else ""
    return Markup(
        '<svg class="chart heads" viewBox="0 0 {} {}" style="max-width:{}px" role="img" aria-label="{}">{}{}</svg>'
    ).format(width, height, round(width * 1.3), about, Markup("").join(names), Markup("").join(squares))


def _label(x: float, y: float, number: int) -> Markup:
    return Markup('<text x="{:g}" y="{:g}" text-anchor="end">{}</text>').format(x, y, number)
