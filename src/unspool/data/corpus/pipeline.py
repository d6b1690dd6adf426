"""The steps of the corpus pipeline, as datatrove runs them: read or make up, tokenise, write.

Promise: what task r writes depends only on its own units, so the result is the same for any executor and any
number of workers. A task's files are complete before datatrove marks it as completed.
Elsewhere: dividing and gathering the work (corpus.py), running it (executors.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datatrove.data import Document as PipelineDocument
from datatrove.pipeline.base import PipelineStep

from unspool.core.errors import DataError
from unspool.data.corpus.store import CorpusWriter
from unspool.data.sources.base import Bad, Document, Filtered, Item
from unspool.data.sources.config import FileSource, RecallSource, SyntheticSource
from unspool.data.sources.files import Unreadable
from unspool.data.sources.readers import file_source, read_strictly, read_units
from unspool.data.sources.recall import recall_documents
from unspool.data.sources.synthetic.generate import load_prose, make_documents, plan_documents
from unspool.data.tokenize.chat import ChatEncoder
from unspool.data.tokenize.encoder import Encoder

# What became of every record: in the corpus, in quarantine, or left out for a counted reason.


QUARANTINE = "quarantine.jsonl"
LEFT_OUT = "left_out.jsonl"
# So many unreadable records, and more of them than readable ones: a wrong field or format, not a bad record.
HOPELESS = 1000


@dataclass
class Ledger:
    """The records of one task, or of a whole corpus."""

    records: int = 0
    filtered: Counter[str] = field(default_factory=Counter)  # by reason
    bad: list[Bad] = field(default_factory=list)
    left_out: list[tuple[str, str, str]] = field(default_factory=list)  # document, part of it, reason

    def clear(self) -> None:
        self.records = 0
        self.filtered.clear()
        self.bad.clear()
        self.left_out.clear()

    def enter(self, item: Item) -> None:
        self.records += 1
        if isinstance(item, Filtered):
            self.filtered[item.reason] += 1
        elif isinstance(item, Bad):
            self.bad.append(item)
            if len(self.bad) >= HOPELESS and 2 * len(self.bad) > self.records:
                raise DataError(
                    f"{len(self.bad):,} of the first {self.records:,} records cannot be read; {describe(self.bad)} "
                    "Check the source's kind and fields."
                )
        elif isinstance(item, Document):
            self.left_out += [(item.id, part, reason) for part, reason in item.left_out]

    def save(self, path: Path) -> None:
        """Written by a task when its documents are in place."""
        bad = [[entry.file, entry.record, entry.reason, entry.detail] for entry in self.bad]
        content = {"records": self.records, "filtered": self.filtered, "bad": bad, "left_out": self.left_out}
        path.write_text(json.dumps(content, ensure_ascii=True))

    def publish(self, folder: Path) -> None:
        """Write the lists for people into a corpus folder, if there is anything in them."""
        quarantine = [
            {"file": entry.file, "record": entry.record, "reason": entry.reason, "detail": entry.detail}
            for entry in self.bad
        ]
        left_out = [{"document": document, "part": part, "reason": reason} for document, part, reason in self.left_out]
        for name, entries in ((QUARANTINE, quarantine), (LEFT_OUT, left_out)):
            path = folder / name
            path.unlink(missing_ok=True)
            if entries:
                path.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))

    def counts(self, *, documents: int) -> dict[str, Any]:
        """For the manifest. Records that were read and are not in the corpus for no other reason hit the limit."""
        rest = self.records - documents - len(self.bad) - self.filtered.total()
        assert rest >= 0, (self.records, documents, len(self.bad), self.filtered)
        filtered = self.filtered + Counter({"limit": rest})
        return {
            "records": self.records,
            "quarantined": dict(sorted(Counter(entry.reason for entry in self.bad).items())),
            "filtered": dict(sorted(filtered.items())),
            "left_out": dict(sorted(Counter(reason for _, _, reason in self.left_out).items())),
        }


def load_ledgers(paths: Iterable[Path]) -> Ledger:
    """The ledgers of several tasks as one, in the order given."""
    whole = Ledger()
    for path in paths:
        content = json.loads(path.read_text())
        whole.records += content["records"]
        whole.filtered.update(content["filtered"])
        whole.bad += [Bad(*entry) for entry in content["bad"]]
        whole.left_out += [(document, part, reason) for document, part, reason in content["left_out"]]
    return whole


def refuse_too_many(ledger: Ledger, *, name: str, max_bad: float, listed: Path) -> None:
    """DataError if a larger share of the records is unreadable than the source allows."""
    if len(ledger.bad) <= max_bad * ledger.records:
        return
    percent = 100 * len(ledger.bad) / ledger.records
    raise DataError(
        f"corpus {name}: {len(ledger.bad):,} of {ledger.records:,} records ({percent:.3g}%) cannot be read, more than "
        f"max_bad={max_bad:g} allows; {describe(ledger.bad)} All are listed in {listed}. "
        f"Repair the input or set sources.{name}.max_bad higher; what was read is kept."
    )


def describe(bad: list[Bad]) -> str:
    """One sentence: how many of what, and the first of them."""
    reasons = Counter(entry.reason for entry in bad).most_common()
    first = bad[0]
    counted = ", ".join(f"{count:,} {reason}" for reason, count in reasons)
    return f"{counted}; the first is {first.file}, {first.record}: {first.detail}."


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
