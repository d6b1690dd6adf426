"""Build rows: documents of one or more corpora, packed or tangled, as an artefact.

In: corpora, a `RowsConfig`. Out: folder with `rows-00000.arrow` … and a manifest.
Promise: documents are shuffled by the seed, sources follow their shares of tokens, and the counts add
up: tokens in the corpora + tokens added = tokens in rows + tokens dropped, by reason.
Memory holds the order of the documents and a batch of rows, never the corpus.
Elsewhere: filling rows (pack.py, tangle.py), the order of training (mix.py).

Why tokens are dropped: `unread` documents never drawn (`limit`, or a source of a mix ran out), `last_row` a
row that was never filled, `limit` the rest of a document when the limit was reached, `cut` the rest of a
document under `intact`, `short` and `tail` documents below, and rests above, whole rows under `whole`.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import closing
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
from unspool.data.pack import PACKERS, Doc, Packer, Tally, interleave
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
    settings = {"rows": config.model_dump(mode="json", by_alias=True), "name": name, "seed": seed}
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
            draft.counts = _write_rows(config, stream, PACKERS[config.pack], draft.folder)
        if not draft.counts["rows"]:
            raise DataError(f"rows {name}: {_too_little(config, readers)}")
    if stream.ran_out and "unread" in draft.counts["dropped"]:
        unread = format_count(draft.counts["dropped"]["unread"])
        say(f"rows {name}: source {stream.ran_out} ran out; {unread} tokens stay unused to keep the shares")
    return draft.counts


class _Stream:
    """The documents of all sources in packing order, and a count of those drawn."""

    def __init__(self, config: RowsConfig, readers: Mapping[str, CorpusReader], rng: np.random.Generator) -> None:
        self._readers = readers
        self._shares = list(config.shares.values())
        longest = config.tangle.longest if config.tangle else None
        self._spans = [rng.permutation(_spans(reader.lens, longest)) for reader in readers.values()]
        # Under `whole` a document counts towards its source's share only with the rows it gives.
        unit = config.length if config.pack == "whole" else 1
        self._useful = [(spans[:, 2] - spans[:, 1]) // unit * unit for spans in self._spans]
        self.num_tokens = sum(reader.num_tokens for reader in readers.values())
        self.tokens_read = 0
        self.documents_read = 0
        self.ran_out: str | None = None  # the source that ended the stream

    def __iter__(self) -> Iterator[Doc]:
        names = list(self._readers)
        used = [0] * len(names)
        for source in interleave(self._useful, self._shares):
            doc, start, stop = self._spans[source][used[source]].tolist()
            used[source] += 1
            self.documents_read += 1
            self.tokens_read += stop - start
            yield Doc(self._readers[names[source]][doc][start:stop], names[source])
        left = [len(spans) - count for spans, count in zip(self._spans, used, strict=True)]
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
    # The packer is closed before the counts are taken: stopped by the limit, it then counts what it still holds.
    with (
        RowWriter(folder, row_len=config.length, masked=config.tangle is not None) as writer,
        closing(packer(stream, config.length, tally)) as rows,
        progress_bar("rows", most) as advance,
    ):
        for row in islice(rows, most):
            writer.append(row)
            num_rows += 1
            advance(1, "")
    tally.dropped["unread"] = stream.num_tokens - stream.tokens_read
    row_tokens = num_rows * config.length
    assert stream.num_tokens + tally.added == row_tokens + tally.dropped.total(), tally
    return {
        "rows": num_rows,
        "tokens": row_tokens,
        "documents": stream.documents_read,
        "tokens_in": stream.num_tokens,
        "tokens_added": tally.added,
        "dropped": {reason: count for reason, count in sorted(tally.dropped.items()) if count},
    }


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
