"""Rows, opened for looking: what they are as a whole, and each as its documents with their borders.

Promise: a document is called cut only where that is certain: at its end if no EOS is there, at its start if the
tokenizer begins documents with BOS and it is missing, or if rows were filled in order and the row before ends
within a document.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from unspool.core.config import nearest
from unspool.core.errors import ConfigError, DataError
from unspool.data.packing.config import STRATEGIES
from unspool.data.packing.row import IGNORE, Row, labels
from unspool.data.packing.store import RowSet
from unspool.inspection.dataset_summary import Summary, manifest_facts, show_length, strategies
from unspool.inspection.detokenize import Reading
from unspool.inspection.items import Item, Part, Show, check_index, choose, control_roles, spans_of
from unspool.inspection.run_paths import Place, check_files
from unspool.inspection.utk_chunks import (
    Piece,
    documents_of,
    has_knots,
    known_facts,
    mark_roles,
    position_fact,
    read_facts,
    read_pieces,
)

# Reading the documents' lengths of more rows would take longer than looking is worth.
MOST_SCANNED = 20_000


def is_tangled(place: Place) -> bool:
    """Whether rows hold marks, which only their tokenizer tells from text."""
    settings = place.settings.get("dataset")
    return bool((isinstance(settings, dict) and settings.get("utk")) or place.counts.get("added_tokens"))


class Rows:
    """A `Collection` of rows."""

    def __init__(self, place: Place, reading: Reading) -> None:
        self._place = place
        self._decoder = reading.decoder
        self._reading = reading
        settings = place.settings.get("dataset")
        self._settings = settings if isinstance(settings, dict) else {}
        check_files(place.files)
        try:
            self._rows = RowSet(place.files)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, OSError, pa.ArrowException) as error:
            raise DataError(f"{place.path}: its Arrow files hold no rows of unspool; build them again.") from error
        self._tangled = is_tangled(place)
        # Conversations end as their template ends them, not with EOS.
        self._is_chat = "trained_tokens" in place.counts
        self._pieced = self._tangled or any(
            self._settings.get(name) for name, strategy in STRATEGIES.items() if strategy.moves_chunks
        )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def _part(self) -> str:
        return "piece" if self._pieced else "document"

    @property
    def path(self) -> Path:
        return self._place.path

    @property
    def row_len(self) -> int:
        return self._rows.row_len

    def row(self, index: int) -> Row:
        try:
            row = self._rows[index]
        except (ValueError, IndexError, OSError, pa.ArrowException) as error:
            raise DataError(f"{self._place.path}, row {index}: unreadable ({error}); build the rows again.") from error
        if row.doc_lens.min(initial=1) < 1 or int(row.doc_lens.sum(dtype=np.int64)) != len(row.tokens):
            raise DataError(
                f"{self._place.path}, row {index}: its documents do not add up to it; build the rows again."
            )
        return row

    def summary(self) -> Summary:
        tokens = len(self) * self._rows.row_len
        facts = [
            ("rows", f"{len(self):,}"),
            ("length", show_length(self._rows.row_len)),
            ("tokens", f"{tokens:,}"),
            ("sources", ", ".join(f"{name} (in {count:,} rows)" for name, count in self._sources.items())),
            ("attention", self.row(0).attention if len(self) else ""),
            ("packing", ", ".join(strategies(self._settings))),
            ("tokenizer", self._reading.name or "not found"),
        ]
        known = {"added_tokens", *(name for name, _ in facts)}
        counts = {name: value for name, value in self._place.counts.items() if name not in known}
        return Summary(
            path=self._place.path,
            kind="rows",
            headline=f"{len(self):,} {'row' if len(self) == 1 else 'rows'} of {show_length(self._rows.row_len)}",
            facts=[(name, value) for name, value in [*facts, *manifest_facts(counts)] if value],
            part=self._part,
            lengths=self._scan[0],
            sample="" if len(self._scanned) == len(self) else f"in {len(self._scanned):,} rows, evenly spaced",
            notes=[*self._reading.notes, *_unfinished(self._place)],
        )

    def pick(self, *, indices: list[int], count: int, seed: int, source: str | None) -> list[int]:
        for index in indices:
            check_index(index, len(self), "row")
        if source is None:
            return indices or choose(range(len(self)), count, seed)
        for index in indices:
            if source not in self.row(index).source.split("+"):
                raise ConfigError(f"row {index} holds nothing from {source!r}, but {self.row(index).source}.")
        if indices:
            return indices
        holding = [index for index in range(len(self)) if source in self.row(index).source.split("+")]
        if not holding:
            guess = nearest(source, self._sources)
            hint = f"did you mean {guess!r}?" if guess else f"there are {', '.join(self._sources)}."
            raise ConfigError(f"--source {source!r}: no row holds anything from it; {hint}")
        return choose(holding, count, seed)

    def item(self, index: int, show: Show) -> Item:
        row = self.row(index)
        asked = asked_for(row)
        padding = self._padding(row)
        count = len(row.doc_lens) - bool(padding)
        held = f"{count:,} {self._part if count == 1 else self._part + 's'}"
        if row.chunk_ids is not None:
            num_docs = len(np.unique(row.chunk_ids[:count]))
            held += f" of {num_docs:,} {'document' if num_docs == 1 else 'documents'}"
        facts = [
            f"{len(row.tokens):,} tokens",
            f"from {row.source}",
            f"attention: {row.attention}",
            held,
            "" if row.positions is None else f"positions up to {int(row.positions.max()):,}",
            f"{padding:,} tokens of padding" if padding else "",
            f"loss on {100 * float(asked.mean()):.1f}% of tokens",
        ]
        return Item(
            index=index,
            name=f"row {index}",
            among=f"of 0–{len(self) - 1}",
            facts=facts,
            parts=self._parts(row, index, asked, show),
        )

    def _parts(self, row: Row, index: int, asked: np.ndarray, show: Show) -> list[Part]:
        roles = control_roles(row.tokens, self._decoder)
        marks = None
        if self._decoder is not None and self.has_marks:
            roles = mark_roles(row.tokens, roles, self._decoder)
            marks = read_pieces(row.tokens, row.doc_lens, self._decoder)
        groups, facts = self._documents(row, index, marks)
        stops = np.cumsum(row.doc_lens).tolist()
        starts = [0, *stops[:-1]]
        if row.positions is not None:
            for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                facts[number].append(position_fact(row.positions[start:stop]))
        padding = self._padding(row)
        count = len(starts) - bool(padding)
        held = len(row.tokens) - padding
        # Tangled rows leave out their marks, which look different anyway.
        is_masked = row.loss_mask is not None and not self._tangled and not bool(row.loss_mask[:held].all())
        parts = [
            Part(
                title=f"{self._part} {number + 1} of {count}",
                length=stop - start,
                facts=[fact for fact in facts[number] if fact],
                spans=spans_of(row.tokens[start:stop], roles[start:stop], asked[start:stop], self._decoder, show),
                group=groups[number],
                start=start,
                trained=int(asked[start:stop].sum()) if is_masked else None,
            )
            for number, (start, stop) in enumerate(zip(starts[:count], stops, strict=False))
        ]
        if count < len(starts):
            parts.append(Part(title="padding", length=stops[-1] - starts[-1], start=starts[-1], group=-1))
        return parts

    def _documents(self, row: Row, index: int, marks: list[Piece] | None) -> tuple[list[int], list[list[str]]]:
        """The document of each part of a row, numbered from 0, and what is known of the part."""
        if row.chunk_ids is not None:
            groups = documents_of(row.chunk_ids)
            return groups, known_facts(groups, marks, ordered=self._keeps_order)
        if marks is not None:
            return [mark.group for mark in marks], read_facts(marks)
        numbers = range(len(row.doc_lens))
        return list(numbers), [self._cuts(row, index, number) for number in numbers]

    @property
    def has_marks(self) -> bool:
        """Whether rows hold knots and labels that can be told from text."""
        return self._tangled and has_knots(self._decoder)

    @property
    def has_unknown_marks(self) -> bool:
        return self._tangled and not self.has_marks

    @property
    def has_pieces(self) -> bool:
        """Whether a document may be in several pieces of one row."""
        return self._pieced

    def text_mask(self, row: Row) -> np.ndarray | None:
        """bool[L]: tokens of documents, as opposed to marks and padding; None means all of them."""
        if self._decoder is not None and self.has_marks:
            plain = np.zeros(len(row.tokens), dtype=np.uint8)
            is_text: np.ndarray = mark_roles(row.tokens, plain, self._decoder) == 0
            return is_text
        padding = self._padding(row)
        return np.arange(len(row.tokens)) < len(row.tokens) - padding if padding else None

    @property
    def _keeps_order(self) -> bool:
        """Whether pieces of one document stand in its order; negatives come in the order of their likeness."""
        tangle = self._settings.get("utk")
        return bool(self._settings.get("cip") or (isinstance(tangle, dict) and tangle.get("preserve_order")))

    def _padding(self, row: Row) -> int:
        """Tokens that only fill the row up: `fit` puts them last, as a document that nothing asks for."""
        if self._settings.get("packing") != "best_fit" or row.loss_mask is None:
            return 0
        length = int(row.doc_lens[-1])
        if self._is_chat and (row.tokens[-length:] != row.tokens[-1]).any():
            return 0  # the last words of a conversation may go without loss too; padding is one token again and again
        return 0 if row.loss_mask[-length:].any() else length

    def _cuts(self, row: Row, index: int, number: int) -> list[str]:
        """Where a document of a row that is not tangled goes on outside of it."""
        decoder = self._decoder
        if decoder is None or decoder.eos is None or self._pieced or self._is_chat:
            return []
        stops = np.cumsum(row.doc_lens)
        start, stop = int(stops[number] - row.doc_lens[number]), int(stops[number])
        cuts = []
        if decoder.bos is not None:
            cut_at_start = int(row.tokens[start]) != decoder.bos
        else:
            # Only `concat` continues a document in the next row, and only at its start.
            in_order = self._settings.get("packing") == "concat" and number == 0 and index > 0
            cut_at_start = in_order and int(self.row(index - 1).tokens[-1]) != decoder.eos
        if cut_at_start:
            cuts.append("cut at the start")
        if int(row.tokens[stop - 1]) != decoder.eos:
            cuts.append("cut at the end")
        return cuts

    @cached_property
    def _scanned(self) -> np.ndarray:
        step = -(-len(self) // MOST_SCANNED) if len(self) else 1
        return np.arange(0, len(self), step)

    @cached_property
    def _scan(self) -> tuple[np.ndarray, dict[str, int]]:
        """The lengths of documents, and how many rows hold each source."""
        lengths: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
        sources: dict[str, int] = {}
        for index in self._scanned.tolist():
            row = self.row(index)
            lens = row.doc_lens.astype(np.int64)
            lengths.append(lens[:-1] if self._padding(row) else lens)
            for name in row.source.split("+"):
                sources[name] = sources.get(name, 0) + 1
        return np.concatenate(lengths), sources

    @property
    def _sources(self) -> dict[str, int]:
        return self._scan[1]


def asked_for(row: Row) -> np.ndarray:
    """bool[L]: the tokens that training asks for; the first of a document has nothing to be predicted from."""
    asked = np.zeros(len(row.tokens), dtype=np.bool_)
    asked[1:] = labels(row.tokens, row.doc_lens, row.loss_mask)[:-1] != IGNORE
    return asked


def _unfinished(place: Place) -> list[str]:
    return [] if place.manifest else ["There is no manifest.json: unfinished work, or files from elsewhere."]
