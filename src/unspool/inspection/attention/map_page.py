"""Attention of one or two models as tables, JSON, a figure, and one HTML file with maps of heads."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from unspool import __version__
from unspool.core.formatting import MISSING, format_signed, one_line
from unspool.core.html import element, load_templates, svg, svg_text
from unspool.core.sizes import format_size
from unspool.core.table import Entry, Table, entries, terminal_table
from unspool.inspection.attention.maps import about_line, lines_of, scale_svg, scale_titles, title_line
from unspool.inspection.attention.measure import Attention, Head, head_name, show_share, value_at

_PAGE_HEADS = 20  # rows of the table on the page
_SQUARE = 12  # viewBox units per square in the grid of layers and heads


def _show_change(before: float | None, after: float | None) -> str:
    """Second minus first in percentage points."""
    return MISSING if before is None or after is None else format_signed(100 * (after - before), 1)


def head_table(attention: Attention, count: int) -> Table:
    """Tabulate the heads with the most long-range attention and the drawn ones, ranked for the last model."""
    known = attention.stats[-1].ranked()
    shown = list(dict.fromkeys([*known[:count], *attention.heads]))
    both = len(attention.models) == 2
    kinds = [(f"more than {attention.settings.beyond:,} back", [stats.far for stats in attention.stats])]
    if attention.has_pieces:
        kinds.append(("and in own document", [stats.same for stats in attention.stats]))
    # With two models there is space only for the comparison.
    if attention.settings.first > 0 and not both:
        kinds.append((f"on first {attention.settings.first}", [stats.first for stats in attention.stats]))
    columns: list[str] = []
    for title, _ in kinds:
        names = [f"{title}: {one_line(model.name)}" for model in attention.models]
        columns += [*names, "change"] if both else [title]
    rows = [
        [
            Entry(text=head_name(head), strong=head in attention.heads),
            *_cells([[value_at(values, head) for values in of] for _, of in kinds]),
        ]
        for head in shown
    ]
    means = _cells([[_mean(values, known) for values in of] for _, of in kinds])
    rows.append([Entry(text=f"mean of {len(known):,} heads"), *means])
    return Table(
        caption="Heads that attend farthest back",
        columns=["share of attention", *columns],
        rows=rows,
        num_totals=1,
    )


def _cells(kinds: Sequence[Sequence[float | None]]) -> list[Entry]:
    cells: list[str] = []
    for values in kinds:
        cells += [show_share(value) for value in values]
        cells += [_show_change(*values)] if len(values) == 2 else []
    return entries(*cells)


def _mean(layers: Sequence[list[float] | None], heads: Sequence[Head]) -> float | None:
    known = [value for value in (value_at(layers, head) for head in heads) if value is not None]
    return fmean(known) if known else None


def print_attention(console: Console, attention: Attention, count: int = 10) -> None:
    console.print(Text(f"Attention on {describe_text(attention)}", style="bold"), soft_wrap=True)
    both = len(attention.models) == 2
    for number, model in enumerate(attention.models):
        console.print(f"{'AB'[number]}: {one_line(model.name)}" if both else one_line(model.name))
    for note in notes_of(attention):
        console.print(Text(f"note: {one_line(note)}", style="yellow"), soft_wrap=True)
    console.print()
    # The names of two models would not fit a table.
    lettered = [replace(model, name=letter) for model, letter in zip(attention.models, "AB", strict=False)]
    table = head_table(replace(attention, models=lettered) if both else attention, count)
    console.print(terminal_table(table, wrap_columns=True))
    names = " ".join(f"{layer}:{head}" for layer, head in attention.heads)
    points = "; change is in points" if both else ""
    console.print(Text(f"drawn heads (layer:head, from 0): {names}{points}", style="dim"), soft_wrap=True)


def describe_text(attention: Attention) -> str:
    text = attention.text
    count, pieces = len(text.doc_names), len(text.piece_lens)
    docs = f"{count} {'document' if count == 1 else 'documents'}"
    split = f" in {pieces} pieces" if pieces > count else ""
    is_masked = attention.settings.attention == "intra_document"
    mask = "" if pieces < 2 else ", each attending only to itself" if is_masked else ", with full causal attention"
    return f"{format_size(len(text.tokens))} tokens of {one_line(text.origin)}: {docs}{split}{mask}"


def notes_of(attention: Attention) -> list[str]:
    """Return warnings that affect the meaning of the numbers."""
    length = len(attention.text.tokens)
    notes = list(attention.text.notes)
    for model in attention.models:
        if model.context is not None and model.context < length:
            notes.append(f"the text is longer than the context length of {model.name}, {format_size(model.context)}")
    return notes


def attention_values(attention: Attention) -> dict[str, Any]:
    """Return the values that `--json` prints: everything except the maps."""
    text, settings = attention.text, attention.settings
    return {
        "tokens": len(text.tokens),
        "origin": text.origin,
        "documents": list(text.doc_names),
        "pieces": [
            {"document": doc, "tokens": size} for doc, size in zip(text.chunk_ids, text.piece_lens, strict=True)
        ],
        "attention": settings.attention,
        "beyond": settings.beyond,
        "first": settings.first,
        "block": attention.block,
        "cell": settings.cell,
        "notes": notes_of(attention),
        "models": [
            {
                "name": model.name,
                "model": model.ref,
                "context": model.context,
                "far": stats.far,
                "same": stats.same,
                "on_first": stats.first,
            }
            for model, stats in zip(attention.models, attention.stats, strict=True)
        ],
        "heads": [
            {
                "layer": head[0],
                "head": head[1],
                "far": [stats.far_of(head) for stats in attention.stats],
                "largest": [float(stats.maps[head].max()) for stats in attention.stats],
            }
            for head in attention.heads
        ],
    }


def render_attention(attention: Attention) -> str:
    top = max((value for stats in attention.stats for row in stats.far if row for value in row), default=0.0)
    names = [one_line(model.name) for model in attention.models]
    template = load_templates(Path(__file__).parent, Path(__file__).parents[1]).get_template("map_page.html.j2")
    return template.render(
        title=title_line(attention),
        about=about_line(attention),
        notes=[one_line(note) for note in notes_of(attention)],
        facts=_facts(attention),
        documents=_documents(attention),
        lines=lines_of(attention),
        scales=[scale_svg(scale, title) for scale, title in scale_titles(attention)],
        grids=[(name, _draw_heads(attention, number, top)) for number, name in enumerate(names)],
        top=show_share(top),
        table=head_table(attention, _PAGE_HEADS),
        settings=attention.settings,
        names=names,
        chosen=not attention.named,
        version=__version__,
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
    return [*models, ("text", describe_text(attention)), ("attention", attention.settings.attention)]


def _documents(attention: Attention) -> list[tuple[str, str]]:
    """Return each piece with its document."""
    text = attention.text
    return [
        (f"{name} ({size:,} tokens)", one_line(text.doc_names[doc]))
        for name, size, doc in zip(text.piece_names, text.piece_lens, text.chunk_ids, strict=True)
    ]


def _draw_heads(attention: Attention, number: int, top: float) -> Markup:
    """Draw a square for each head, layers down and heads across; a stronger color means more long-range attention."""
    stats, model = attention.stats[number], attention.models[number]
    layers, size = len(stats.far), _SQUARE - 2
    drawn = [svg_text(26, 14 + at * _SQUARE + 9, at, "end", None) for at in range(0, layers, max(1, -(-layers // 8)))]
    every = max(1, -(-model.num_heads // 8))
    drawn += [svg_text(30 + at * _SQUARE + 9, 10, at, "end", None) for at in range(0, model.num_heads, every)]
    for layer, row in enumerate(stats.far):
        for head, value in enumerate(row or ()):
            tooltip = element("title", f"{head_name((layer, head))}: {show_share(value)}")
            style = "head drawn" if (layer, head) in attention.heads else "head"
            place = {"x": 30 + head * _SQUARE, "y": 14 + layer * _SQUARE, "width": size, "height": size}
            opacity = f"{value / (top or 1):.3f}"
            drawn.append(element("rect", tooltip, class_=style, **place, fill_opacity=opacity))
    width, height = 30 + model.num_heads * _SQUARE, 16 + layers * _SQUARE
    best = stats.ranked("far")[:1]
    about = f"Long-range attention of each head of {model.name}, layers down and heads across"
    about += f"; most in {head_name(best[0])}, {show_share(stats.far_of(best[0]))}" if best else ""
    return svg(width, height, about, *drawn, class_="chart heads", style=f"max-width:{round(width * 1.3)}px")
