"""The steps of the corpus pipeline, as datatrove runs them: read, tokenize, write.

The output of task r depends only on its own part of the source. So the result is the same for any executor and any
number of workers. A task's files are complete before datatrove marks it as completed.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document as PipelineDocument
from datatrove.pipeline.base import PipelineStep

from unspool.core.artifacts import changed_file, list_files, write_atomic
from unspool.data.corpus.ledger import Ledger
from unspool.data.corpus.ratios import RatioFilter
from unspool.data.corpus.store import CorpusWriter
from unspool.data.sources.aggregation.insert import insert_tasks
from unspool.data.sources.base import Bad, Document, Filtered, Item, Source, read_items
from unspool.data.sources.files import Unreadable
from unspool.data.tokenize.chat import ChatEncoder
from unspool.data.tokenize.encoder import Encoder

# Characters to tokenize, or tokens to pass on, in one batch.
BATCH_CHARS = 1 << 20
WORK = "tasks"


def shard_path(folder: Path, rank: int) -> Path:
    return folder / f"docs-{rank:05d}.arrow"


def sizes_path(folder: Path, rank: int) -> Path:
    return folder / WORK / f"sizes-{rank:05d}.npy"


def ledger_path(folder: Path, rank: int) -> Path:
    return folder / WORK / f"ledger-{rank:05d}.json"


def sums_path(folder: Path, rank: int) -> Path:
    return folder / WORK / f"sums-{rank:05d}.json"


def write_sums(folder: Path, rank: int, *, with_shard: bool = True) -> None:
    """Write the checksums of a task's files, so that a later run can check them."""
    paths = [sizes_path(folder, rank), ledger_path(folder, rank), *([shard_path(folder, rank)] if with_shard else [])]
    content = {"rank": rank, "files": list_files(folder, [path for path in paths if path.is_file()])}
    write_atomic(sums_path(folder, rank), json.dumps(content))


def find_task_damage(folder: Path, rank: int) -> str | None:
    """Describe the damage to a completed task's files; None if they are unchanged."""
    try:
        content = json.loads(sums_path(folder, rank).read_text(encoding="utf-8"))
        return (
            changed_file(folder, content["files"])
            if content["rank"] == rank
            else "its checksums belong to another task"
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "its checksums are missing or unreadable"


class SpillRecords(PipelineStep):  # type: ignore[misc]
    """Task r runs the r-th task of a source's first pass, which sorts its input on disk."""

    name = "sort"
    type = "READER"

    def __init__(self, source: Source, tasks: list[Any], folder: Path, *, num_parts: int, seed: int) -> None:
        super().__init__()
        self.source = source
        self.tasks = tasks
        self.folder = folder
        self.num_parts = num_parts
        self.seed = seed

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        self.source.spill(self.tasks[rank], rank, self.num_parts, self.folder, self.seed)


class ReadDocuments(PipelineStep):  # type: ignore[misc]
    """Task r reads the r-th task of a source and adds every record to the ledger.

    Conversations are rendered and tokenized here, because records for which this fails go to quarantine.
    """

    name = "documents"
    type = "READER"

    def __init__(
        self,
        source: Source,
        tasks: list[Any],
        encoder: Encoder,
        *,
        root: Path,
        seed: int,
        vocabulary: int,
        ledger: Ledger,
        chat: ChatEncoder | None = None,
        ratio_filter: RatioFilter | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.tasks = tasks
        self.encoder = encoder
        self.root = root
        self.seed = seed
        self.vocabulary = vocabulary
        self.ledger = ledger
        self.chat = chat
        self.ratio_filter = ratio_filter

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[PipelineDocument]:
        self.ledger.clear()  # a process may run several tasks with the same steps
        ratios = None if self.ratio_filter is None else self.ratio_filter.ratios(rank)
        for found in read_items(self.source, self.tasks[rank], self.seed, self.encoder):
            item, ratio = _check_usable(_render_chat(found, self.chat), self.vocabulary), None
            if isinstance(item, Bad):
                item = replace(item, file=_relative(item.file, self.root))
            elif isinstance(item, Document) and self.ratio_filter is not None:
                item, ratio = self.ratio_filter.apply(item, ratios)
            self.ledger.add(item)
            if isinstance(item, Document):
                yield self._pass_on(item, ratio)
        if self.ratio_filter is not None:
            self.ratio_filter.check_all_used(ratios, rank)

    def _pass_on(self, document: Document, ratio: float | None) -> PipelineDocument:
        given = {"tokens": document.tokens, "loss_mask": document.loss_mask, "gzip_ratio": ratio}
        metadata = {name: value for name, value in given.items() if value is not None}
        text = document.text
        if self.source.inserted_tasks is not None:
            text, counts = insert_tasks(self.source.inserted_tasks, document.id, text, self.seed)
            self.ledger.tasks.update(counts)
        return PipelineDocument(text=text, id=document.id, metadata=metadata)


class TokenizeDocuments(PipelineStep):  # type: ignore[misc]
    """Add tokens to each document that has none."""

    name = "tokens"
    type = "TOKENIZER"

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[PipelineDocument]:
        batch: list[PipelineDocument] = []
        size = 0
        for document in data:
            batch.append(document)
            size += len(document.text) + len(document.metadata.get("tokens", ()))
            if size >= BATCH_CHARS:
                yield from self._encode(batch)
                batch, size = [], 0
        yield from self._encode(batch)

    def _encode(self, batch: list[PipelineDocument]) -> Iterator[PipelineDocument]:
        texts = [document.text for document in batch if "tokens" not in document.metadata]
        arrays = iter(self.encoder.encode(texts))
        for document in batch:
            if "tokens" not in document.metadata:
                document.metadata["tokens"] = next(arrays)
            yield document


class WriteDocuments(PipelineStep):  # type: ignore[misc]
    """Task r writes `docs-r.arrow`, its document sizes and its ledger."""

    name = "arrow"
    type = "WRITER"

    def __init__(
        self, folder: Path, limit: int | None, *, ledger: Ledger, masked: bool = False, measured: bool = False
    ) -> None:
        super().__init__()
        self.folder = folder
        self.limit = limit
        self.ledger = ledger
        self.masked = masked
        self.measured = measured

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        sizes: list[tuple[int, int, int]] = []
        total = 0
        options = {"masked": self.masked, "measured": self.measured}
        with CorpusWriter(shard_path(self.folder, rank), **options) as writer:
            for document in data:
                tokens = document.metadata["tokens"]
                mask = document.metadata.get("loss_mask")
                if self.masked and mask is None:
                    mask = np.ones(len(tokens), dtype=np.bool_)
                writer.append(document.id, tokens, mask, gzip_ratio=document.metadata.get("gzip_ratio"))
                # The first token is never a prediction target.
                trained = len(tokens) - 1 if mask is None else np.count_nonzero(mask[1:])
                sizes.append((len(tokens), len(document.text), int(trained)))
                total += len(tokens)
                if self.limit is not None and total >= self.limit:
                    break
        # Not `np.save` with a path: on a full disk its error has no reason.
        buffer = io.BytesIO()
        np.save(buffer, np.array(sizes, dtype=np.int64).reshape(-1, 3))
        sizes_path(self.folder, rank).write_bytes(buffer.getvalue())
        self.ledger.save(ledger_path(self.folder, rank))
        write_sums(self.folder, rank)


def _render_chat(item: Item, chat: ChatEncoder | None) -> Item:
    """Render and tokenize a conversation, or return a `Bad` with the reason; other items are returned unchanged."""
    if chat is None or not isinstance(item, Document):
        return item
    try:
        encoded = chat.encode(item.messages)
    except Unreadable as error:
        file, _, record = item.id.rpartition(":")
        return Bad(file, f"record {record}", error.reason, error.detail)
    return Document(item.id, encoded.text, encoded.tokens, loss_mask=encoded.loss_mask)


def _check_usable(item: Item, vocabulary: int) -> Item:
    """Return the item, or a `Bad` for a readable document that cannot be used."""
    if not isinstance(item, Document):
        return item
    if item.tokens is None:
        return item if item.text else Filtered(item.id, "empty")
    if not len(item.tokens):
        return Filtered(item.id, "empty")
    if int(item.tokens.max()) >= vocabulary:
        file, _, record = item.id.rpartition(":")
        detail = (
            f"token {int(item.tokens.max())} is outside the model's vocabulary of {vocabulary}; the document was "
            "tokenized for another model"
        )
        return Bad(file, f"record {record}", "foreign_tokens", detail)
    return item


def _relative(file: str, root: Path) -> str:
    """Make paths below the recipe's folder relative, so that a corpus does not depend on where the folder is."""
    path = Path(file)
    return str(path.relative_to(root)) if path.is_relative_to(root) else file
