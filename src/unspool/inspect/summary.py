"""What a corpus or rows are as a whole: counts, sources, and how long their documents are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unspool.base.sizes import format_size
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
    named = [str(settings.get("pack") or "")]
    for name, describe in _STRATEGIES.items():
        chosen = settings.get(name)
        if isinstance(chosen, dict):
            named.append(describe(chosen))
    return [name for name in named if name]


_STRATEGIES: dict[str, Callable[[dict[str, Any]], str]] = {
    "tangle": lambda _: "tangled",
    "interleave": lambda chosen: f"interleaved in {chosen.get('pieces')} pieces",
    "negatives": lambda chosen: f"negatives after chunks of {_size(chosen.get('chunk'))}",
    "upsample": lambda chosen: f"documents from {_size(chosen.get('above'))} upsampled",
    "skips": lambda chosen: f"positions skipped up to {_size(chosen.get('target'))}",
    "replace": lambda chosen: f"a share of {chosen.get('with')}",
}


def _size(tokens: Any) -> str:
    return format_size(tokens) if isinstance(tokens, int) else str(tokens)
