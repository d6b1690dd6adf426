"""NExtLong: after each chunk of a document, the most similar chunks of other documents.

A row holds one document with its chunks spread out: chunk 1, its negatives, chunk 2, its negatives, …, last chunk, its
negatives. Every token is trained on, and attention covers the whole row. Chunks are equal parts of a document of at
most `chunk` tokens; all documents of all sources are indexed in such chunks. The length of the row determines the
number of negatives, and the last one is cut at the end of the row. Chunks keep their order. No negative comes from the
document itself or is used twice in a row, and nothing is random.

A negative that repeats the row (half of its sampled 8-grams of tokens) is skipped. All chunks of a document that
repeats this one are skipped too, because they would be correct continuations. Documents above `longest` (default: a
quarter of the row) are cut into equal parts with a row each. Under `packing: truncate`, only the first part is used.
Documents of one chunk (`short`), and documents whose row the rest of the corpus cannot fill (`alone`), are dropped.
Both still serve as negatives.

The authors' repository (Gao et al., arXiv 2501.12766) has the function that cuts documents and the name of the
embedding model. It lacks the program that fills rows. The paper states where negatives go (after their chunk), top-k
retrieval and the loss on every token. Our choices: chunks of 512 tokens instead of 2,048 characters of whole lines; as
many negatives as fill the row, spread evenly; BM25 by default instead of embeddings. There are no negatives from the
document or its copies, none twice in a row, and no separators; `longest` a quarter of the row, as the paper uses short
documents.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from unspool.core.errors import DataError
from unspool.core.sizes import Size, format_count
from unspool.data.packing.pack import Doc, RowStream, Tally
from unspool.data.packing.row import Row
from unspool.data.strategies.base import PackingInputs, RowBuilder, StrategyConfig

if TYPE_CHECKING:
    from unspool.data.corpus.store import CorpusReader
    from unspool.data.packing.config import DatasetConfig
    from unspool.data.strategies.retrieval import Embed, Retriever

logger = logging.getLogger(__name__)


class NExtLong(StrategyConfig):
    """NExtLong: after each chunk of a document, the most similar chunks of others.

    Example:
        >>> import unspool
        >>> unspool.NExtLong(chunk="2K").chunk
        2048
    """

    name: ClassVar[str] = "nextlong"
    title: ClassVar[str] = "with hard negatives (NExtLong)"
    moves_chunks: ClassVar[bool] = True
    path_keys: ClassVar[tuple[str, ...]] = ("model",)

    chunk: Size = Field(default=512, description="Longest chunk, in tokens. At most half of `seq_len`.")
    retriever: Literal["bm25", "embeddings"] = Field(
        default="bm25",
        description="How similar chunks are found: `bm25` compares rare words, `embeddings` compares vectors of "
        "`model`.",
    )
    model: str | None = Field(
        default=None,
        description="Folder or Hub id of the model that computes embeddings. Required with `retriever: embeddings`.",
    )
    longest: Size | None = Field(
        default=None,
        description="Documents longer than this are first cut into several. Default: a quarter of `seq_len`.",
    )

    def check(self, dataset: "DatasetConfig") -> None:
        half = dataset.seq_len // 2
        if dataset.seq_len < 2 * self.chunk:
            raise ValueError(f"nextlong.chunk must be at most half of seq_len, here {half}")
        if self.longest and dataset.seq_len < 2 * self.longest:
            raise ValueError(
                f"nextlong.longest must be at most half of seq_len, here {half}, to leave space for negatives"
            )
        if (self.retriever == "embeddings") != (self.model is not None):
            raise ValueError("nextlong.model is required with retriever: embeddings, and not allowed otherwise")

    def summary(self) -> str:
        return f"negatives after chunks of {self.chunk}"

    @property
    def max_doc_len(self) -> int | None:
        return self.longest

    @property
    def keeps_chunk_order(self) -> bool:
        return False  # negatives are sorted by similarity

    @property
    def embedder(self) -> str | None:
        return self.model

    def build(self, dataset: "DatasetConfig", inputs: PackingInputs) -> RowBuilder:
        began = time.perf_counter()
        negatives = build_negatives(self, inputs.readers, keep_rest=dataset.packing == "concat", embed=inputs.embed)
        # Printed but not in the manifest, which is the same for every run.
        logger.info(f"dataset {inputs.name}: index built in {time.perf_counter() - began:.1f} s")
        return RowBuilder(
            pack=negatives.pack,
            masked=inputs.is_masked,
            chunked=True,
            min_doc_len=negatives.sizes(dataset.seq_len)[1] + 1,
            borrows=True,
            counts_documents=False,
            cost=negatives.cost,
        )


# Maximum number of tokens in the index; building it takes about 20 bytes per token.
INDEX_TOKENS = 1 << 27
# Tokens per stretch, and the sampled share of stretches that is compared to find copies: one in 2 ** this.
_STRETCH = 8
_SAMPLE_BITS = 3


@dataclass(frozen=True)
class Chunks:
    """All chunks that can be negatives, in document order."""

    texts: list[np.ndarray]
    owners: np.ndarray  # int64: document of each chunk, numbered over all sources
    first_docs: dict[str, int]  # number of each source's first document
    masks: list[np.ndarray]  # loss masks of all chunks; empty if no source has any

    @cached_property
    def sources(self) -> np.ndarray:
        """Return the number of each chunk's source, in the order of `first_docs`."""
        return np.searchsorted([*self.first_docs.values()], self.owners, side="right") - 1

    def of(self, doc: Doc) -> slice:
        owner = self.first_docs[doc.source] + doc.number
        return slice(*np.searchsorted(self.owners, [owner, owner + 1]).tolist())

    def source(self, number: int) -> str:
        return [*self.first_docs][int(self.sources[number])]


def build_negatives(
    config: NExtLong, readers: "Mapping[str, CorpusReader]", *, keep_rest: bool, embed: "Embed | None"
) -> "Negatives":
    """Index the corpora. `keep_rest`: the rest of a too long document makes further rows."""
    longest = max((int(reader.lens.max(initial=0)) for reader in readers.values()), default=0)
    if longest <= config.chunk:
        raise DataError(
            f"nextlong.chunk is {config.chunk}, but the longest document has {longest} tokens, so none can be split; "
            "use a smaller chunk or longer documents."
        )
    if sum(int((reader.lens > 0).sum()) for reader in readers.values()) < 2:
        raise DataError("nextlong needs chunks of other documents, but there is only one document; add text.")
    chunks = cut_corpora(readers, config.chunk)
    logger.info(f"nextlong: indexing {format_count(len(chunks.texts))} chunks ({config.retriever})")
    assert (embed is not None) == (config.retriever == "embeddings")
    from unspool.data.strategies.retrieval import BM25, Embeddings

    retriever: Retriever = BM25(chunks.texts) if embed is None else Embeddings(chunks.texts, embed)
    return Negatives(config, chunks, retriever, keep_rest)


def cut_corpora(readers: "Mapping[str, CorpusReader]", chunk: int) -> Chunks:
    """Cut all documents into chunks; keep evenly spaced ones if the index cannot hold all."""
    lens = np.concatenate([reader.lens for reader in readers.values()])
    firsts = np.cumsum([0, *(len(reader) for reader in readers.values())])[:-1]
    counts = -(-lens // chunk)
    total, most = int(counts.sum()), max(2, INDEX_TOKENS // chunk)
    chosen = np.arange(total)
    if total > most:
        chosen = np.arange(most) * total // most
        logger.warning(
            f"nextlong: {format_count(total)} chunks exceed the maximum size of the index; only every "
            f"{total / most:.1f}th chunk can be a negative"
        )
    owners = np.repeat(np.arange(len(lens)), counts)[chosen]
    parts = chosen - (np.cumsum(counts) - counts)[owners]
    places = ((reader, number) for reader in readers.values() for number in range(len(reader)))
    is_masked = any(reader.is_masked for reader in readers.values())
    texts: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    wanted = np.split(parts, np.searchsorted(owners, np.arange(1, len(lens))))
    for (reader, index), numbers in zip(places, wanted, strict=True):
        doc = reader[index]
        bounds = _bounds(len(doc), -(-len(doc) // chunk))
        texts += [doc[bounds[part] : bounds[part + 1]] for part in numbers.tolist()]
        if is_masked:
            mask = reader.loss_mask(index)
            mask = np.broadcast_to(np.True_, len(doc)) if mask is None else mask
            masks += [mask[bounds[part] : bounds[part + 1]] for part in numbers.tolist()]
    return Chunks(texts, owners, dict(zip(readers, firsts.tolist(), strict=True)), masks)


class Negatives:
    """Pack documents with their negatives; `pack` is a `Packer` (pack.py)."""

    def __init__(self, config: NExtLong, chunks: Chunks, retriever: "Retriever", keep_rest: bool) -> None:
        self._config = config
        self._chunks = chunks
        self._retriever = retriever
        self._keep_rest = keep_rest
        # For the manifest; updated with every row.
        self.cost = {
            "chunks_indexed": len(chunks.texts),
            "negatives": 0,
            "negative_tokens": 0,
            "copies_left_out": 0,
        }

    def sizes(self, row_len: int) -> tuple[int, int]:
        """Return the maximum tokens of a document in a row, and of its chunks."""
        # At most half of the row, so that there is space for negatives.
        longest = min(self._config.longest or row_len // 4, row_len // 2)
        return longest, max(1, min(self._config.chunk, longest // 2))

    def pack(self, docs: Iterable[Doc], row_len: int, tally: Tally) -> RowStream:
        longest, chunk = self.sizes(row_len)
        for doc in docs:
            assert doc.number >= 0, "the document needs a number, to exclude its own chunks"
            length = len(doc.tokens)
            if length <= chunk:
                tally.drop("short", doc.source, length)
                continue
            bounds = _bounds(length, -(-length // longest)) if self._keep_rest else [0, min(length, longest)]
            tally.drop("cut", doc.source, length - bounds[-1])
            done = 0
            try:
                for start, stop in pairwise(bounds):
                    quotas = tally.shares.row_quotas() if tally.shares else None
                    row = self._row(doc, start, stop, row_len, chunk, quotas)
                    done = stop
                    if row is None:
                        tally.drop("alone", doc.source, stop - start)
                        continue
                    tally.added += row_len - (stop - start)
                    yield row
            finally:
                tally.drop("limit", doc.source, bounds[-1] - done)

    def _row(
        self, doc: Doc, start: int, stop: int, row_len: int, chunk: int, quotas: dict[str, int] | None
    ) -> Row | None:
        text = doc.tokens[start:stop]
        mask = None if doc.loss_mask is None else doc.loss_mask[start:stop]
        room = row_len - len(text)
        bounds = _bounds(len(text), max(2, -(-len(text) // chunk)))
        pieces = [text[start:stop] for start, stop in pairwise(bounds)]
        if quotas is not None:
            quotas[doc.source] -= len(text)
        choice = _Choice(self._chunks, text, room, quotas)
        num_ranked = 2 * room // (len(pieces) * self._config.chunk) + 8
        ranked = self._ranked(pieces, self._chunks.of(doc), num_ranked)
        lens, owners, sources, parts, masks = [], [], [], [], []
        for number, (piece, candidates) in enumerate(zip(pieces, ranked, strict=True)):
            is_last = number == len(pieces) - 1
            found = choice.take(candidates, room if is_last else room * bounds[number + 1] // len(text), is_last)
            if is_last and choice.taken < room and choice.lift_quotas():
                (candidates,) = self._ranked([piece], self._chunks.of(doc), num_ranked)
                found += choice.take(candidates, room, is_last)
            parts += [piece, *(self._chunks.texts[negative][:length] for negative, length in found)]
            lens += [len(piece), *(length for _, length in found)]
            owners += [-1, *(int(self._chunks.owners[negative]) for negative, _ in found)]
            sources += [doc.source, *(self._chunks.source(negative) for negative, _ in found)]
            if mask is not None:
                masks += [mask[bounds[number] : bounds[number + 1]]]
                masks += [self._chunks.masks[negative][:length] for negative, length in found]
        if choice.taken < room:
            return None
        self.cost["negatives"] += len(parts) - len(pieces)
        self.cost["negative_tokens"] += room
        self.cost["copies_left_out"] += choice.copies
        numbers: dict[int, int] = {-1: 0}
        chunk_ids = [numbers.setdefault(owner, len(numbers)) for owner in owners]
        return Row(
            tokens=np.concatenate(parts, dtype=np.uint32),
            doc_lens=np.array(lens, dtype=np.int32),
            loss_mask=None if mask is None else np.concatenate(masks),
            source="+".join(dict.fromkeys(sources)),
            attention="full",
            chunk_ids=np.array(chunk_ids, dtype=np.int32),
            sources=sources,
        )

    def _ranked(self, pieces: Sequence[np.ndarray], hidden: slice, k: int) -> list[Iterator[int]]:
        """For each piece, iterate over possible negatives, best first; search further only when needed."""

        def deeper(piece: np.ndarray, found: np.ndarray, k: int) -> Iterator[int]:
            yield from found.tolist()
            while len(found) == k:
                seen, k = k, 4 * k
                found = self._retriever.search([piece], k, hidden)[0]
                yield from found[seen:].tolist()

        first = self._retriever.search(pieces, k, hidden)
        return [deeper(piece, found, k) for piece, found in zip(pieces, first, strict=True)]


class _Choice:
    """Choose negatives for one row: none twice, and none that repeats the row.

    `quotas` are the tokens that each source may give; a source without quota left is skipped.
    """

    def __init__(self, chunks: Chunks, text: np.ndarray, room: int, quotas: dict[str, int] | None = None) -> None:
        self._quotas = None if quotas is None else [quotas[name] for name in chunks.first_docs]
        self._chunks = chunks
        self._room = room
        self._of_text = stretches(text)
        self._of_negatives: set[int] = set()
        self._seen: set[int] = set()  # chunks that are in the row or excluded
        self._banned: set[int] = set()  # documents that repeat the row's document
        self.taken = 0  # tokens
        self.copies = 0

    def lift_quotas(self) -> bool:
        """Allow all sources, because those behind their share have no more chunks for this row."""
        had_quotas, self._quotas = self._quotas is not None, None
        return had_quotas

    def take(self, candidates: Iterator[int], goal: int, is_last: bool) -> list[tuple[int, int]]:
        """Take the best candidates until the row has about `goal` tokens of negatives, or is full if `is_last`."""
        found: list[tuple[int, int]] = []
        if self.taken == self._room:
            return found
        for number in candidates:
            owner = int(self._chunks.owners[number])
            if number in self._seen or owner in self._banned:
                continue
            if self._quotas is not None and self._quotas[self._chunks.sources[number]] <= 0:
                continue
            text = self._chunks.texts[number]
            if not is_last and (self.taken + len(text) / 2 > goal or self.taken + len(text) > self._room):
                break
            self._seen.add(number)
            if self._repeats(text, owner):
                self.copies += 1
                continue
            length = min(len(text), self._room - self.taken)
            found.append((number, length))
            self.taken += length
            if self._quotas is not None:
                self._quotas[self._chunks.sources[number]] -= length
            if self.taken == self._room:
                break
        return found

    def _repeats(self, text: np.ndarray, owner: int) -> bool:
        mine = stretches(text)
        if 2 * len(mine & self._of_text) >= len(mine):
            self._banned.add(owner)
            return True
        if 2 * len(mine & self._of_negatives) >= len(mine):
            return True
        self._of_negatives |= mine
        return False


def stretches(text: np.ndarray) -> set[int]:
    """Hash a sample of all stretches of 8 tokens; of equal stretches, all or none are sampled."""
    width = min(_STRETCH, len(text))
    count = len(text) - width + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for at in range(width):
        hashes = (hashes + text[at : at + count] + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    sampled = hashes[hashes >> np.uint64(64 - _SAMPLE_BITS) == 0]
    return set((sampled if len(sampled) else hashes.min(keepdims=True)).tolist())


def _bounds(length: int, parts: int) -> list[int]:
    """Return the boundaries of equal parts."""
    return [length * number // parts for number in range(parts + 1)] if parts else [0]
