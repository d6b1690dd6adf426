"""Documents of a tokenized corpus, and records of an input file, read like a recipe's source."""

from collections import Counter
from itertools import islice
from typing import Protocol

import numpy as np
import pyarrow as pa

from unspool.core.errors import ConfigError, DataError
from unspool.data.corpus.store import CorpusReader
from unspool.data.sources.base import Bad, Document, Filtered, read_items
from unspool.data.sources.base import Item as Record
from unspool.data.sources.registry import source_for_file
from unspool.inspection.detokenize import FoundTokenizer
from unspool.inspection.items import (
    Item,
    Part,
    Show,
    Span,
    Summary,
    check_index,
    choose_indices,
    control_roles,
    histogram_lines,
    manifest_facts,
    spans_of,
    text_spans,
)
from unspool.inspection.run_paths import DataPath, check_files


class Corpus:
    """A `Collection` of tokenized documents."""

    def __init__(self, place: DataPath, found_tokenizer: FoundTokenizer) -> None:
        self._place = place
        self._tokenizer = found_tokenizer
        check_files(place.files)
        try:
            self._docs = CorpusReader(place.files)
            self._ratios = self._docs.gzip_ratios
        except (KeyError, AttributeError, ValueError, OSError, pa.ArrowException) as error:
            raise DataError(
                f"{place.path}: its Arrow files are not a corpus of unspool; run `unspool tokenize` again."
            ) from error

    def __len__(self) -> int:
        return len(self._docs)

    def summary(self) -> Summary:
        source = self._place.settings.get("source")
        facts = [
            ("documents", f"{len(self):,}"),
            ("tokens", f"{self._docs.num_tokens:,}"),
            ("source", _describe(source) if isinstance(source, dict) else ""),
            ("tokenizer", self._tokenizer.name or "not found"),
        ]
        known = {name for name, _ in facts}
        counts = {name: value for name, value in self._place.counts.items() if name not in known}
        return Summary(
            path=self._place.path,
            kind="documents",
            headline=f"{len(self):,} {'document' if len(self) == 1 else 'documents'}, {self._docs.num_tokens:,} tokens",
            facts=[(name, value) for name, value in [*facts, *manifest_facts(counts)] if value],
            lengths=self._docs.lens,
            notes=[*self._tokenizer.notes, *self._place.notes],
            lines=[] if self._ratios is None else histogram_lines(self._ratios, "gzip ratio"),
        )

    def pick(self, *, indices: list[int], count: int, seed: int, source: str | None) -> list[int]:
        if source is not None:
            raise ConfigError("`source` is for datasets, which can mix sources; a corpus has one source.")
        for index in indices:
            check_index(index, len(self), "document")
        return indices or choose_indices(range(len(self)), count, seed)

    def item(self, index: int, show: Show) -> Item:
        tokens = self._docs[index]
        decoder = self._tokenizer.decoder
        mask = self._docs.loss_mask(index)
        # Without a mask, packing decides later which tokens are trained on.
        asked = np.ones(len(tokens), dtype=np.bool_) if mask is None else mask
        # Conversations end with their template, not with EOS.
        eos = None if decoder is None or mask is not None else decoder.eos
        unended = eos is not None and len(tokens) and int(tokens[-1]) != eos
        name = self._docs.id(index)
        ratio = [] if self._ratios is None else [f"gzip ratio {self._ratios[index]:.2f}"]
        return Item(
            index=index,
            name=f"document {index}",
            among=f"of 0–{len(self) - 1}",
            facts=[name, f"{len(tokens):,} tokens", *ratio, "no EOS at its end" if unended else "", _loss(mask)],
            parts=[
                Part(
                    title=name,
                    length=len(tokens),
                    spans=spans_of(tokens, control_roles(tokens, decoder), asked, decoder, show),
                    group=index,
                    trained=None if mask is None else int(mask.sum()),
                )
            ],
        )


def _loss(mask: np.ndarray | None) -> str:
    return "" if mask is None else f"loss on {100 * float(mask.mean()):.1f}% of tokens"


def _describe(source: dict[str, object]) -> str:
    return " ".join(str(source[key]) for key in ("kind", "path", "prose") if source.get(key))


class Records:
    """A `Collection` of the records of one file."""

    def __init__(self, place: DataPath, found_tokenizer: FoundTokenizer, *, field: str | None, seed: int) -> None:
        self._path, self._files = place.path, place.files
        self._tokenizer = found_tokenizer
        self._seed = seed
        self._source = source_for_file(self._files[0], field)
        self._read: list[Record] = []
        self._ended = False

    def summary(self) -> Summary:
        count = len(self._read)
        headline = f"{count:,} records" if self._ended else f"the first {count:,} records"
        if count == 1:
            headline = "1 record" if self._ended else "the first record"
        return Summary(
            path=self._path,
            kind="records",
            headline=headline,
            facts=[
                ("file", f"{sum(file.stat().st_size for file in self._files):,} bytes"),
                ("read as", f"kind: {self._source.kind}"),
                ("tokenizer", self._tokenizer.name or "none; give one to see tokens"),
            ],
            notes=self._tokenizer.notes,
        )

    def pick(self, *, indices: list[int], count: int, seed: int, source: str | None) -> list[int]:
        if source is not None:
            raise ConfigError("`source` is for datasets, which can mix sources; this is one input file.")
        if min(indices, default=0) < 0:
            raise ConfigError(f"`index={min(indices)}`: records are numbered from 0.")
        self._load(max(indices, default=count - 1) + 1)
        for index in indices:
            if index >= len(self._read):
                raise ConfigError(
                    f"`index={index}`: {self._path} has only {len(self._read):,} records, numbered from 0."
                )
        return indices or list(range(min(count, len(self._read))))

    def item(self, index: int, show: Show) -> Item:
        facts, parts = self._contents(index, self._read[index], show)
        return Item(index=index, name=f"record {index}", among="", facts=facts, parts=parts)

    def _contents(self, index: int, record: Record, show: Show) -> tuple[list[str], list[Part]]:
        if isinstance(record, Bad):
            return [record.record, "cannot be read"], [_problem(f"{record.reason}: {record.detail}")]
        if isinstance(record, Document) and record.messages:
            return self._conversation(record, show)
        if isinstance(record, Filtered) or not (record.text.strip() or record.tokens is not None):
            return [record.id, "skipped"], [_problem(record.reason if isinstance(record, Filtered) else "empty")]
        return self._document(index, record, show)

    def _conversation(self, record: Document, show: Show) -> tuple[list[str], list[Part]]:
        """Show a conversation turn by turn, without the chat template, which a corpus applies."""
        parts = [
            Part(
                title=turn.role,
                length=len(turn.content),
                unit="characters",
                spans=text_spans(turn.content, show),
                group=number,
            )
            for number, turn in enumerate(record.messages)
        ]
        return [record.id, f"{len(parts)} turns", f"{sum(part.length for part in parts):,} characters"], parts

    def _document(self, index: int, record: Document, show: Show) -> tuple[list[str], list[Part]]:
        left_out = Counter(reason for _, reason in record.left_out)
        facts = [record.id, f"{len(record.text):,} characters" if record.text else ""]
        if left_out:
            facts.append(f"skipped: {', '.join(f'{count} {reason}' for reason, count in left_out.items())}")
        tokens, decoder = record.tokens, self._tokenizer.decoder
        if tokens is None and self._tokenizer.encoder is not None:
            (tokens,) = self._tokenizer.encoder.encode([record.text])
        if tokens is None:
            spans = text_spans(record.text, show)
            return facts, [Part(title=record.id, length=len(record.text), unit="characters", spans=spans, group=index)]
        has_loss = np.ones(len(tokens), dtype=np.bool_)
        spans = spans_of(tokens, control_roles(tokens, decoder), has_loss, decoder, show)
        part = Part(title=record.id, length=len(tokens), spans=spans, group=index)
        return [*facts, f"{len(tokens):,} tokens"], [part]

    def _load(self, count: int) -> None:
        self._read = list(islice(read_items(self._source, self._files, self._seed), count))
        self._ended = len(self._read) < count
        if not self._read:
            raise ConfigError(
                f"{self._path}: no records found for kind {self._source.kind}; check the file and `text`."
            )


def _problem(text: str) -> Part:
    return Part(title="", length=0, spans=[Span(text, "bad")], group=-1)


class Collection(Protocol):
    """Interface of datasets, corpora and input files for terminal, page and JSON."""

    def summary(self) -> Summary: ...

    def pick(self, *, indices: list[int], count: int, seed: int, source: str | None) -> list[int]:
        """Choose items to show: the given indices, or `count` items; ConfigError if there are none."""
        ...

    def item(self, index: int, show: Show) -> Item: ...
