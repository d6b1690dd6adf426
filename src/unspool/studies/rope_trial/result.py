"""The result of a trial: losses of every RoPE method, ranked, with paired differences to the best."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from unspool.core.formatting import format_signed, join_words
from unspool.core.result import Result
from unspool.core.sizes import format_size
from unspool.core.table import Entry, Table, entries, markdown_table, terminal_table
from unspool.studies.rope_trial.candidates import Candidate
from unspool.studies.rope_trial.ranking import MIN_DOCUMENTS, Difference, Ranked, merge_ranges

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

    def renderers(self) -> Mapping[str, Callable[[], str]]:
        table = self._with_ranges(min(MAX_RANGES, len(self.edges) - 2))
        return {"markdown": lambda: "\n\n".join([markdown_table(table), *self._sentences()]) + "\n"}

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
        console.print(terminal_table(self._table(console.width)))
        console.print()
        for sentence in self._sentences():
            console.print(sentence, soft_wrap=True)
        console.print("\nTo paste into a stage:", style="bold")
        for line in self.lines.splitlines():
            console.print(f"  {line}", soft_wrap=True)

    def _number(self) -> str:
        """Return the number of windows and documents, and what the intervals make of the documents."""
        windows, documents = self.num_windows, self.num_documents
        found = f"n = {windows} windows of {documents} document{'s' * (documents != 1)}"
        if documents == windows:
            return found
        if documents < MIN_DOCUMENTS:
            return f"{found}, too few to cover other documents"
        return f"{found}; windows of one document are not counted as independent"

    def _training(self) -> str:
        if self.stage is None:
            return "without training"
        return f"each candidate trained on {format_size(self.stage['tokens'])} tokens at lr {self.stage['lr']:g}"

    def _table(self, width: int) -> Table:
        """Return the table with as many ranges of positions as fit into the terminal."""
        tables = [self._with_ranges(count) for count in range(min(MAX_RANGES, len(self.edges) - 2), 0, -1)]
        return next((table for table in tables if _width(table) <= width), tables[-1])

    def _with_ranges(self, count: int) -> Table:
        old = format_size(self.old_len)
        spans = merge_ranges(self.ranked[0].ranges, self.edges, count)[1]
        parts = [f"{format_size(start)}–{format_size(stop)}" for start, stop in pairwise(spans)]
        parts = parts if len(parts) > 1 else []  # a single range is all of it
        rows = []
        for one in self.ranked:
            values = merge_ranges(one.ranges, self.edges, count)[0][: len(parts)]
            gap = "best" if one.to_best is None else _plus_minus(one.to_best)
            cells = [f"{one.beyond:.3f}", gap, f"{one.inside:.3f}", *(f"{value:.3f}" for value in values)]
            rows.append([Entry(text=one.label, strong=one.label == self.best), *entries(*cells)])
        columns = ("candidate", f"beyond {old}", "minus the best", f"0–{old}", *parts)
        caption = f"Loss by RoPE method, {self.model} from {old} to {format_size(self.context_len)}, {self._training()}"
        return Table(caption=caption, columns=columns, rows=rows)

    def _sentences(self) -> list[str]:
        found = []
        if len(self.ranked) > 1:
            found.append(
                f"Differences are paired by window. The 95% intervals (Student's t, {self._number()}) hold for all of "
                "them together."
            )
            found.append(
                f"Not told apart from {self.best} (=): {join_words(self.ties)}. More "
                f"{'windows' if self.num_documents == self.num_windows else 'documents'} narrow the intervals."
                if self.ties
                else f"On this text, {self.best} is better than every other candidate."
            )
        cost = self.ranked[0].inside_cost
        if cost is not None:
            word = "higher" if cost.mean > 0 else "lower"
            sure = "" if cost.is_told_apart else ", so they are not told apart"
            found.append(
                f"Within {format_size(self.old_len)}, the loss of {self.best} is {abs(cost.mean):.3f} nats {word} than "
                f"that of unchanged ({_range(cost)}{sure})."
            )
        return found + [f"Skipped {label}: {reason}" for label, reason in self.skipped.items()]


def _plain(difference: Difference | None) -> dict[str, Any] | None:
    return None if difference is None else {**asdict(difference), "told_apart": difference.is_told_apart}


def _width(table: Table) -> int:
    texts = [table.columns, *([cell.text for cell in row] for row in table.rows)]
    return sum(max(map(len, column)) + 2 for column in zip(*texts, strict=True))


def _plus_minus(difference: Difference) -> str:
    """Return the mean and half of its interval, which is symmetric, with a mark if it includes 0."""
    mark = " " if difference.is_told_apart else "="
    return f"{format_signed(difference.mean, 3)} ±{difference.high - difference.mean:.3f}{mark}"


def _range(difference: Difference) -> str:
    return f"{format_signed(difference.low, 3)} to {format_signed(difference.high, 3)}"
