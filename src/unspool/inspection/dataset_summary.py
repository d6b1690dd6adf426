"""What a corpus or rows are as a whole: counts, sources, and how long their documents are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from unspool.core.sizes import format_size
from unspool.data.lengths import Histogram, histogram


@dataclass(frozen=True, kw_only=True)
class Summary:
    path: Path
    kind: str  # "rows", "documents", "records"
    headline: str  # "464 rows of 2K tokens"
    facts: list[tuple[str, str]]
    part: str = "document"  # what the lengths are lengths of
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    sample: str = ""  # what the lengths were taken from, unless it is everything
    notes: list[str] = field(default_factory=list)

    @property
    def bins(self) -> Histogram:
        return histogram(self.lengths[self.lengths > 0])

    @property
    def length_line(self) -> str:
        if not len(self.lengths):
            return ""
        median, most = np.quantile(self.lengths, [0.5, 0.9], method="lower").tolist()
        line = (
            f"{self.part}s: {len(self.lengths):,}, median {median:,.0f} tokens, 9 of 10 have at most {most:,.0f}, "
            f"longest {self.lengths.max():,}"
        )
        return f"{line} ({self.sample})" if self.sample else line


def manifest_facts(counts: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers of a manifest, whatever it counts: `tokens_in` reads "tokens in", reasons stand on one line."""
    facts = []
    for name, value in counts.items():
        shown = show_count(value)
        if shown:
            facts.append((name.replace("_", " "), shown))
    return facts


def show_count(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return value
    # A table of its own, such as lengths by source, is not for one line.
    if isinstance(value, dict) and value and all(isinstance(number, int) for number in value.values()):
        return ", ".join(f"{name} {number:,}" for name, number in value.items())
    return ""


def show_length(tokens: int) -> str:
    return f"{format_size(tokens)} tokens"


def strategies(settings: Mapping[str, Any]) -> list[str]:
    """How rows were made, in the words of their settings."""
    named = [str(settings.get("packing") or "")]
    for name, describe in _STRATEGIES.items():
        chosen = settings.get(name)
        if isinstance(chosen, dict):
            named.append(describe(chosen))
    return [name for name in named if name]


_STRATEGIES: dict[str, Callable[[dict[str, Any]], str]] = {
    "utk": lambda _: "tangled",
    "cip": lambda chosen: f"interleaved in {chosen.get('pieces')} pieces",
    "nextlong": lambda chosen: f"negatives after chunks of {_size(chosen.get('chunk'))}",
    "upsample": lambda chosen: f"documents from {_size(chosen.get('above'))} upsampled",
    "pose": lambda chosen: f"positions skipped up to {_size(chosen.get('target'))}",
    "replace": lambda chosen: f"a share of {chosen.get('with')}",
}


def _size(tokens: Any) -> str:
    return format_size(tokens) if isinstance(tokens, int) else str(tokens)


# Document lengths as inline SVG: per doubling of the length, the share of documents and of tokens.


# In viewBox units: about a phone's width, so that text stays readable there.
WIDTH, HEIGHT = 420, 190
LEFT, TOP, BOTTOM = 40, 12, 40
_MOST_LABELS = 9


def length_chart(lengths: Histogram) -> Markup:
    """Two bars per bin; the page's style sheet gives their colours."""
    documents, tokens = sum(lengths["documents"]), sum(lengths["tokens"])
    count = len(lengths["at_least"])
    if not documents or not tokens:
        return Markup("")
    bins = [
        (edge, num_docs, num_tokens, num_docs / documents, num_tokens / tokens)
        for edge, num_docs, num_tokens in zip(
            *(lengths[key] for key in ("at_least", "documents", "tokens")), strict=True
        )
    ]
    top = max(max(of_docs, of_tokens) for *_, of_docs, of_tokens in bins)
    floor, wide = HEIGHT - BOTTOM, (WIDTH - LEFT) / count
    every = -(-count // _MOST_LABELS)
    drawn = [_grid(share, top, floor) for share in _ticks(top)]
    for place, (edge, num_docs, num_tokens, of_docs, of_tokens) in enumerate(bins):
        left, bar = LEFT + wide * place, min(wide * 0.42, 34)
        middle = left + wide / 2
        about = f"{format_size(edge)} to {format_size(2 * edge)} tokens: {num_docs:,} documents, {num_tokens:,} tokens"
        for share, name, x in ((of_docs, "of-docs", middle - bar), (of_tokens, "of-tokens", middle)):
            high = (floor - TOP) * share / top
            drawn.append(
                Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"></rect>').format(
                    name, x, floor - high, bar, high
                )
            )
        drawn.append(
            Markup('<rect class="hit" x="{:.1f}" y="{}" width="{:.1f}" height="{}"><title>{}</title></rect>').format(
                left, TOP, wide, floor - TOP, about
            )
        )
        if place % every == 0:
            drawn.append(_text(middle, floor + 16, format_size(edge), "middle"))
    drawn.append(_text((LEFT + WIDTH) / 2, HEIGHT - 6, "tokens, at least", "middle"))
    label = f"Lengths of {documents:,} documents, {escape(format_size(lengths['at_least'][0]))} tokens and more"
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, label, Markup("").join(drawn)
    )


def _ticks(top: float) -> list[float]:
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5) if top / step <= 5)
    return [step * number for number in range(int(top / step + 1e-9) + 1)]


def _grid(share: float, top: float, floor: float) -> Markup:
    y = floor - (floor - TOP) * share / top
    line = Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"></line>').format(LEFT, WIDTH, y, y)
    return line + _text(LEFT - 6, y + 4, f"{100 * share:.0f}%", "end")


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)
