"""The result of a trial: losses of every RoPE method, ranked, with paired differences to the best."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from unspool.core.formatting import format_signed, join_words
from unspool.core.result import Result
from unspool.core.sizes import format_count, format_size
from unspool.core.table import Entry, Table, entries, terminal_table
from unspool.studies.rope_trial.candidates import Candidate
from unspool.studies.rope_trial.ranking import Difference, Ranked, merge_ranges

MAX_RANGES = 3  # columns of position ranges beyond the old context


@dataclass(frozen=True, kw_only=True)
class RopeTrial(Result):
    """Losses of RoPE methods on the same windows, as `try_rope` returns them.

    Example:
        >>> import tempfile, unspool
        >>> trial = unspool.try_rope("asset:tiny-base", "512", ["unchanged", "yarn"], windows=2, out=tempfile.mkdtemp())
        >>> trial.best, trial.to_dict()["windows"]
        ('yarn', 2)
    """

    model: str
    old_len: int  # the context length of the model before
    context_len: int
    ranked: Sequence[Ranked]  # the lowest loss beyond the old context first
    candidates: Mapping[str, Candidate]
    skipped: Mapping[str, str]  # by candidate: why it was not measured
    edges: Sequence[int]  # of the position ranges
    text: str | None  # None: the bundled held-out text
    num_documents: int
    stage: Mapping[str, Any] | None  # settings of the training; None without one
    folder: Path

    @property
    def best(self) -> str:
        """The candidate with the lowest loss beyond the old context."""
        return self.ranked[0].label

    @property
    def ties(self) -> list[str]:
        """The candidates that are not told apart from the best."""
        return [one.label for one in self.ranked[1:] if one.to_best is not None and not one.to_best.is_told_apart]

    @property
    def num_windows(self) -> int:
        return len(self.ranked[0].losses)

    @property
    def lines(self) -> str:
        """The lines of a recipe's stage with the best candidate."""
        return f"context_length: {format_size(self.context_len)}\n{self.candidates[self.best].line}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "old_context": self.old_len,
            "context_length": self.context_len,
            "text": self.text,
            "windows": self.num_windows,
            "documents": self.num_documents,
            "training": None if self.stage is None else dict(self.stage),
            "best": self.best,
            "not_told_apart": self.ties,
            "recipe": self.lines,
            "candidates": [self._entry(rank, one) for rank, one in enumerate(self.ranked, start=1)],
            "skipped": [{"candidate": label, "reason": reason} for label, reason in self.skipped.items()],
            "folder": str(self.folder),
        }

    def _entry(self, rank: int, one: Ranked) -> dict[str, Any]:
        ranges = zip(pairwise(self.edges), one.ranges, strict=True)
        candidate = self.candidates[one.label]
        return {
            "rank": rank,
            "candidate": one.label,
            "rope": candidate.method.model_dump(mode="json"),
            "line": candidate.line,
            "inside": one.inside,
            "beyond": one.beyond,
            "by_position": [{"from": start, "to": stop, "value": value} for (start, stop), value in ranges],
            "to_best": _plain(one.to_best),
            "inside_to_unchanged": _plain(one.inside_cost),
            "losses": {window: list(losses) for window, losses in one.losses.items()},
        }

    def print(self, console: Console) -> None:
        sizes = f"{format_size(self.old_len)} to {format_size(self.context_len)}"
        console.print(f"{self.model} from {sizes}, {self._training()}", style="bold", soft_wrap=True)
        source = "the bundled held-out text" if self.text is None else self.text
        documents = f"{self.num_documents} document{'s' * (self.num_documents != 1)}"
        console.print(
            f"loss in nats per token on {self.num_windows} windows of {format_size(self.context_len)} tokens from "
            f"{documents} of {source}\n",
            soft_wrap=True,
        )
        console.print(terminal_table(self._table()))
        console.print()
        for sentence in self._sentences():
            console.print(sentence, soft_wrap=True)
        console.print("\nTo paste into a stage:", style="bold")
        for line in self.lines.splitlines():
            console.print(f"  {line}", soft_wrap=True)

    def _training(self) -> str:
        if self.stage is None:
            return "without training"
        return f"each candidate trained on {format_count(self.stage['tokens'])} tokens at lr {self.stage['lr']:g}"

    def _table(self) -> Table:
        old = format_size(self.old_len)
        spans = merge_ranges(self.ranked[0].ranges, self.edges, MAX_RANGES)[1]
        parts = [f"{format_size(start)}–{format_size(stop)}" for start, stop in pairwise(spans)]
        parts = parts if len(parts) > 1 else []
        rows = []
        for one in self.ranked:
            values = merge_ranges(one.ranges, self.edges, MAX_RANGES)[0][: len(parts)]
            gap = "best" if one.to_best is None else _interval(one.to_best)
            cells = [f"{one.beyond:.3f}", gap, f"{one.inside:.3f}", *(f"{value:.3f}" for value in values)]
            rows.append([Entry(text=one.label, strong=one.label == self.best), *entries(*cells)])
        columns = ("candidate", f"beyond {old}", "minus the best", f"0–{old}", *parts)
        return Table(caption="Loss by RoPE method", columns=columns, rows=rows)

    def _sentences(self) -> list[str]:
        found = []
        if len(self.ranked) > 1:
            found.append(
                f"Differences are paired by window; their 95% intervals (Student's t, n = {self.num_windows}) hold for "
                "all of them together."
            )
            ties = self.ties
            found.append(
                f"Not told apart from {self.best}: {join_words(ties)}. More windows narrow the intervals."
                if ties
                else f"{self.best} is told apart from every other candidate on this text."
            )
        cost = self.ranked[0].inside_cost
        if cost is not None:
            word = "more" if cost.mean > 0 else "less"
            sure = "" if cost.is_told_apart else ", which is not told apart from 0"
            found.append(
                f"Within {format_size(self.old_len)} tokens, {self.best} loses {abs(cost.mean):.3f} nats {word} than "
                f"unchanged ({_range(cost)}){sure}."
            )
        return found + [f"Skipped {label}: {reason}" for label, reason in self.skipped.items()]


def _plain(difference: Difference | None) -> dict[str, Any] | None:
    return None if difference is None else {**asdict(difference), "told_apart": difference.is_told_apart}


def _interval(difference: Difference) -> str:
    return f"{format_signed(difference.mean, 3)} ({_range(difference)})"


def _range(difference: Difference) -> str:
    return f"{format_signed(difference.low, 3)} to {format_signed(difference.high, 3)}"
