"""Draw the pictures of docs/concepts into docs/images: `make pictures`.

Every picture is computed by the package: rows are packed, models run, memory is planned. A picture has a background of
its own, so that it can be read on light and dark pages, and text that stays above 11 pixels on a phone.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from markupsafe import Markup

import unspool
from unspool.core.charts import Frame, Point, Series, line_chart
from unspool.core.html import element, svg, svg_line, svg_text, write_text
from unspool.data.packing.row import IGNORE
from unspool.data.strategies.utk.special_tokens import add_knots, knot_names
from unspool.inspection.utk_chunks import documents_of
from unspool.rope.bound import curve
from unspool.rope.harpe import HARPE
from unspool.rope.methods import ABF, PI, Llama3, YaRN
from unspool.rope.tables import RopeShape, frequencies, plain_frequencies

OUT = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 420.0
COLORS = ("#0068a8", "#c95300", "#00805c", "#a8457f", "#7a5cc4", "#8a6d00", "#1b8ea6", "#6b7380")
STYLE = (
    "text { font: 13.5px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; fill: #29323d; }"
    " .title { font-weight: 600; } .soft { fill: #5a6572; } .light { fill: #fff; }"
    " .knot { stroke: #111; stroke-width: 1.2; } .grid { stroke: #dde2e8; } .axis { stroke: #8d97a3; }"
    " .mark { stroke: #5a6572; stroke-dasharray: 4 3; }"
    " .line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }"
    + "".join(f" .m{at} .line {{ stroke: {color}; }} .c{at} {{ fill: {color}; }}" for at, color in enumerate(COLORS))
)


def picture(height: float, label: str, *parts: Markup) -> Markup:
    """A picture as a file of its own, with a light background."""
    back = element("rect", x=0.5, y=0.5, width=WIDTH - 1, height=height - 1, rx=8.0, fill="#fff", stroke="#c9d0d8")
    drawing = svg(
        WIDTH, height, label, element("style", Markup(STYLE)), back, *parts, xmlns="http://www.w3.org/2000/svg"
    )
    return sized(drawing, 560, 560 * height / WIDTH)


def sized(drawing: Markup, width: float, height: float) -> Markup:
    return Markup(str(drawing).replace("<svg", f'<svg width="{width:g}" height="{height:.0f}"', 1))


def text(x: float, y: float, shown: object, class_: str = "soft", anchor: str = "start") -> Markup:
    return svg_text(x, y, shown, anchor, class_)


def box(x: float, y: float, width: float, height: float, color: int, **more: object) -> Markup:
    return element("rect", class_=f"c{color}", x=float(x), y=float(y), width=float(width), height=float(height), **more)


def group(y: float, *parts: Markup) -> Markup:
    return element("g", *parts, transform=f"translate(0 {y:g})")


def legend(y: float, entries: Sequence[tuple[int, str]], left: float = 14.0, columns: int = 3) -> list[Markup]:
    width = (WIDTH - left) / columns
    places = [(left + at % columns * width, y + at // columns * 20, *entry) for at, entry in enumerate(entries)]
    return [
        part for x, down, color, name in places for part in (box(x, down - 10, 12, 12, color), text(x + 17, down, name))
    ]


# Packing


def packing() -> Markup:
    """The mask of a packed row, measured: which hidden states change with which token."""
    model, tokenizer = unspool.load("asset:tiny-base")
    texts = ["The whale swam north.", "She sells sea shells.", "It rained."]
    with tempfile.TemporaryDirectory() as folder:
        row = unspool.pack(texts, tokenizer, seq_len=26, packing="best_fit", out=Path(folder) / "rows")[0]
        batch = unspool.Collator(model)([row])
        seen = _dependence(model, batch)
    side, left, top = 11.0, 66.0, 96.0
    padding = len(texts)
    documents = np.repeat(np.minimum(np.arange(len(row.doc_lens)), padding), row.doc_lens)
    colors = [0, 1, 2, 7]
    used = int(row.doc_lens.sum())
    positions, labels = batch["position_ids"][0], batch["shift_labels"][0]
    parts = [text(14, 24, "A packed row: documents do not attend to each other", "title")]
    names = [*(f"document {at + 1}" for at in range(padding)), "padding"]
    parts += legend(48, list(zip(colors, names, strict=True)), columns=4)
    for query in range(used):
        at = top + query * side
        color = colors[documents[query]]
        parts += [box(left + key * side, at, side - 1, side - 1, color) for key in range(used) if seen[query, key]]
        parts.append(box(left + query * side, top - 18, side - 1, side - 1, color))
        is_last = query + 1 == used or documents[query + 1] != documents[query]
        if documents[query] < padding and (not int(positions[query]) or is_last):
            place = left - 8 if not int(positions[query]) else left - 26
            parts.append(text(place, at + 10, int(positions[query]), anchor="end"))
        if int(labels[query]) == IGNORE:
            parts.append(box(left + used * side + 8, at + 1, 8, side - 3, 7))
    parts += [
        element("rect", x=left, y=top, width=used * side, height=used * side, fill="none", stroke="#8d97a3"),
        text(left - 8, top - 8, "position", anchor="end"),
        text(WIDTH - 8, top - 8, "no label", anchor="end"),
    ]
    down = top + used * side + 20
    parts += [
        text(14, down, "Filled: the token on the left attends to the token above."),
        text(14, down + 20, "Measured by replacing tokens, one at a time."),
    ]
    return picture(down + 34, "Document mask and positions of a packed row", *parts)


def _dependence(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> np.ndarray:
    """bool[T, T]: whether the hidden state of a token changes when another token is replaced."""
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "shift_labels", "num_items_in_batch")}
    with torch.no_grad():
        before = model(**inputs, output_hidden_states=True).hidden_states[-1][0]
        columns = []
        for at in range(len(before)):
            other = inputs["input_ids"].clone()
            other[0, at] = (other[0, at] + 1000) % 4000
            after = model(**inputs | {"input_ids": other}, output_hidden_states=True).hidden_states[-1][0]
            columns.append((after != before).any(-1).numpy())
    return np.stack(columns, 1)


# RoPE


def rope() -> Markup:
    """Tokens per rotation of each pair of dimensions: a model of 8K, as it is and extended to 64K."""
    shape = RopeShape(rotary_dim=128, num_kv_heads=8, base=5e5, max_positions=8192, original_len=8192)
    tables = {
        "unchanged": plain_frequencies(5e5, 128),
        **{
            name: method.resolve(shape, 1 << 16).tables(shape).inv_freq
            for name, method in {
                "abf, base 8e6": ABF(method="abf", base=8e6),
                "pi": PI(method="pi"),
                "yarn": YaRN(method="yarn"),
                "llama3": Llama3(method="llama3"),
            }.items()
        },
    }
    series = [
        Series(label=name, style=at, points=[Point(x=pair, y=2 * np.pi / float(one)) for pair, one in enumerate(table)])
        for at, (name, table) in enumerate(tables.items())
    ]
    for length in (8192, 65536):
        series.append(Series(label="", style=7, points=[Point(x=0, y=length), Point(x=63, y=length)]))
    frame = Frame(
        label="Tokens per rotation by method",
        x_title="pair of dimensions",
        x_ticks=[(at, str(at)) for at in (0, 16, 32, 48, 63)],
        show_y=_short,
        log_y=True,
        dots=False,
    )
    parts = [text(14, 24, "Tokens per full rotation, 8K model extended to 64K", "title")]
    parts += legend(46, [(at, name) for at, name in enumerate(tables)])
    parts += [group(78, sized(line_chart(series, frame), WIDTH, 250)), text(66, 171, "64K"), text(66, 205, "8K")]
    parts.append(text(14, 345, "Above the 8K line: no full turn in training."))
    return picture(360, "Tokens per rotation of each pair of dimensions, by RoPE method", *parts)


def _short(value: float) -> str:
    return next((f"{value / unit:g}{name}" for unit, name in ((1e6, "M"), (1e3, "k")) if value >= unit), f"{value:g}")


# Untie the Knots


def utk() -> Markup:
    """A tangled row of the demo, and the documents that its pieces are from."""
    with tempfile.TemporaryDirectory() as folder:
        result = unspool.run("tiny", {"out": folder}, until="pack")
        row = result.dataset("utk-2k")[3]
        tokenizer = unspool.load("asset:tiny-base")[1]
        knots = add_knots(tokenizer, knot_names(3))
    assert row.chunk_ids is not None
    scale = (WIDTH - 28) / len(row.tokens)
    documents = documents_of(row.chunk_ids)
    marked = np.isin(row.tokens, list(knots.values()))
    pieces = list(zip(documents, (np.cumsum(row.doc_lens) - row.doc_lens).tolist(), row.doc_lens.tolist(), strict=True))
    parts = [text(14, 24, "Three documents, and the row that training sees", "title")]
    rows_at, bar, ends = 160.0, 34.0, 14.0
    places: dict[int, float] = {}
    for doc in sorted(set(documents)):
        places[doc] = ends
        ends += scale * sum(length for one, _, length in pieces if one == doc)
        if ends - places[doc] > 90:
            parts.append(text(places[doc], 50, f"document {doc + 1}"))
    for doc, start, length in pieces:
        x, wide, above = 14 + start * scale, length * scale, places[doc]
        corners = f"{above:.1f},90 {above + wide:.1f},90 {x + wide:.1f},{rows_at:.1f} {x:.1f},{rows_at:.1f}"
        parts += [
            element("polygon", class_=f"c{doc}", points=corners, fill_opacity="0.2"),
            box(above + 0.8, 56, wide - 1.6, bar, doc),
            box(x + 0.8, rows_at, wide - 1.6, bar, doc),
        ]
        places[doc] += wide
    for place in np.flatnonzero(marked).tolist():
        x = 14 + (place + 0.5) * scale
        parts.append(svg_line(x, rows_at - 6, x, rows_at + bar + 6, "knot"))
    parts.append(
        text(
            14,
            rows_at + bar + 26,
            f"Row of {len(row.tokens):,} tokens, {int(marked.sum())} of them special tokens (lines)",
        )
    )
    return picture(rows_at + bar + 42, "Documents and the tangled row that holds their pieces", *parts)


# HARPE


def harpe() -> Markup:
    """The bases of eight KV heads, and how far each tells a similar key from a random one."""
    shape = RopeShape(rotary_dim=128, num_kv_heads=8, base=1e4, max_positions=4096, original_len=4096)
    bases = HARPE(low=1e6, high=5e6).head_bases(shape, 1 << 17)
    parts = [text(14, 24, "One RoPE base per KV head, from 5e6 to 1e6", "title")]
    for head, base in enumerate(bases):
        x, tall = 30.0 + head * 48, float(base) / 5e6 * 60
        parts += [
            box(x, 122 - tall, 30, tall, head),
            text(x + 15, 138, head or "head 0", anchor="middle"),
            text(x + 15, 116 - tall, f"{base / 1e6:.1f}M", anchor="middle"),
        ]
    edges = np.geomspace(64, 1 << 17, 45).astype(int)
    curves = [curve(table, 1 << 17) / 64 for table in frequencies(bases, 128).astype(np.float64)]
    lowest = [np.minimum.reduceat(one, edges[:-1]) for one in (curves[0], curves[-1], np.mean(curves, axis=0))]
    series = [
        Series(
            label=name, style=style, points=[Point(x=float(m), y=float(y)) for m, y in zip(edges, values, strict=False)]
        )
        for name, style, values in (
            ("head 0", 0, lowest[0]),
            ("head 7", 7, lowest[1]),
            ("mean of the heads", 1, lowest[2]),
        )
    ]
    frame = Frame(
        label="B(m) by distance",
        x_title="distance m in tokens",
        x_ticks=[(2.0**power, name) for power, name in ((6, "64"), (9, "512"), (12, "4K"), (15, "32K"))],
        show_y=lambda value: f"{value:g}",
        log_x=True,
        dots=False,
    )
    parts += [text(14, 172, "Lowest B(m) ÷ B(0) by distance", "title")]
    parts += legend(194, [(0, "head 0"), (7, "head 7"), (1, "mean of heads")])
    parts.append(group(200, sized(line_chart(series, frame), WIDTH, 250)))
    return picture(464, "RoPE bases by head, and B(m) by distance", *parts)


# Memory

SETTINGS: tuple[tuple[str, dict[str, object]], ...] = (
    ("none", {}),
    ("keep-attention", {"activation_checkpointing": "keep-attention"}),
    ("full", {"activation_checkpointing": "full"}),
    ("+ mlp_tiles", {"mlp_tiles": "16K"}),
    ("+ offload", {"offload": True}),
    ("+ 8-bit states", {"optimizer.states": "8bit"}),
    ("+ bf16 weights", {"optimizer.weights": "bf16"}),
    ("+ in-backward", {"optimizer.step": "in-backward", "batch_tokens": "64K"}),
)
GIB = 1 << 30


def memory() -> Markup:
    """Planned GPU memory of one 8B model at 64K, under settings that are added one after the other."""
    named = {
        "weights": ("weights",),
        "optimizer": ("optimizer",),
        "gradients": ("gradients",),
        "activations": ("checkpoints", "kept"),
        "one layer, loss": ("layer", "loss", "batch"),
    }
    parts = [text(14, 24, "GPU memory of 8B at 64K tokens, one GPU, in GiB", "title")]
    parts += legend(46, [(at, name) for at, name in enumerate(named)])
    scale, left, at = 1.35, 122.0, 86.0
    settings: dict[str, object] = {}
    for name, changed in SETTINGS:
        settings |= changed
        changes = {f"stages.0.{key}": value for key, value in {"activation_checkpointing": "none", **settings}.items()}
        written = unspool.plan("prolong-64k", changes, gpu="h200", host_mem="256G").stages[0].written
        assert written is not None
        x = left
        for color, fields in enumerate(named.values()):
            wide = sum(getattr(written.footprint, field) for field in fields) / GIB * scale
            shown = min(wide, WIDTH - 54 - x)
            parts.append(box(x, at, max(0.0, shown), 18, color))
            x += max(0.0, shown)
        parts += [
            text(left - 6, at + 14, name, anchor="end"),
            text(x + 6, at + 14, f"{written.device_bytes / GIB:.0f}"),
        ]
        at += 27
    room = left + unspool.plan("prolong-64k", gpu="h200").machine.room / GIB * scale
    parts += [svg_line(room, 80, room, at, "mark"), text(room, at + 16, "free on an H200", anchor="middle")]
    parts.append(text(14, at + 38, "Planned by unspool plan; the first bar is cut."))
    return picture(at + 52, "GPU memory by setting", *parts)


# Exactness


def exactness() -> Markup:
    """The loss of four packed rows on two ranks: sums over tokens, and what a mean of means would give."""
    model, tokenizer = unspool.load("asset:tiny-base")
    texts = ["The whale. " * 30, "A ship at sea. " * 3, "It rained in the hills, and nobody knew why. " * 8, "No."]
    sums, counts = [], []
    for one in texts:
        with tempfile.TemporaryDirectory() as folder:
            row = unspool.pack([one], tokenizer, seq_len=256, packing="best_fit", out=Path(folder) / "rows")[0]
            batch = unspool.Collator(model)([row])
        valid = int((batch["shift_labels"] != IGNORE).sum())
        with torch.no_grad():
            sums.append(float(model(**batch | {"num_items_in_batch": torch.tensor(1)}).loss))
        counts.append(valid)
    total = sum(sums) / sum(counts)
    wrong = float(np.mean([loss / count for loss, count in zip(sums, counts, strict=True)]))
    parts = [text(14, 24, "One step: 2 ranks × 2 micro-batches", "title")]
    for at, (loss, count) in enumerate(zip(sums, counts, strict=True)):
        x, y = 14 + (at % 2) * 200.0, 44 + (at // 2) * 74.0
        parts += [
            box(x, y, 192, 62, at // 2),
            text(x + 10, y + 20, f"rank {at // 2}, micro-batch {at % 2}", "light"),
            text(x + 10, y + 38, f"{count} tokens carry loss", "light"),
            text(x + 10, y + 55, f"sum of losses {loss:.1f}", "light"),
        ]
    parts += [
        text(14, 218, f"Loss of the step: {sum(sums):.1f} ÷ {sum(counts)} = {total:.3f}", "title"),
        text(14, 242, f"A mean of the four means would give {wrong:.3f},"),
        text(14, 261, "and another number for another split."),
    ]
    return picture(276, "The loss of a step as a sum over tokens divided by their count", *parts)


PICTURES: dict[str, Callable[[], Markup]] = {
    "packing": packing,
    "rope": rope,
    "utk": utk,
    "harpe": harpe,
    "memory": memory,
    "exactness": exactness,
}


def main(names: Sequence[str]) -> None:
    torch.manual_seed(0)
    for name in names or PICTURES:
        write_text(OUT / f"{name}.svg", PICTURES[name]() + "\n")
        print(OUT / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
