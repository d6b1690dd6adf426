"""One HTML file that needs nothing else: a summary, then rows and documents as coloured bands.

Promise: no network, no scripts (a content policy in the page forbids both), every text from a file escaped and
made visible, the file replaced in one step. Parts of one document have one colour and one number, so that
colour is never all that tells them apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

from unspool import __version__
from unspool.core.html import load_templates, write_text
from unspool.inspection.dataset_summary import Summary, length_chart
from unspool.inspection.input_documents import Collection
from unspool.inspection.items import Item, Part, Show, Span, one_line, trained_runs, visible

# Tokens of a long document on the page; a whole book would make it too slow to open.
LONG = Show(head=3000, tail=1000)
COLOURS = 12  # as many as page.css defines; further documents start over
# What is seen of a document before it is unfolded.
_FOLD_CHARS, _FOLD_LINES = 900, 10
_FOLD_TOKENS = 80
_MAP_WIDTH = 1000
# Narrower bands have no room for a number.
_NUMBERED = 0.035


@dataclass(frozen=True, kw_only=True)
class PartView:
    anchor: str
    number: str  # of its document
    title: str
    length: str
    facts: list[str]
    colour: str
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
    before: str | None  # anchors of its neighbours
    after: str | None


@dataclass(frozen=True, kw_only=True)
class SectionView:
    """One corpus or rows set and what is shown of it."""

    anchor: str
    title: str
    path: str
    headline: str
    part: str
    facts: list[tuple[str, str]]
    lengths_of: str
    notes: list[str]
    chart: Markup
    items: list[ItemView]


def write_page(
    collections: Sequence[tuple[Collection, list[int]]], out_file: Path, *, tokens: bool, full: bool
) -> None:
    """Collections, each with the items that are shown of it."""
    show = Show(tokens=tokens) if full else replace(LONG, tokens=tokens)
    shown = [(each.summary(), [each.item(index, show) for index in chosen]) for each, chosen in collections]
    write_text(out_file, render(shown))


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
        lengths_of=f"of {len(summary.lengths):,} {summary.part}s {summary.sample}".rstrip(),
        notes=[one_line(note) for note in summary.notes],
        chart=length_chart(summary.bins),
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
        colour=_colour(part),
        shown=_markup(shown, marked),
        folded=_markup(folded, marked),
        more=f"{len(folded):,} more tokens" if borders else f"{rest:,} more characters",
    )


def fold(spans: list[Span]) -> tuple[list[Span], list[Span]]:
    """What is seen at once, and the rest; a little rest is not worth folding."""
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
            # Marks at the end, such as an EOS, do not make a document long.
            return (spans, []) if sum(len(one.text) for one in rest) < _FOLD_CHARS // 4 else (shown, rest)
        chars -= len(span.text)
        lines -= span.text.count("\n")
    return spans, []


def _fold_point(text: str, chars: int, lines: int) -> int | None:
    """Where `text` goes beyond so many characters or lines: after a line, else after a word, if one is near."""
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
    """`mark_trained` puts what is trained on in marks of its own, which say so without colours too."""
    runs = []
    for is_trained, run in trained_runs(spans):
        text = Markup("").join(_span(span) for span in run)
        runs.append(Markup('<mark class="trained">{}</mark>').format(text) if is_trained and mark_trained else text)
    return Markup("").join(runs)


def _span(span: Span) -> Markup:
    if span.role == "hidden":
        return Markup('<span class="hidden">… {} …</span>').format(span.text)
    classes: list[str] = [span.role] if span.role != "text" else []
    classes += [] if span.loss else ["silent"]
    if span.ids:
        classes.append("token")
        text = Markup("{}<small>{}</small>").format(one_line(span.text), span.ids[0])
    else:
        text = Markup("{}").format(visible(span.text))
    return Markup('<span class="{}">{}</span>').format(" ".join(classes), text) if classes else text


def _bands(parts: list[Part], anchor: str) -> Markup:
    """The row drawn to scale, one band per part, with the number of its document; each leads to its text."""
    length = sum(part.length for part in parts)
    if len(parts) < 2 or not length:
        return Markup("")
    drawn = []
    for place, part in enumerate(parts):
        about = ", ".join([part.title, f"{part.length:,} {part.unit}", *part.facts])
        drawn.append(
            Markup(
                '<a href="#{}-{}"><rect class="{}" x="{:.2f}" width="{:.2f}" height="22"><title>{}</title></rect></a>'
            ).format(
                anchor,
                place,
                _colour(part),
                _MAP_WIDTH * part.start / length,
                # A little gap, but no band so thin that it cannot be seen.
                max(_MAP_WIDTH * part.length / length - 1.5, 1.0),
                one_line(about),
            )
        )
    # Beside the drawing, because it is stretched and they must not be.
    numbers = [
        Markup('<b style="left:{:.2f}%">{}</b>').format(100 * (part.start + part.length / 2) / length, _number(part))
        for part in parts
        if part.length / length >= _NUMBERED
    ]
    return Markup(
        '<div class="bands"><svg viewBox="0 0 {} 22" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
        "{}</div>"
    ).format(_MAP_WIDTH, "The row to scale, one band for each part", Markup("").join(drawn), Markup("").join(numbers))


def _number(part: Part) -> str:
    return str(part.group + 1) if part.group >= 0 else ""


def _colour(part: Part) -> str:
    return "padding" if part.group < 0 else f"c{part.group % COLOURS}"
