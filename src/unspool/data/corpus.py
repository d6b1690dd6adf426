"""Build a corpus: a source's documents, tokenised, as an artefact.

In: a source, the model's tokenizer. Out: folder with `docs-00000.arrow` … and a manifest.
Runs as a datatrove pipeline (read, tokenise, write). Consecutive files form groups of a fixed size; a
group is one task and gives one file, so the result does not depend on the number of workers.
Promise: a build that was killed goes on with the groups that are missing; a half-built folder
made from other inputs or settings is thrown away.
Limit: documents are kept in file order up to and including the one that reaches `limit`; files
after it are not read, except those that other workers had already begun.
Price: one file is never split over workers.
Elsewhere: reading files (read.py), generated documents (recall.py), rows (rows.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import multiprocess  # type: ignore[import-untyped]
import numpy as np
from datatrove.data import Document as PipelineDocument
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.logging import logger

from unspool.base.artefact import CHECKSUM_LIMIT, FORMAT, digest, file_digest, read_manifest, seal, stale_reason
from unspool.base.errors import ConfigError, DataError
from unspool.base.progress import say
from unspool.data.config import EngineConfig
from unspool.data.read import FileSource, file_source, read_files, source_files
from unspool.data.recall import recall_documents
from unspool.data.sources import RecallSource, Source
from unspool.data.store import CorpusWriter, keep_first
from unspool.data.tokens import Encoder, build_encoder

# Only to name the type: importing it takes seconds, which every worker process would pay.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

KIND = "corpus"
# Bytes of input per task: enough to outweigh a task's start, small enough to lose little when killed.
GROUP_BYTES = 8 << 20
# Characters tokenised in one call.
_BATCH_CHARS = 1 << 20
_WORK = "work"


def build_corpus(
    source: Source,
    out_dir: Path,
    *,
    tokenizer: PreTrainedTokenizerFast,
    root: Path,
    engine: EngineConfig,
    seed: int,
) -> dict[str, Any]:
    """Make `out_dir` hold the documents of `source`, unless it does already; returns its manifest's counts."""
    check_engine(engine)
    files = source_files(source, root)
    encoder = build_encoder(tokenizer)
    inputs = {"files": _files_digest(files), "tokenizer": encoder.digest}
    settings: dict[str, Any] = {"source": source.model_dump(mode="json")}
    if isinstance(source, RecallSource):
        settings["seed"] = seed
    reason = stale_reason(out_dir, kind=KIND, inputs=inputs, settings=settings)
    if reason is None:
        say(f"corpus {out_dir.name}: up to date")
        return _counts_of(out_dir)
    say(f"corpus {out_dir.name}: tokenising ({reason})")

    partial = _resumable(out_dir, digest([inputs, settings, FORMAT]))
    if isinstance(source, RecallSource):
        groups = [files]
        read: PipelineStep = GenerateDocuments(source, tokenizer, files, seed)
    else:
        groups = _groups(files)
        read = ReadDocuments(file_source(source), groups)
    limit = None if isinstance(source, RecallSource) else source.limit
    steps = [read, TokenizeDocuments(encoder), WriteDocuments(partial, limit)]
    counts = _run(steps, partial, len(groups), engine.workers, limit)
    if not counts["documents"]:
        raise DataError(f"corpus {out_dir.name}: no document holds any text.")
    counts["files"] = len(files)
    shutil.rmtree(partial / _WORK)
    seal(partial, out_dir, kind=KIND, inputs=inputs, settings=settings, counts=counts)
    return counts


def check_engine(engine: EngineConfig) -> None:
    if engine.kind != "local":
        raise ConfigError(
            f"engine.kind={engine.kind}: this version prepares documents on one machine only; use kind: local."
        )


class ReadDocuments(PipelineStep):  # type: ignore[misc]
    """Task r reads the r-th group of files."""

    name = "documents"
    type = "READER"

    def __init__(self, source: FileSource, groups: list[list[Path]]) -> None:
        super().__init__()
        self.source = source
        self.groups = groups

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[PipelineDocument]:
        for document in read_files(self.source, self.groups[rank]):
            yield PipelineDocument(text=document.text, id=document.id)


class GenerateDocuments(PipelineStep):  # type: ignore[misc]
    """Makes documents up around the prose in `files`; always a single task."""

    name = "generated documents"
    type = "READER"

    def __init__(self, source: RecallSource, tokenizer: PreTrainedTokenizerFast, files: list[Path], seed: int) -> None:
        super().__init__()
        self.source = source
        self.tokenizer = tokenizer
        self.files = files
        self.seed = seed

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[PipelineDocument]:
        prose = (document.text for document in read_files(file_source(self.source), self.files))
        for number, text in enumerate(recall_documents(self.source, self.tokenizer, prose, self.seed), start=1):
            yield PipelineDocument(text=text, id=f"recall:{number}")


class TokenizeDocuments(PipelineStep):  # type: ignore[misc]
    """Puts each document's tokens beside its text; drops documents without text."""

    name = "tokens"
    type = "TOKENIZER"

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[PipelineDocument]:
        batch: list[PipelineDocument] = []
        chars = 0
        for document in data:
            if not document.text:
                continue
            batch.append(document)
            chars += len(document.text)
            if chars >= _BATCH_CHARS:
                yield from self._encoded(batch)
                batch, chars = [], 0
        yield from self._encoded(batch)

    def _encoded(self, batch: list[PipelineDocument]) -> Iterator[PipelineDocument]:
        arrays = self.encoder.encode([document.text for document in batch])
        for document, tokens in zip(batch, arrays, strict=True):
            document.metadata["tokens"] = tokens
            yield document


class WriteDocuments(PipelineStep):  # type: ignore[misc]
    """Task r writes `docs-r.arrow`, and the sizes of its documents beside it."""

    name = "arrow"
    type = "WRITER"

    def __init__(self, folder: Path, limit: int | None) -> None:
        super().__init__()
        self.folder = folder
        self.limit = limit

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        sizes: list[tuple[int, int]] = []
        total = 0
        with CorpusWriter(_shard(self.folder, rank)) as writer:
            for document in data:
                tokens = document.metadata["tokens"]
                writer.append(document.id, tokens)
                sizes.append((len(tokens), len(document.text)))
                total += len(tokens)
                if self.limit is not None and total >= self.limit:
                    break
        np.save(_sizes_path(self.folder, rank), np.array(sizes, dtype=np.int64).reshape(-1, 2))


class _Executor(LocalPipelineExecutor):  # type: ignore[misc]
    """datatrove's local executor, without its messages: what fails is raised, what is done is in the manifest."""

    def save_executor_as_json(self, indent: int = 4) -> None:
        """Left out: it would spell out the whole tokenizer."""

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> Any:
        logger.disable("datatrove")
        if self.workers > 1:
            # The processes share the cores among them already.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return super()._run_for_rank(rank, local_rank, node_rank)


def _run(steps: list[PipelineStep], partial: Path, num_shards: int, workers: int, limit: int | None) -> dict[str, Any]:
    """Run the shards, all at once or, up to a limit, as many at a time as there are workers."""
    logger.disable("datatrove")
    # Worker processes are forked from a server that has imported this module once.
    multiprocess.set_forkserver_preload([__name__])
    sizes: list[np.ndarray] = []
    kept = 0
    at_once = num_shards if limit is None else workers
    for first in range(0, num_shards, at_once):
        ranks = range(first, min(first + at_once, num_shards))
        _Executor(
            steps,
            tasks=num_shards,
            workers=min(workers, len(ranks)),  # a single shard runs in this process, without start-up time
            logging_dir=str(partial / _WORK),
            local_tasks=len(ranks),
            local_rank_offset=first,
        ).run()
        for rank in ranks:
            sizes.append(_cut_to_limit(partial, rank, None if limit is None else limit - kept))
            kept += int(sizes[-1][:, 0].sum())
        if limit is not None and kept >= limit:
            break
    # Beyond the limit there may be shards of other workers, or of an earlier run that had more workers.
    kept_paths = {_shard(partial, rank) for rank, kept_sizes in enumerate(sizes) if len(kept_sizes)}
    for path in set(partial.glob("docs-*")) - kept_paths:
        path.unlink()
    tokens, chars = np.concatenate(sizes).sum(axis=0)
    return {"documents": sum(map(len, sizes)), "tokens": int(tokens), "characters": int(chars)}


def _cut_to_limit(partial: Path, rank: int, room: int | None) -> np.ndarray:
    """Shorten a shard to the documents that fit into `room`, the one that reaches it included; returns their sizes."""
    sizes: np.ndarray = np.load(_sizes_path(partial, rank))
    if room is None:
        return sizes
    if room <= 0:
        return sizes[:0]
    count = int(np.searchsorted(np.cumsum(sizes[:, 0]), room)) + 1
    keep_first(_shard(partial, rank), count)
    return sizes[:count]


def _resumable(out_dir: Path, key: str) -> Path:
    """The work folder, kept if it was begun for the same inputs and settings."""
    partial = out_dir.with_name(out_dir.name + ".partial")
    key_path = partial / _WORK / "key"
    if not key_path.is_file() or key_path.read_text() != key:
        shutil.rmtree(partial, ignore_errors=True)
        key_path.parent.mkdir(parents=True)
        key_path.write_text(key)
    return partial


def _shard(folder: Path, rank: int) -> Path:
    return folder / f"docs-{rank:05d}.arrow"


def _sizes_path(folder: Path, rank: int) -> Path:
    return folder / _WORK / f"sizes-{rank:05d}.npy"


def _groups(files: list[Path]) -> list[list[Path]]:
    """Consecutive files, a new group whenever the last one has reached its size."""
    groups: list[list[Path]] = [[]]
    size = 0
    for file in files:
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.stat().st_size
    return groups


def _files_digest(files: list[Path]) -> str:
    # Above the limit hashing would cost more than it protects from; a changed file changes its time.
    by_content = sum(file.stat().st_size for file in files) <= CHECKSUM_LIMIT
    marks = [file_digest(file) if by_content else [file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return digest([[file.name, mark] for file, mark in zip(files, marks, strict=True)])


def _counts_of(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    assert manifest is not None
    counts: dict[str, Any] = manifest["counts"]
    return counts
