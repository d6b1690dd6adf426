"""Packed rows of a dataset, each as its documents with their boundaries.

A document is called cut only if that is certain. At its end: EOS is missing. At its start: the BOS that this tokenizer
writes is missing, or rows were filled in order and the previous row ends inside a document.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from unspool.core.config import nearest
from unspool.core.errors import ConfigError, DataError
from unspool.core.sizes import format_size
from unspool.data.packing.describe import (
    CONTINUING_MODE,
    PADDING_MODE,
    describe_shares,
    packing_mode,
    recorded_strategies,
    summarize_packing,
)
from unspool.data.packing.row import IGNORE, Row, labels
from unspool.data.packing.store import RowSet
from unspool.inspection.detokenize import FoundTokenizer
from unspool.inspection.items import (
    Item,
    Part,
    Show,
    Summary,
    check_index,
    choose_indices,
    control_roles,
    manifest_facts,
    spans_of,
)
from unspool.inspection.run_paths import DataPath, check_files
from unspool.inspection.utk_chunks import (
    Piece,
    documents_of,
    known_facts,
    knows_special_tokens,
    mark_utk_roles,
    position_fact,
    read_facts,
    read_pieces,
)

# Reading the document lengths of more rows would take too long.
MAX_SCANNED = 20_000


def has_special_tokens(place: DataPath) -> bool:
    """Return whether rows hold UtK's special tokens, which only the right tokenizer distinguishes from text."""
    settings = place.settings.get("dataset")
    strategies = recorded_strategies(settings) if isinstance(settings, dict) else []
    return any(strategy.uses_tokenizer for strategy in strategies) or bool(place.counts.get("added_tokens"))


class Rows:
    """A `Collection` of rows."""

    def __init__(self, place: DataPath, found_tokenizer: FoundTokenizer) -> None:
        self._place = place
        self._decoder = found_tokenizer.decoder
        self._tokenizer = found_tokenizer
        settings = place.settings.get("dataset")
        self._settings = settings if isinstance(settings, dict) else {}
        check_files(place.files)
        try:
            self._rows = RowSet(place.files)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, OSError, pa.ArrowException) as error:
            raise DataError(
                f"{place.path}: its Arrow files are not a dataset of unspool; run `unspool pack` again."
            ) from error
        self._has_utk = has_special_tokens(place)
        # Conversations end with their template, not with EOS.
        self._is_chat = "trained_tokens" in place.counts
        self._chunked = [strategy for strategy in recorded_strategies(self._settings) if strategy.moves_chunks]
        self._pieced = self._has_utk or bool(self._chunked)

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
            raise DataError(
                f"{self._place.path}, row {index}: unreadable ({error}); run `unspool pack` again."
            ) from error
        if row.doc_lens.min(initial=1) < 1 or int(row.doc_lens.sum(dtype=np.int64)) != len(row.tokens):
            raise DataError(
                f"{self.path}, row {index}: document lengths do not add up to the row length; run `unspool pack` again."
            )
        return row

    def summary(self) -> Summary:
        tokens = len(self) * self._rows.row_len
        facts = [
            ("rows", f"{len(self):,}"),
            ("length", f"{format_size(self._rows.row_len)} tokens"),
            ("tokens", f"{tokens:,}"),
            ("sources", ", ".join(f"{name} (in {count:,} rows)" for name, count in self._sources.items())),
            ("shares", describe_shares(self._place.counts.get("shares", {}))),
            ("attention", self.row(0).attention if len(self) else ""),
            ("packing", ", ".join(summarize_packing(self._settings))),
            ("tokenizer", self._tokenizer.name or "not found"),
        ]
        known = {"added_tokens", *(name for name, _ in facts)}
        counts = {name: value for name, value in self._place.counts.items() if name not in known}
        return Summary(
            path=self._place.path,
            kind="rows",
            headline=f"{len(self):,} {'row' if len(self) == 1 else 'rows'} of {format_size(self._rows.row_len)} tokens",
            facts=[(name, value) for name, value in [*facts, *manifest_facts(counts)] if value],
            part="document part" if self._are_cut else self._part,
            lengths=self._scan[0],
            sample="" if self._is_scanned else f"in {len(self._scanned):,} rows, evenly spaced",
            num_documents=self._place.counts.get("documents") if self._are_cut and self._is_scanned else None,
            notes=[*self._tokenizer.notes, *self._place.notes],
        )

    def pick(self, *, indices: list[int], count: int, seed: int, source: str | None) -> list[int]:
        for index in indices:
            check_index(index, len(self), "row")
        if source is None:
            return indices or choose_indices(range(len(self)), count, seed)
        for index in indices:
            if source not in self.row(index).source.split("+"):
                raise ConfigError(f"row {index} contains nothing from {source!r}, only {self.row(index).source}.")
        if indices:
            return indices
        holding = [index for index in range(len(self)) if source in self.row(index).source.split("+")]
        if not holding:
            guess = nearest(source, self._sources)
            hint = f"did you mean {guess!r}?" if guess else f"there are {', '.join(self._sources)}."
            raise ConfigError(f"`source` {source!r}: no row contains it; {hint}")
        return choose_indices(holding, count, seed)

    def item(self, index: int, show: Show) -> Item:
        row = self.row(index)
        loss = has_loss(row)
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
            f"loss on {100 * float(loss.mean()):.1f}% of tokens",
        ]
        return Item(
            index=index,
            name=f"row {index}",
            among=f"of 0–{len(self) - 1}",
            facts=facts,
            parts=self._parts(row, index, loss, show),
        )

    def _parts(self, row: Row, index: int, loss: np.ndarray, show: Show) -> list[Part]:
        roles = control_roles(row.tokens, self._decoder)
        marks = None
        if self._decoder is not None and self.has_marks:
            roles = mark_utk_roles(row.tokens, roles, self._decoder)
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
        # UtK rows mask their special tokens, which have another style anyway.
        is_masked = row.loss_mask is not None and not self._has_utk and not bool(row.loss_mask[:held].all())
        parts = [
            Part(
                title=f"{self._part} {number + 1} of {count}",
                length=stop - start,
                facts=[fact for fact in facts[number] if fact],
                spans=spans_of(row.tokens[start:stop], roles[start:stop], loss[start:stop], self._decoder, show),
                group=groups[number],
                start=start,
                trained=int(loss[start:stop].sum()) if is_masked else None,
            )
            for number, (start, stop) in enumerate(zip(starts[:count], stops, strict=False))
        ]
        if count < len(starts):
            parts.append(Part(title="padding", length=stops[-1] - starts[-1], start=starts[-1], group=-1))
        return parts

    def _documents(self, row: Row, index: int, marks: list[Piece] | None) -> tuple[list[int], list[list[str]]]:
        """Return the document of each part of a row, numbered from 0, and facts about the part."""
        if row.chunk_ids is not None:
            groups = documents_of(row.chunk_ids)
            return groups, known_facts(
                groups, marks, ordered=any(strategy.keeps_chunk_order for strategy in self._chunked)
            )
        if marks is not None:
            return [mark.group for mark in marks], read_facts(marks)
        numbers = range(len(row.doc_lens))
        return list(numbers), [self._cuts(row, index, number) for number in numbers]

    @property
    def has_marks(self) -> bool:
        """Return whether rows hold special tokens that the tokenizer knows."""
        return self._has_utk and knows_special_tokens(self._decoder)

    @property
    def has_unknown_marks(self) -> bool:
        return self._has_utk and not self.has_marks

    @property
    def has_pieces(self) -> bool:
        """Return whether a document may be split into several pieces of one row."""
        return self._pieced

    def text_mask(self, row: Row) -> np.ndarray | None:
        """Return bool[L]: document tokens, without special tokens and padding; None means all tokens."""
        if self._decoder is not None and self.has_marks:
            plain = np.zeros(len(row.tokens), dtype=np.uint8)
            is_text: np.ndarray = mark_utk_roles(row.tokens, plain, self._decoder) == 0
            return is_text
        padding = self._padding(row)
        return np.arange(len(row.tokens)) < len(row.tokens) - padding if padding else None

    def _padding(self, row: Row) -> int:
        """Count the padding tokens, which best-fit packing puts last as a document without loss."""
        if packing_mode(self._settings) != PADDING_MODE or row.loss_mask is None:
            return 0
        length = int(row.doc_lens[-1])
        if self._is_chat and (row.tokens[-length:] != row.tokens[-1]).any():
            return 0  # the end of a conversation may also be masked, but padding repeats one token
        return 0 if row.loss_mask[-length:].any() else length

    def _cuts(self, row: Row, index: int, number: int) -> list[str]:
        """Describe where a document of a row without strategy continues outside the row."""
        decoder = self._decoder
        if decoder is None or decoder.eos is None or self._pieced or self._is_chat:
            return []
        stops = np.cumsum(row.doc_lens)
        start, stop = int(stops[number] - row.doc_lens[number]), int(stops[number])
        cuts = []
        if decoder.bos is not None:
            cut_at_start = int(row.tokens[start]) != decoder.bos
        else:
            # Only this mode continues a document in the next row, and only at its start.
            in_order = packing_mode(self._settings) == CONTINUING_MODE and number == 0 and index > 0
            cut_at_start = in_order and int(self.row(index - 1).tokens[-1]) != decoder.eos
        if cut_at_start:
            cuts.append("cut at the start")
        if int(row.tokens[stop - 1]) != decoder.eos:
            cuts.append("cut at the end")
        return cuts

    @cached_property
    def _scanned(self) -> np.ndarray:
        step = -(-len(self) // MAX_SCANNED) if len(self) else 1
        return np.arange(0, len(self), step)

    @property
    def _is_scanned(self) -> bool:
        """Return whether the lengths of all rows were read."""
        return len(self._scanned) == len(self)

    @property
    def _are_cut(self) -> bool:
        """Return whether some documents are cut, so that rows hold more parts than there are documents."""
        documents, truncated = (self._place.counts.get(name) for name in ("documents", "truncated"))
        if self._pieced or documents is None:
            return False
        return len(self._scan[0]) != documents if self._is_scanned else truncated != 0

    @cached_property
    def _scan(self) -> tuple[np.ndarray, dict[str, int]]:
        """Return document lengths, and the number of rows that contain each source."""
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


def has_loss(row: Row) -> np.ndarray:
    """Return bool[L]: trained tokens; the first token of a document is never a prediction target."""
    loss = np.zeros(len(row.tokens), dtype=np.bool_)
    loss[1:] = labels(row.tokens, row.doc_lens, row.loss_mask)[:-1] != IGNORE
    return loss
