"""The terminal view: a summary, then rows and documents with their boundaries.

Text from files cannot send control sequences or change the writing direction. Without a terminal there are no colors,
but every boundary and number is still printed.
"""

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from unspool.core.formatting import MISSING, one_line, visible
from unspool.inspection.items import Item, Part, Show, Span, Summary, shown_line, trained_runs
from unspool.inspection.run_paths import Entry

# Tokens shown at the start and at the end of a long document.
SHORT = Show(head=160, tail=60)
# Brackets around trained tokens if there is a mask; without colors, dim text alone would not be visible.
OPEN, CLOSE = "⟦", "⟧"
# Documents shown at the start and at the end of a row with many documents.
_FIRST, _LAST = 8, 2

# Colors of documents by number; further documents reuse them. The page has its own colors.
_COLORS = (
    "blue", "dark_orange3", "green4", "deep_pink4", "medium_purple3", "dark_goldenrod",
    "dark_cyan", "red3", "chartreuse4", "cornflower_blue", "rosy_brown", "magenta3",
)  # fmt: skip
_STYLES = {"text": "", "control": "yellow", "knot": "bold magenta", "label": "cyan", "hidden": "italic", "bad": "red"}
# Facts about a file or folder that the terminal shows; pages show all facts.
_SHOWN = (
    "file",
    "read as",
    "source",
    "sources",
    "shares",
    "packing",
    "method",
    "contexts",
    "gain 0",
    "quarantined",
    "filtered",
    "tasks",
    "dropped",
    "tokenizer",
)


def print_summary(console: Console, summary: Summary) -> None:
    facts = dict(summary.facts)
    console.print(Text(one_line(str(summary.path)), style="bold"), soft_wrap=True)
    console.print(summary.headline)
    # The page shows all facts; the terminal shows only those needed to understand the rest.
    for name in _SHOWN:
        if name in facts:
            console.print(f"{name}: {one_line(facts[name])}", soft_wrap=True)
    if summary.length_line:
        console.print(summary.length_line, soft_wrap=True)
    for line in summary.lines:
        console.print(one_line(line), soft_wrap=True)
    for note in summary.notes:
        console.print(Text(f"note: {one_line(note)}", style="yellow"), soft_wrap=True)


def print_item(console: Console, item: Item, *, full: bool) -> None:
    console.print()
    console.print(Text(f"━━ {item.title} · {shown_line(item.facts)}", style="bold"), soft_wrap=True)
    if any(part.trained is not None for part in item.parts):
        console.print(f"{OPEN}…{CLOSE} is trained on, the rest is not")
    hidden = range(0) if full or len(item.parts) <= _FIRST + _LAST + 1 else range(_FIRST, len(item.parts) - _LAST)
    for number, part in enumerate(item.parts):
        if number in hidden:
            if number == hidden[0]:
                tokens = sum(item.parts[other].length for other in hidden)
                console.print()
                console.print(
                    Text(f"── … {len(hidden):,} more, {tokens:,} tokens; show them with full … ──", style="blue")
                )
            continue
        print_part(console, part, alone=len(item.parts) == 1)


def print_part(console: Console, part: Part, *, alone: bool) -> None:
    console.print()
    if not alone or part.facts:
        title = shown_line([part.title, f"{part.length:,} {part.unit}", *part.facts])
        color = _COLORS[part.group % len(_COLORS)] if part.group >= 0 else "bright_black"
        console.print(Text(f"── {title} ──", style=color), soft_wrap=True)
    if part.spans:
        console.print(styled(part.spans, mark_trained=part.trained is not None))


def styled(spans: Sequence[Span], *, mark_trained: bool = False) -> Text:
    """Join spans to one printable text that wraps at words or, if tokens are shown, between tokens."""
    text = Text(tab_size=4)
    for is_trained, run in trained_runs(spans):
        text.append(OPEN if is_trained and mark_trained else "", "bold green")
        _append(text, run)
        text.append(CLOSE if is_trained and mark_trained else "", "bold green")
    text.rstrip()
    return text


def _append(text: Text, spans: Sequence[Span]) -> None:
    for span in spans:
        style = _STYLES[span.role] if span.loss else f"dim {_STYLES[span.role]}".strip()
        if span.role == "hidden":
            text.append("" if text.plain.endswith("\n") or not text else "\n")
            text.append(f"… {span.text} …\n", style)
        elif span.ids:
            text.append(_token(span), style)
            text.append(" ")
        else:
            text.append(visible(span.text), style)


def _token(span: Span) -> str:
    return f"{span.ids[0]}⟨{one_line(span.text)}⟩" if span.text else str(span.ids[0])


def print_listing(console: Console, title: str, entries: Sequence[Entry]) -> None:
    console.print(Text(one_line(title), style="bold"), soft_wrap=True)
    cells = [_cells(entry) for entry in entries]
    widths = [max(cell_len(row[column]) for row in cells) for column in range(4)]
    for kind, name, held, tokens, about in cells:
        left = "  ".join(set_cell_size(text, width) for text, width in zip((kind, name), widths, strict=False))
        right = "  ".join(text.rjust(width) for text, width in zip((held, tokens), widths[2:], strict=True))
        console.print(f"{left}  {right}  {about}".rstrip(), soft_wrap=True)
    console.print("\nInspect one with")
    for entry in entries:
        console.print(f"  {one_line(entry.command)}", soft_wrap=True)


def _cells(entry: Entry) -> tuple[str, str, str, str, str]:
    held = MISSING if entry.count is None else f"{entry.count:,} {entry.unit}"
    tokens = MISSING if entry.tokens is None else f"{entry.tokens:,} tokens"
    return entry.kind, one_line(entry.name), held, tokens, one_line(entry.about)
