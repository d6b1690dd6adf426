"""How far heads look, as numbers: the same table for the terminal and the page, and all of it as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unspool.core.sizes import format_size
from unspool.inspection.attention.measure import Attention, Head
from unspool.inspection.items import one_line


@dataclass(frozen=True, kw_only=True)
class Numbers:
    columns: list[str]
    rows: list[tuple[str, list[str], bool]]  # name, cells, whether the head is drawn
    mean: tuple[str, list[str]]


def head_name(head: Head) -> str:
    return f"layer {head[0]}, head {head[1]}"


def show_share(share: float | None) -> str:
    """A share that is not 0 never looks like it."""
    if share is None:
        return "–"
    if 0 < share < 0.0001:
        return "<0.01%"
    return f"{100 * share:.1f}%" if share >= 0.1 or not share else f"{100 * share:.2f}%"


def show_change(before: float | None, after: float | None) -> str:
    """In percentage points."""
    return "–" if before is None or after is None else f"{100 * (after - before):+.1f}".replace("-", "−")


def number_table(attention: Attention, count: int) -> Numbers:
    """The heads that look furthest and those that are drawn, by what the last model does."""
    shown = list(dict.fromkeys([*attention.seen[-1].ranked()[:count], *attention.heads]))
    far = [seen.far for seen in attention.seen]
    kinds = [
        (f"more than {attention.look.beyond:,} back", far),
        ("and in own document", [seen.same for seen in attention.seen]),
        (f"on first {attention.look.first}", [seen.first for seen in attention.seen]),
    ]
    # Of two models there is room for what is compared.
    wanted = (True, attention.has_pieces, attention.look.first > 0 and len(far) == 1)
    kept = [kind for kind, keep in zip(kinds, wanted, strict=True) if keep]
    columns: list[str] = []
    for title, _ in kept:
        columns += [title] if len(far) == 1 else [f"{title}: {one_line(model.name)}" for model in attention.models]
        columns += ["change"] if len(far) == 2 else []
    rows = [
        (head_name(head), _cells([[_at(rows, head) for rows in of] for _, of in kept]), head in attention.heads)
        for head in shown
    ]
    known = attention.seen[-1].ranked()
    means = _cells([[_mean(rows, known) for rows in of] for _, of in kept])
    return Numbers(columns=columns, rows=rows, mean=(f"mean of {len(known):,} heads", means))


def print_attention(console: Console, attention: Attention, count: int = 10) -> None:
    console.print(Text(f"Attention on {describe_text(attention)}", style="bold"), soft_wrap=True)
    for number, model in enumerate(attention.models):
        console.print(f"{'AB'[number]}: {one_line(model.name)}" if len(attention.models) == 2 else one_line(model.name))
    for note in notes_of(attention):
        console.print(Text(f"note: {one_line(note)}", style="yellow"), soft_wrap=True)
    numbers = number_table(_lettered(attention), count)
    console.print()
    table = Table(box=None, pad_edge=False)
    table.add_column("share of attention", no_wrap=True)
    for column in numbers.columns:
        table.add_column(column, justify="right")
    for name, cells, drawn in numbers.rows:
        table.add_row(Text(name, style="bold" if drawn else ""), *cells)
    table.add_row(Text(numbers.mean[0], style="dim"), *numbers.mean[1])
    console.print(table)
    names = " ".join(f"{layer}:{head}" for layer, head in attention.heads)
    points = "; change is in points" if len(attention.models) == 2 else ""
    console.print(Text(f"drawn (--head LAYER:HEAD, from 0): {names}{points}", style="dim"), soft_wrap=True)


def describe_text(attention: Attention) -> str:
    text = attention.text
    count, pieces = len(text.doc_names), len(text.piece_lens)
    docs = f"{count} {'document' if count == 1 else 'documents'}"
    split = f" in {pieces} pieces" if pieces > count else ""
    seeing = (
        "each seeing only itself" if attention.look.attention == "intra_document" else "all seeing what stands before"
    )
    return f"{format_size(len(text.tokens))} tokens of {one_line(text.origin)}: {docs}{split}" + (
        f", {seeing}" if pieces > 1 else ""
    )


def notes_of(attention: Attention) -> list[str]:
    """What a reader must know to read the numbers right."""
    length = len(attention.text.tokens)
    notes = list(attention.text.notes)
    for model in attention.models:
        if model.context is not None and model.context < length:
            notes.append(f"the text is longer than the context of {model.name}, {format_size(model.context)}")
    return notes


def attention_values(attention: Attention) -> dict[str, Any]:
    """For `--json`: everything but the maps."""
    text, look = attention.text, attention.look
    return {
        "tokens": len(text.tokens),
        "origin": text.origin,
        "documents": list(text.doc_names),
        "pieces": [
            {"document": doc, "tokens": size} for doc, size in zip(text.chunk_ids, text.piece_lens, strict=True)
        ],
        "attention": look.attention,
        "beyond": look.beyond,
        "first": look.first,
        "block": attention.block,
        "cell": look.cell,
        "notes": notes_of(attention),
        "models": [
            {
                "name": model.name,
                "model": model.ref,
                "context": model.context,
                "far": seen.far,
                "same": seen.same,
                "on_first": seen.first,
            }
            for model, seen in zip(attention.models, attention.seen, strict=True)
        ],
        "heads": [
            {
                "layer": head[0],
                "head": head[1],
                "far": [seen.far_of(head) for seen in attention.seen],
                "largest": [float(seen.maps[head].max()) for seen in attention.seen],
            }
            for head in attention.heads
        ],
    }


def _lettered(attention: Attention) -> Attention:
    """Two models as A and B, because their names would not fit a table."""
    if len(attention.models) == 1:
        return attention
    models = [replace(model, name=letter) for model, letter in zip(attention.models, "AB", strict=True)]
    return replace(attention, models=models)


def _cells(kinds: Sequence[Sequence[float | None]]) -> list[str]:
    cells: list[str] = []
    for values in kinds:
        cells += [show_share(value) for value in values]
        cells += [show_change(*values)] if len(values) == 2 else []
    return cells


def _at(rows: Sequence[list[float] | None], head: Head) -> float | None:
    row = rows[head[0]]
    return None if row is None else row[head[1]]


def _mean(rows: Sequence[list[float] | None], heads: Sequence[Head]) -> float | None:
    known = [value for value in (_at(rows, head) for head in heads) if value is not None]
    return fmean(known) if known else None
