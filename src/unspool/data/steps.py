"""The steps of the corpus pipeline, as datatrove runs them: read or make up, tokenise, write.

Promise: what task r writes depends only on its own units, so the result is the same for any executor and any
number of workers. A task's files are complete before datatrove marks it as completed.
Elsewhere: dividing and gathering the work (corpus.py), running it (executors.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datatrove.data import Document as PipelineDocument
from datatrove.pipeline.base import PipelineStep

from unspool.data.chat_tokens import ChatEncoder
from unspool.data.corpus_store import CorpusWriter
from unspool.data.documents import Bad, Document, Filtered, Item
from unspool.data.ledger import Ledger
from unspool.data.readers import file_source, read_strictly, read_units
from unspool.data.readers.files import Unreadable
from unspool.data.recall import recall_documents
from unspool.data.sources import FileSource, RecallSource, SyntheticSource
from unspool.data.synthetic.make import make_documents, plan_documents
from unspool.data.synthetic.prose import load_prose
from unspool.data.tokens import Encoder

# Only to name the type: importing it takes seconds, which every worker process would pay.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Characters tokenised, or tokens passed on, in one go.
BATCH_CHARS = 1 << 20
WORK = "tasks"


def shard_path(folder: Path, rank: int) -> Path:
    return folder / f"docs-{rank:05d}.arrow"


def sizes_path(folder: Path, rank: int) -> Path:
    return folder / WORK / f"sizes-{rank:05d}.npy"


def ledger_path(folder: Path, rank: int) -> Path:
    return folder / WORK / f"ledger-{rank:05d}.json"


class ReadDocuments(PipelineStep):  # type: ignore[misc]
    """Task r reads the r-th group of units and enters every record into the ledger.

    Conversations are written out and tokenised here, because some cannot be and go to quarantine instead.
    """

    name = "documents"
    type = "READER"

    def __init__(
        self,
        source: FileSource,
        groups: list[list[Path]],
        *,
        root: Path,
        seed: int,
        vocabulary: int,
        ledger: Ledger,
        chat: ChatEncoder | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.groups = groups
        self.root = root
        self.seed = seed
        self.vocabulary = vocabulary
        self.ledger = ledger
        self.chat = chat

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[PipelineDocument]:
        self.ledger.clear()  # a process may run several tasks with the same steps
        for found in read_units(self.source, self.groups[rank], self.seed):
            item = _usable(_written(found, self.chat), self.vocabulary)
            if isinstance(item, Bad):
                item = replace(item, file=_relative(item.file, self.root))
            self.ledger.enter(item)
            if isinstance(item, Document):
                metadata = {} if item.tokens is None else {"tokens": item.tokens}
                if item.loss_mask is not None:
                    metadata["loss_mask"] = item.loss_mask
                yield PipelineDocument(text=item.text, id=item.id, metadata=metadata)


class GenerateDocuments(PipelineStep):  # type: ignore[misc]
    """Makes documents up around the prose in `units`; always a single task."""

    name = "generated documents"
    type = "READER"

    def __init__(
        self,
        source: RecallSource,
        tokenizer: PreTrainedTokenizerFast,
        units: list[Path],
        *,
        seed: int,
        ledger: Ledger,
    ) -> None:
        super().__init__()
        self.source = source
        self.tokenizer = tokenizer
        self.units = units
        self.seed = seed
        self.ledger = ledger

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[PipelineDocument]:
        self.ledger.clear()
        prose = (document.text for document in read_strictly(file_source(self.source), self.units))
        for number, text in enumerate(recall_documents(self.source, self.tokenizer, prose, self.seed), start=1):
            document = Document(f"recall:{number}", text)
            self.ledger.enter(document)
            yield PipelineDocument(text=text, id=document.id)


class GenerateTasks(PipelineStep):  # type: ignore[misc]
    """Task r makes the r-th part of a synthetic source. Fitting lengths needs the tokens, so they are passed on."""

    name = "synthetic documents"
    type = "READER"

    def __init__(
        self,
        source: SyntheticSource,
        encoder: Encoder,
        parts: list[range],
        units: list[Path],
        *,
        seed: int,
        ledger: Ledger,
    ) -> None:
        super().__init__()
        self.source = source
        self.encoder = encoder
        self.parts = parts
        self.units = units
        self.seed = seed
        self.ledger = ledger

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[PipelineDocument]:
        self.ledger.clear()
        plan = plan_documents(self.source, self.seed)
        prose: list[str] = []
        if self.units:
            prose = load_prose(document.text for document in read_strictly(file_source(self.source), self.units))
        made = make_documents(plan, self.parts[rank], self._tokens, prose, self.seed)
        for index, (task, text, tokens) in made:
            document = Document(f"{task}:{index}", text, tokens)
            self.ledger.enter(document)
            yield PipelineDocument(text=text, id=document.id, metadata={"tokens": tokens})

    def _tokens(self, text: str) -> np.ndarray:
        return self.encoder.encode([text])[0]


class TokenizeDocuments(PipelineStep):  # type: ignore[misc]
    """Puts each document's tokens beside its text, unless it came with tokens."""

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
                yield from self._encoded(batch)
                batch, size = [], 0
        yield from self._encoded(batch)

    def _encoded(self, batch: list[PipelineDocument]) -> Iterator[PipelineDocument]:
        texts = [document.text for document in batch if "tokens" not in document.metadata]
        arrays = iter(self.encoder.encode(texts))
        for document in batch:
            if "tokens" not in document.metadata:
                document.metadata["tokens"] = next(arrays)
            yield document


class WriteDocuments(PipelineStep):  # type: ignore[misc]
    """Task r writes `docs-r.arrow`, and beside it the sizes of its documents and its ledger."""

    name = "arrow"
    type = "WRITER"

    def __init__(self, folder: Path, limit: int | None, *, ledger: Ledger, masked: bool = False) -> None:
        super().__init__()
        self.folder = folder
        self.limit = limit
        self.ledger = ledger
        self.masked = masked

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        sizes: list[tuple[int, int, int]] = []
        total = 0
        with CorpusWriter(shard_path(self.folder, rank), masked=self.masked) as writer:
            for document in data:
                tokens = document.metadata["tokens"]
                mask = document.metadata.get("loss_mask")
                writer.append(document.id, tokens, mask)
                # The first token is asked for by nothing.
                trained = len(tokens) - 1 if mask is None else np.count_nonzero(mask[1:])
                sizes.append((len(tokens), len(document.text), int(trained)))
                total += len(tokens)
                if self.limit is not None and total >= self.limit:
                    break
        np.save(sizes_path(self.folder, rank), np.array(sizes, dtype=np.int64).reshape(-1, 3))
        self.ledger.save(ledger_path(self.folder, rank))


def _written(item: Item, chat: ChatEncoder | None) -> Item:
    """The item, a conversation as text and tokens, or why it cannot be."""
    if chat is None or not isinstance(item, Document):
        return item
    try:
        encoded = chat.encode(item.messages)
    except Unreadable as error:
        file, _, record = item.id.rpartition(":")
        return Bad(file, f"record {record}", error.reason, error.detail)
    return Document(item.id, encoded.text, encoded.tokens, loss_mask=encoded.loss_mask)


def _usable(item: Item, vocabulary: int) -> Item:
    """The item, or why a document that could be read cannot be used."""
    if not isinstance(item, Document):
        return item
    if item.tokens is None:
        return item if item.text else Filtered(item.id, "empty")
    if not len(item.tokens):
        return Filtered(item.id, "empty")
    if int(item.tokens.max()) >= vocabulary:
        file, _, record = item.id.rpartition(":")
        detail = f"token {int(item.tokens.max())} is beyond the model's {vocabulary}; it was made for another tokenizer"
        return Bad(file, f"record {record}", "foreign_tokens", detail)
    return item


def _relative(file: str, root: Path) -> str:
    """Paths below the recipe's folder are shown from there, so that a corpus does not depend on where it lies."""
    path = Path(file)
    return str(path.relative_to(root)) if path.is_relative_to(root) else file
