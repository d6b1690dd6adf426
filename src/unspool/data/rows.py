"""Build rows: documents of one or more corpora, packed or tangled, as an artefact.

In: corpora, a `RowsConfig`. Out: folder with `rows-00000.arrow` … and a manifest.
Promise: documents are shuffled by the seed, sources follow their shares of tokens, and the counts add
up: tokens in the corpora + tokens added = tokens in rows + tokens dropped, by reason.
Memory holds the order of the documents and a batch of rows, never the corpus.
Elsewhere: filling rows (pack.py, tangle.py), the order of training (mix.py).

Why tokens are dropped: `unread` documents never drawn (`limit`, or a source of a mix ran out), `last_row` a
row that was never filled, `limit` the rest of a document when the limit was reached, `cut` the rest of a
document under `intact`, `short` and `tail` documents below, and rests above, whole rows under `whole`.

What the counts say, besides rows, tokens, documents (drawn) and drops: `padding` tokens under `fit`, `fill_rate` the
share of rows that is not padding, `truncated` documents that are not in one row as a whole and `truncation_rate`
their share of the documents in rows, `lengths` of the documents as rows hold them, and all this for each of the
`sources`. Tangling takes documents apart on purpose, so there `lengths` are of pieces and nothing is `truncated`.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from unspool.base.artefact import digest, publish, read_manifest, stale_reason
from unspool.base.errors import DataError
from unspool.base.progress import progress_bar, say
from unspool.base.rng import rng_for
from unspool.base.sizes import format_count, format_size
from unspool.data.config import RowsConfig
from unspool.data.lengths import Lengths, add_up
from unspool.data.pack import PACKERS, Doc, Packer, Tally, interleave, iter_chunks
from unspool.data.store import CorpusReader, RowWriter, open_corpus
from unspool.data.tangle import KNOTS, build_tangler
from unspool.data.tokens import build_encoder

KIND = "rows"


def build_rows(
    config: RowsConfig,
    corpora: Mapping[str, Path],
    out_dir: Path,
    *,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
) -> dict[str, Any]:
    """Make `out_dir` hold rows as `config` says, unless it does already; returns its manifest's counts.

    `corpora` maps source names to corpus folders; `tokenizer` is the one they were made with, unchanged.
    """
    name = out_dir.name
    inputs = {f"corpus {source}": _corpus_digest(corpora[source]) for source in config.shares}
    if config.tangle:
        inputs["tokenizer"] = build_encoder(tokenizer).digest
    settings: dict[str, Any] = {"rows": config.model_dump(mode="json", by_alias=True), "name": name, "seed": seed}
    # No label asks for it and no document sees it, so without EOS any token will do.
    pad = tokenizer.eos_token_id or 0
    if config.pack == "fit":
        settings["padding"] = pad
    reason = stale_reason(out_dir, kind=KIND, inputs=inputs, settings=settings)
    if reason is None:
        say(f"rows {name}: up to date")
        manifest = read_manifest(out_dir)
        assert manifest is not None
        counts: dict[str, Any] = manifest["counts"]
        return counts
    say(f"rows {name}: packing {format_size(config.length)} rows ({reason})")

    readers = {source: open_corpus(corpora[source]) for source in config.shares}
    stream = _Stream(config, readers, rng_for(seed, "rows", name))
    with publish(out_dir, kind=KIND, inputs=inputs, settings=settings) as draft:
        if config.tangle:
            # A copy: the caller's tokenizer belongs to a model that may never see a tangled row.
            tangler = build_tangler(config, copy.deepcopy(tokenizer), rng_for(seed, "tangle", name))
            draft.counts = _write_rows(config, stream, tangler.pack, draft.folder)
            draft.counts["added_tokens"] = list(KNOTS)
        else:
            draft.counts = _write_rows(config, stream, partial(PACKERS[config.pack], pad=pad), draft.folder)
        if not draft.counts["rows"]:
            raise DataError(f"rows {name}: {_too_little(config, readers)}")
    was_limited = config.limit is not None and draft.counts["tokens"] >= config.limit
    if stream.ran_out and not was_limited and "unread" in draft.counts["dropped"]:
        unread = format_count(draft.counts["dropped"]["unread"])
        say(f"rows {name}: source {stream.ran_out} ran out; {unread} tokens stay unused to keep the shares")
    return draft.counts


class _Stream:
    """The documents of all sources in packing order, and a count of those drawn."""

    def __init__(self, config: RowsConfig, readers: Mapping[str, CorpusReader], rng: np.random.Generator) -> None:
        self.readers = readers
        self._shares = list(config.shares.values())
        self._cuts = config.tangle is not None
        longest = config.tangle.longest if config.tangle else None
        self._spans = [rng.permutation(_spans(reader.lens, longest)) for reader in readers.values()]
        # Under `whole` a document counts towards its source's share only with the rows it gives.
        unit = config.length if config.pack == "whole" else 1
        self._useful = [(spans[:, 2] - spans[:, 1]) // unit * unit for spans in self._spans]
        self.num_tokens = sum(reader.num_tokens for reader in readers.values())
        self.tokens_read = [0] * len(readers)  # by source
        self.documents_read = [0] * len(readers)
        self.ran_out: str | None = None  # the source that ended the stream

    def __iter__(self) -> Iterator[Doc]:
        names = list(self.readers)
        readers = list(self.readers.values())
        spans = [iter_chunks(each) for each in self._spans]
        for source in interleave(self._useful, self._shares):
            doc, start, stop = next(spans[source])
            self.documents_read[source] += 1
            self.tokens_read[source] += stop - start
            # Tangling cuts documents further, so it gets arrays; packing slices each piece once.
            stored: Any = readers[source].stored(doc)
            yield Doc(stored[start:stop] if self._cuts else stored, names[source])
        left = [len(each) - count for each, count in zip(self._spans, self.documents_read, strict=True)]
        self.ran_out = names[left.index(0)]


def _spans(lens: np.ndarray, longest: int | None) -> np.ndarray:
    """(document, start, stop) of all documents, those above `longest` in several spans."""
    longest = longest or int(lens.max(initial=1))
    counts = -(-lens // longest)
    docs = np.repeat(np.arange(len(lens)), counts)
    starts = (np.arange(len(docs)) - np.repeat(np.cumsum(counts) - counts, counts)) * longest
    return np.stack([docs, starts, np.minimum(starts + longest, lens[docs])], axis=1)


def _write_rows(config: RowsConfig, stream: _Stream, packer: Packer, folder: Path) -> dict[str, Any]:
    most = None if config.limit is None else -(-config.limit // config.length)
    tally = Tally()
    num_rows = 0
    masked = config.tangle is not None or config.pack == "fit"
    docs: Iterable[Doc] = stream
    if most is not None and config.pack == "fit":
        # With more to choose from the shares would hold over documents that the limit then leaves out.
        docs = _until(stream, most * config.length)
    # The packer is closed before the counts are taken: stopped by the limit, it then counts what it still holds.
    pieces = Lengths()
    with (
        RowWriter(folder, row_len=config.length, masked=masked) as writer,
        closing(packer(docs, config.length, tally)) as rows,
        progress_bar("rows", most) as advance,
    ):
        for row in islice(rows, most):
            writer.append(row)
            num_rows += 1
            if config.tangle:
                pieces.add(row.doc_lens)
            advance(1, "")
    for (name, reader), tokens_read in zip(stream.readers.items(), stream.tokens_read, strict=True):
        tally.drop("unread", name, reader.num_tokens - tokens_read)
    return _counts(config, stream, tally, num_rows, pieces)


def _until(docs: Iterable[Doc], tokens: int) -> Iterator[Doc]:
    for doc in docs:
        yield doc
        tokens -= len(doc.tokens)
        if tokens <= 0:
            return


def _counts(config: RowsConfig, stream: _Stream, tally: Tally, num_rows: int, pieces: Lengths) -> dict[str, Any]:
    row_tokens = num_rows * config.length
    assert stream.num_tokens + tally.added == row_tokens + tally.dropped.total(), tally
    sources = {name: _source_counts(reader, tally, name) for name, reader in stream.readers.items()}
    counts = {
        "rows": num_rows,
        "tokens": row_tokens,
        "documents": sum(stream.documents_read) - tally.given_back,
        "tokens_in": stream.num_tokens,
        "tokens_added": tally.added,
        "dropped": _by_reason(tally.dropped),
        "padding": tally.padding,
        "fill_rate": 1 - tally.padding / row_tokens if row_tokens else None,
        "sources": sources,
    }
    if config.tangle:
        return counts | {"lengths": pieces.histogram()}
    in_rows = sum(entry.documents for entry in tally.sources.values())
    truncated = sum(entry.truncated for entry in tally.sources.values())
    assert sum(entry["tokens"] for entry in sources.values()) + tally.padding == row_tokens
    for name, entry in tally.sources.items():
        sources[name] |= {
            "documents": entry.documents,
            "truncated": entry.truncated,
            "lengths": entry.lengths.histogram(),
        }
        assert entry.lengths.num_tokens == sources[name]["tokens"], name
    return counts | {
        "truncated": truncated,
        "truncation_rate": truncated / in_rows if in_rows else None,
        "lengths": add_up(entry.lengths.histogram() for entry in tally.sources.values()),
    }


def _source_counts(reader: CorpusReader, tally: Tally, name: str) -> dict[str, Any]:
    dropped = tally.source(name).dropped
    return {
        "documents_in": len(reader),
        "tokens_in": reader.num_tokens,
        "tokens": reader.num_tokens - dropped.total(),
        "dropped": _by_reason(dropped),
    }


def _by_reason(dropped: Counter[str]) -> dict[str, int]:
    return {reason: count for reason, count in sorted(dropped.items()) if count}


def _corpus_digest(folder: Path) -> str:
    return digest((read_manifest(folder) or {}).get("files"))


def _too_little(config: RowsConfig, readers: Mapping[str, CorpusReader]) -> str:
    length = format_size(config.length)
    if config.pack == "whole":
        longest = {source: int(reader.lens.max(initial=0)) for source, reader in readers.items()}
        source = min(longest, key=lambda source: longest[source])
        return (
            f"pack: whole needs documents of at least {length} tokens, and the longest of source {source} has "
            f"{longest[source]}; use pack: concat or a shorter length."
        )
    tokens = format_count(sum(reader.num_tokens for reader in readers.values()))
    return f"{tokens} tokens do not fill one row of {length}; add text or use a shorter length."
