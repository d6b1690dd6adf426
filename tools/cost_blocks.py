"""Blocks of the page on cost: measured steps by length and mix, simulated ranks, projection, published speeds."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from cost_data import CostPoint, mfu, mixes, ours, peer, published, read, roof
from pictures import WIDTH, group, legend, picture, sized, text
from result_data import IMAGES, Output
from result_figures import MARKS
from unspool.core.charts import HEIGHT, Frame, Point, Series, line_chart
from unspool.core.formatting import MISSING
from unspool.core.html import element
from unspool.core.sizes import format_size
from unspool.core.table import markdown_lines
from unspool.planning.step_time import documents

PUBLISHED = "Ulysses, FlashAttention-3, offload, tiled MLP (UPipe paper)"
OPTION = re.compile(r"--[a-z]+")  # of a command
TITLE = "What length costs: 8B, one document per row"


def cost(settings: Mapping[str, Any]) -> Output:
    """Measured speed, MFU and memory by length. Settings: file (of the figure)."""
    mine, theirs = ({point.tokens: point for point in points} for points in (ours(), peer()))
    rows = []
    for tokens in sorted(mine | theirs):
        top = roof(documents([tokens]))
        own, other = mine.get(tokens), theirs.get(tokens)
        cells = [*_speed(own), *_speed(other), f"{top:,.0f}"]
        rows.append([format_size(tokens), *cells, MISSING if own is None else f"{own.tokens_per_second / top:.0%}"])
    head = ["length", "tokens/s", "MFU", "GiB", "peer, tokens/s", "MFU", "GiB", "roof, tokens/s", "ours ÷ roof"]
    figure = f"![{TITLE}](../images/{settings['file']})"
    return Output(
        text="\n".join([*markdown_lines(head, rows), "", figure]),
        figures={IMAGES / settings["file"]: str(_figure(list(mine.values()), list(theirs.values()))) + "\n"},
    )


def _speed(point: CostPoint | None) -> list[str]:
    if point is None:
        return [MISSING] * 3
    memory = MISSING if point.peak_gib is None else f"{point.peak_gib:.1f}"
    return [f"{point.tokens_per_second:,.0f}", f"{point.mfu:.0%}", memory]


def _figure(mine: Sequence[CostPoint], theirs: Sequence[CostPoint]) -> Markup:
    others = [one.point for one in published() if one.system == PUBLISHED]
    lengths = sorted({point.tokens for point in [*mine, *theirs, *others]})
    tops = [CostPoint(tokens=tokens, tokens_per_second=roof(documents([tokens]))) for tokens in lengths]
    series = {"ours, 1 × H200": mine, "peer, 1 × H200": theirs, "roof": tops, "UPipe paper, 8 × H100": others}
    panels = [
        ("GPU hours per billion tokens", "hours_per_billion", lambda value: f"{value:,.0f}", None),
        ("model FLOP utilization", "mfu", lambda value: f"{value:.0%}", (0.0, 1.0)),
        ("peak memory, GiB (memory settings differ)", "peak_gib", lambda value: f"{value:g}", (0.0, 140.0)),
    ]
    parts = [element("style", Markup(MARKS)), text(14, 24, TITLE, "title")]
    parts += legend(48, list(enumerate(series)), columns=2)
    top = 84.0
    for title, name, show, y_range in panels:
        frame = Frame(
            label=title,
            x_title="context length",
            x_ticks=[(tokens, format_size(tokens)) for tokens in lengths],
            show_y=show,
            log_x=True,
            log_y=y_range is None,
            y_range=y_range,
            dodge=False,
        )
        lines = [
            Series(label=label, style=style, points=_points(label, points, name))
            for style, (label, points) in enumerate(series.items())
            if any(getattr(point, name) is not None for point in points)
        ]
        parts += [text(14, top + 14, title), group(top + 18, sized(line_chart(lines, frame), WIDTH, HEIGHT))]
        top += HEIGHT + 32
    return picture(top + 4, TITLE, *parts)


def _points(label: str, points: Sequence[CostPoint], name: str) -> list[Point]:
    return [
        Point(x=point.tokens, y=value, tooltip=f"{label}, {format_size(point.tokens)}: {value:,.3g}")
        for point in points
        if (value := getattr(point, name)) is not None
    ]


def document_mix(settings: Mapping[str, Any]) -> Output:
    """Measured speed by the share of rows that are one document. No settings."""
    rows = []
    for point in mixes():
        top = roof(point.docs)
        other = MISSING if point.peer is None else f"{point.peer:,.0f}"
        rows.append(
            [
                f"{point.share:.1%}",
                f"{point.ours:,.0f}",
                f"{mfu(point.ours, point.docs):.0%}",
                other,
                f"{top:,.0f}",
                f"{point.ours / top:.0%}",
            ]
        )
    head = ["rows of one document", "tokens/s", "MFU", "peer, tokens/s", "roof, tokens/s", "ours ÷ roof"]
    return Output(text="\n".join(markdown_lines(head, rows)))


def simulated(settings: Mapping[str, Any]) -> Output:
    """Simulated ranks beside the prediction of `plan`. No settings."""
    found = read("simulated_ranks.json")
    cases = {name: one for name, one in (found or {"cases": {}})["cases"].items() if "measured" in one}
    if not cases:
        return Output(text="Not run yet: `python benchmarks/simulated_ranks.py` needs one H200.")
    rows = []
    for name, one in cases.items():
        plan, measured, rank = one["plan"], one["measured"], one["rank"]
        sent, counted = (sum(found.values()) / 1e9 for found in (plan["sent_bytes"], measured["counted_bytes"]))
        rows.append(
            [
                f"{name.split('-')[0].upper()}, {format_size(one['length'])}",
                str(one["ranks"]),
                _layout(one["layout"]),
                f"{plan['peak_gib']:.1f}, {rank['memory_gib']:.1f} ({plan['peak_gib'] / rank['memory_gib']:.2f})",
                f"{plan['compute_seconds']:.2f}, {measured['compute_seconds']:.2f} "
                f"({plan['compute_seconds'] / measured['compute_seconds']:.2f})",
                f"{sent:.1f}, {counted:.1f}",
                f"{plan['step_seconds']:.2f}, {measured['step_seconds']:.2f}",
                f"{measured['tokens_per_second_per_gpu']:,.0f}",
            ]
        )
    head = ["shape, length", "GPUs", "layout", "memory, GiB", "compute, s", "sent, GB", "step, s", "tokens/s per GPU"]
    first = next(iter(cases.values()))
    links = f"{first['links']['inside_gb_per_s']:g} and {first['links']['between_gb_per_s']:g} GB/s"
    note = (
        "Pairs: `plan`, then the simulated rank (ratio). Memory and compute are measured, bytes counted; the step is "
        f"measured compute plus counted bytes over {links}."
    )
    return Output(text="\n".join([*markdown_lines(head, rows), "", note]))


def _layout(layout: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in layout.items() if size > 1)


def projection(settings: Mapping[str, Any]) -> Output:
    """What `plan` predicts for more GPUs, with its assumptions. No settings."""
    found = read("projection.json")
    counts = sorted({point["gpus"] for point in found["points"]})
    rows: dict[tuple[str, int], list[str]] = {}
    for point in found["points"]:
        row = rows.setdefault(
            (point["model"], point["context_length"]), [f"{point['model']}, {format_size(point['context_length'])}"]
        )
        speed = f"{point['tokens_per_second']:,.0f} tokens/s, {point['mfu']:.0%}"
        row.append(f"{speed}, {point['peak_gib']:.0f} GiB<br>{_layout(point['layout'])}")
    head = ["shape, length", *(f"{count} GPUs" for count in counts)]
    assumed = ["- " + OPTION.sub(r"`\g<0>`", sentence) for sentence in found["assumptions"]]
    note = f"`plan` for {found['gpu']}: speed per GPU, MFU, peak memory, and the layout that it chooses."
    table = markdown_lines(head, list(rows.values()))
    return Output(text="\n".join([note, "", *table, "", "Assumptions:", "", *assumed]))


def published_speed(settings: Mapping[str, Any]) -> Output:
    """Published speeds of 8B models, with the utilization that they mean by our convention.

    Settings: lengths (default: all).
    """
    wanted = settings.get("lengths")
    found = [one for one in published() if wanted is None or format_size(one.point.tokens) in wanted]
    rows = [
        [
            format_size(one.point.tokens),
            one.system,
            one.gpus,
            f"{one.point.tokens_per_second:,.0f}",
            f"{one.point.mfu:.0%}",
        ]
        for one in sorted(found, key=lambda one: (one.point.tokens, -one.point.tokens_per_second))
    ]
    head = ["length", "system", "GPUs", "tokens/s per GPU", "MFU"]
    return Output(text="\n".join(markdown_lines(head, rows)))


COST_BLOCKS = {
    "cost": cost,
    "document_mix": document_mix,
    "simulated": simulated,
    "projection": projection,
    "published_speed": published_speed,
}
