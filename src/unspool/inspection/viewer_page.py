"""One self-contained HTML file: a summary, then rows and documents as colored bands.

No network and no scripts (a content security policy forbids both). Every text from a file is escaped and made visible.
Parts of one document share a color and a number, so that color is never the only distinction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup, escape

from unspool import __version__
from unspool.core.charts import Pair, bar_key, pair_bars
from unspool.core.formatting import one_line, visible
from unspool.core.html import element, load_templates, svg
from unspool.core.sizes import format_size
from unspool.data.lengths import Histogram
from unspool.inspection.input_documents import Collection
from unspool.inspection.items import Item, Part, Show, Span, Summary, trained_runs

# Tokens of a long document on the page; a page with a whole book would open too slowly.
LONG = Show(head=3000, tail=1000)
COLORS = 12  # number of colors in viewer_page.css; further documents reuse them
# Characters of a document shown before it is unfolded.
_FOLD_CHARS, _FOLD_LINES = 900, 10
_FOLD_TOKENS = 80
_MAP_WIDTH = 1000
# Narrower bands have no space for a number.
_NUMBERED = 0.035


@dataclass(frozen=True, kw_only=True)
class PartView:
    anchor: str
    number: str  # number of its document
    title: str
    length: str
    facts: list[str]
    color: str
    shown: Markup
    folded: Markup
    more: str  # "4,012 more characters"


@dataclass(frozen=True, kw_only=True)
class ItemView:
    anchor: str
    name: str
    among: str
    facts: list[str]
    parts: list[PartView]
    bands: Markup
    before: str | None  # anchors of the neighbors
    after: str | None


@dataclass(frozen=True, kw_only=True)
class SectionView:
    """One corpus or dataset and its shown items."""

    anchor: str
    title: str
    path: str
    headline: str
    part: str
    facts: list[tuple[str, str]]
    lengths_of: str
    notes: list[str]
    lines: list[str]
    chart: Markup
    items: list[ItemView]


def render_page(collections: Sequence[tuple[Collection, list[int]]], *, tokens: bool, full: bool) -> str:
    show = Show(tokens=tokens) if full else replace(LONG, tokens=tokens)
    return render([(each.summary(), [each.item(index, show) for index in chosen]) for each, chosen in collections])


def render(sections: Sequence[tuple[Summary, list[Item]]]) -> str:
    environment = load_templates(Path(__file__).parent)
    spans = [span for _, items in sections for item in items for part in item.parts for span in part.spans]
    roles = {span.role for span in spans}
    views = [_section(summary, items, number) for number, (summary, items) in enumerate(sections)]
    return environment.get_template("viewer_page.html.j2").render(
        title=", ".join(view.title for view in views),
        sections=views,
        has_knots="knot" in roles,
        has_control="control" in roles,
        has_trained=any(part.trained is not None for _, items in sections for item in items for part in item.parts),
        has_silence=any(not span.loss for span in spans),
        bar_key=bar_key,
        version=__version__,
    )


def _section(summary: Summary, items: list[Item], number: int) -> SectionView:
    anchor = f"set{number}"
    return SectionView(
        anchor=anchor,
        title=one_line(summary.path.name or str(summary.path)),
        path=one_line(str(summary.path)),
        headline=summary.headline,
        part=summary.part,
        facts=[(name, one_line(value)) for name, value in summary.facts],
        lengths_of=f"of {len(summary.lengths):,} {summary.part}s{summary.of_documents} {summary.sample}".rstrip(),
        notes=[one_line(note) for note in summary.notes],
        lines=[one_line(line) for line in summary.lines],
        chart=length_chart(summary.bins, summary.part),
        items=[_item(item, f"{anchor}-item", place, len(items)) for place, item in enumerate(items)],
    )


def _item(item: Item, name: str, number: int, count: int) -> ItemView:
    anchor = f"{name}{number}"
    parts = [_part(part, f"{anchor}-{place}") for place, part in enumerate(item.parts)]
    return ItemView(
        anchor=anchor,
        name=item.name,
        among=item.among,
        facts=[one_line(fact) for fact in item.facts if fact],
        parts=parts,
        bands=_bands(item.parts, anchor),
        before=f"{name}{number - 1}" if number else None,
        after=f"{name}{number + 1}" if number + 1 < count else None,
    )


def _part(part: Part, anchor: str) -> PartView:
    shown, folded = fold(part.spans)
    marked = part.trained is not None
    rest = sum(len(span.text) for span in folded)
    borders = any(span.ids for span in folded)
    return PartView(
        anchor=anchor,
        number=_number(part),
        title=one_line(part.title),
        length=f"{part.length:,} {part.unit}" if part.length else "",
        facts=[one_line(fact) for fact in part.facts],
        color=_color(part),
        shown=_markup(shown, marked),
        folded=_markup(folded, marked),
        more=f"{len(folded):,} more tokens" if borders else f"{rest:,} more characters",
    )


def fold(spans: list[Span]) -> tuple[list[Span], list[Span]]:
    """Split spans into the visible part and the folded rest; a short rest is not folded."""
    chars, lines = _FOLD_CHARS, _FOLD_LINES
    for number, span in enumerate(spans):
        if span.ids:
            if number == _FOLD_TOKENS and len(spans) > 1.5 * _FOLD_TOKENS:
                return spans[:number], spans[number:]
            continue
        cut = _fold_point(span.text, chars, lines)
        if cut is not None:
            shown = [*spans[:number], replace(span, text=span.text[:cut])]
            rest = [replace(span, text=span.text[cut:]), *spans[number + 1 :]]
            # A few tokens at the end, such as EOS, do not make a document long.
            return (spans, []) if sum(len(one.text) for one in rest) < _FOLD_CHARS // 4 else (shown, rest)
        chars -= len(span.text)
        lines -= span.text.count("\n")
    return spans, []


def _fold_point(text: str, chars: int, lines: int) -> int | None:
    """Find where `text` exceeds this many characters or lines: after a line, or after a word if one is near."""
    at = -1
    for _ in range(max(1, lines)):
        at = text.find("\n", at + 1)
        if at < 0:
            break
    if 0 <= at < chars:
        return at + 1
    if len(text) <= chars:
        return None
    chars = max(chars, 0)
    space = text.rfind(" ", max(0, chars - 80), chars)
    return space + 1 if space >= 0 else chars


def _markup(spans: list[Span], mark_trained: bool) -> Markup:
    """Render spans as HTML; `mark_trained` puts trained tokens into <mark>, so that color is not the only sign."""
    runs = []
    for is_trained, run in trained_runs(spans):
        text = Markup("").join(_span(span) for span in run)
        runs.append(element("mark", text, class_="trained") if is_trained and mark_trained else text)
    return Markup("").join(runs)


def _span(span: Span) -> Markup:
    if span.role == "hidden":
        return element("span", f"… {span.text} …", class_="hidden")
    classes: list[str] = [span.role] if span.role != "text" else []
    classes += [] if span.loss else ["silent"]
    if span.ids:
        return element("span", one_line(span.text), element("small", span.ids[0]), class_=" ".join([*classes, "token"]))
    text = escape(visible(span.text))
    return element("span", text, class_=" ".join(classes)) if classes else text


def _bands(parts: list[Part], anchor: str) -> Markup:
    """Draw the row to scale: one band per part with its document's number and a link to its text."""
    length = sum(part.length for part in parts)
    if len(parts) < 2 or not length:
        return Markup("")
    drawn = []
    for place, part in enumerate(parts):
        tooltip = one_line(", ".join([part.title, f"{part.length:,} {part.unit}", *part.facts]))
        # A small gap between bands, but no band so thin that it is invisible.
        width = max(_MAP_WIDTH * part.length / length - 1.5, 1.0)
        box = {"x": f"{_MAP_WIDTH * part.start / length:.2f}", "width": f"{width:.2f}", "height": 22}
        band = element("rect", element("title", tooltip), class_=_color(part), **box)
        drawn.append(element("a", band, href=f"#{anchor}-{place}"))
    label = "The row, drawn to scale, with one band for each part"
    drawing = svg(_MAP_WIDTH, 22, label, *drawn, class_=None, preserveAspectRatio="none")
    # Outside the drawing, because that is stretched.
    numbers = [
        element("b", _number(part), style=f"left:{100 * (part.start + part.length / 2) / length:.2f}%")
        for part in parts
        if part.length / length >= _NUMBERED
    ]
    return element("div", drawing, *numbers, class_="bands")


def length_chart(lengths: Histogram, unit: str = "document") -> Markup:
    """Draw bars per doubling of the length: share of documents, or other units, and share of tokens."""
    documents, tokens = sum(lengths["documents"]), sum(lengths["tokens"])
    if not documents or not tokens:
        return Markup("")
    bins = zip(*(lengths[key] for key in ("at_least", "documents", "tokens")), strict=True)
    pairs = [
        Pair(
            label=format_size(edge),
            first=num_docs / documents,
            second=num_tokens / tokens,
            tooltip=f"{format_size(edge)} to {format_size(2 * edge)} tokens: {num_docs:,} {unit}s, "
            f"{num_tokens:,} tokens",
        )
        for edge, num_docs, num_tokens in bins
    ]
    label = f"Lengths of {documents:,} {unit}s, {pairs[0].label} tokens and more"
    return pair_bars(pairs, label=label, x_title="tokens, at least", size=(420.0, 190.0))


def _number(part: Part) -> str:
    return str(part.group + 1) if part.group >= 0 else ""


def _color(part: Part) -> str:
    return "padding" if part.group < 0 else f"c{part.group % COLORS}"
