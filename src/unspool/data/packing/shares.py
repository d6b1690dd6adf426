"""Keep the shares of several sources in one dataset, counted in trained tokens.

The number of a document's trained tokens is known only when its row is finished. Truncation, a loss mask or a strategy
may remove most of them. So the next document always comes from the source that is furthest behind its share. This
counts the trained tokens in finished rows and, for documents that wait for a row, an estimate from the source's earlier
documents.

One document can be longer than the share of its source. `target` estimates the size of the dataset when it reaches its
limit or a source runs out. If a whole document would move the share by more than `CUT_FROM`, it is cut where its source
reaches its share of that size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unspool.core.errors import DataError
from unspool.data.packing.row import BATCH_TOKENS, Row, trained_by_source

# Largest change of a share of the dataset by one document.
CUT_FROM = 0.001
# Deviations of a share above this are reported.
TOLERANCE = 0.01
# Weight, in rows, of the expected rate of a source before rows are finished.
_PRIOR_ROWS = 2
# Minimum number of times that rows are counted before more documents are drawn.
_UPDATES = 2000


@dataclass(slots=True)
class SourceShare:
    """One source of a dataset; counts are in tokens."""

    name: str
    goal: float  # requested share, from 0 to 1
    rate: float  # trained tokens per token of its documents
    left: int  # in documents that are not drawn yet
    trained: int = 0  # trained tokens in finished rows
    waiting: int = 0  # drawn, and expected in a row that is not finished yet
    entered: int = 0  # drawn, and expected in a row
    drawn: int = 0


class ShareKeeper:
    """Choose the source of the next document and how much of it to use; count finished rows.

    Documents enter rows in multiples of `unit` tokens; those below `min_doc_len` enter none. `truncates`: rows drop
    what does not fit. `borrows`: rows take more text from other documents, so sources take turns by the documents
    drawn, and rows keep the shares themselves (`row_quotas`).
    """

    def __init__(
        self,
        sources: Sequence[SourceShare],
        row_len: int,
        *,
        most_rows: int | None,
        unit: int = 1,
        min_doc_len: int = 1,
        truncates: bool = False,
        borrows: bool = False,
    ) -> None:
        self.sources = sources
        self.num_rows = 0
        self._row_len, self._most_rows = row_len, most_rows
        self._unit, self._min_doc_len, self._truncates, self._borrows = unit, min_doc_len, truncates, borrows
        self._can_give = [source.left > 0 for source in sources]
        self._room = row_len
        self._prior = _PRIOR_ROWS * row_len
        # Trained tokens of a row, before any is finished. Shares are of trained tokens, so a source with a low rate
        # takes more of the row.
        self._density = 1 / sum(source.goal / max(source.rate, 1e-3) for source in sources)
        self._refresh()
        # Tokens that are packed before finished rows are counted again.
        self.window = row_len if borrows else min(BATCH_TOKENS, max(row_len, int(self.target) // _UPDATES))

    def next_source(self) -> int | None:
        """Return the source that is furthest behind its share; None if all have run out."""
        if self._is_stale:
            self._refresh()
        total, placed = self._total, self._placed
        behind = [
            source.goal * total - have if can_give else -math.inf
            for source, have, can_give in zip(self.sources, placed, self._can_give, strict=True)
        ]
        furthest = max(behind)
        return behind.index(furthest) if furthest > -math.inf else None

    def run_out(self, number: int) -> bool:
        """Mark a source as exhausted; return whether that ends the dataset, because the shares would break."""
        self._can_give[number] = False
        return not self._borrows

    def take(self, number: int, length: int) -> int:
        """Count the next document of a source as drawn; return how many of its tokens to use."""
        source, rate = self.sources[number], self._rates[number]
        usable = length // self._unit * self._unit if length >= self._min_doc_len else 0
        enters = min(usable, self._room) if self._truncates else usable
        used = length
        if not self._borrows:
            # Half a row more than the estimate, so that a dataset that outgrows it does not cut more and more.
            goal = source.goal * max(self.target, self._total + self._per_row / 2)
            over = self._placed[number] + enters * rate - goal
            if over > CUT_FROM * self.target:
                units = round((enters - over / rate) / self._unit)
                used = enters = min(enters, max(1, units) * self._unit)
        source.left -= usable
        source.drawn += usable
        source.entered += enters
        source.waiting += enters
        gain = enters if self._borrows else enters * rate
        self._placed[number] += gain
        self._total += gain
        self._room = (self._room - enters) or self._row_len
        return used

    def settle(self, waiting: Mapping[str, int]) -> None:
        """Replace the estimates: all drawn documents are in rows or dropped, except these tokens by source."""
        for source in self.sources:
            source.waiting = waiting.get(source.name, 0)
        self._room = self._row_len - min(self._row_len - 1, sum(waiting.values()))
        self._is_stale = True

    def count(self, row: Row) -> None:
        """Add a finished row."""
        found = trained_by_source(row)
        if unknown := found.keys() - {source.name for source in self.sources} - {""}:
            raise DataError(
                f"a row has the source {', '.join(sorted(unknown))}, so the shares of its sources cannot be "
                "counted; the strategy that made it must set `Row.sources`."
            )
        for source in self.sources:
            source.trained += found.get(source.name, 0)
        self.num_rows += 1
        self._is_stale = True

    def row_quotas(self) -> dict[str, int]:
        """Return how many tokens of each source the next row may take to keep the shares."""
        total = sum(source.trained for source in self.sources) + self._row_len
        return {source.name: max(0, round(source.goal * total) - source.trained) for source in self.sources}

    def realized(self) -> dict[str, dict[str, float]]:
        """Return requested and realized shares and trained tokens, for the manifest."""
        total = max(1, sum(source.trained for source in self.sources))
        return {
            source.name: {
                "requested": source.goal,
                "realized": source.trained / total,
                "trained_tokens": source.trained,
            }
            for source in self.sources
        }

    @property
    def most_window(self) -> float:
        """Return the number of tokens that suffices for the rest of the limit plus one row."""
        return math.inf if self._most_rows is None else (self._most_rows - self.num_rows + 1) * self._row_len

    @property
    def limit_tokens(self) -> float:
        """Return the trained tokens in as many rows as the limit allows."""
        return (self._most_rows or 0) * self._per_row

    @property
    def missing(self) -> tuple[SourceShare, float]:
        """Return the source that limits the dataset most, and the trained tokens that it lacks for the limit."""
        assert self._most_rows is not None
        self._refresh()
        scarcest = min(self.sources, key=lambda source: self._expected(source) / source.goal)
        return scarcest, scarcest.goal * self.limit_tokens - self._expected(scarcest)

    def _refresh(self) -> None:
        prior = self._prior
        self._rates = [
            (source.trained + source.rate * prior) / (source.entered - source.waiting + prior)
            for source in self.sources
        ]
        self._placed = [
            source.entered if self._borrows else source.trained + source.waiting * rate
            for source, rate in zip(self.sources, self._rates, strict=True)
        ]
        self._total = sum(self._placed)
        trained = sum(source.trained for source in self.sources)
        density = (trained + self._density * prior) / (self.num_rows * self._row_len + prior)
        self._per_row = density * self._row_len
        possible = min(self._expected(source) / source.goal for source in self.sources)
        # A partly filled row is dropped, so the shares should hold at the end of the last full row.
        rows = max(1, int(possible / self._per_row))
        self.target = min(rows, self._most_rows or rows) * self._per_row
        self._is_stale = False

    def _expected(self, source: SourceShare) -> float:
        """Estimate the trained tokens of a source when it runs out."""
        placed = source.trained + source.waiting * source.rate
        return placed + source.left * (placed + source.rate * self._prior) / (source.drawn + self._prior)
