"""Build a corpus: a source's documents, tokenised, as an artifact.

In: a source, the model's tokenizer. Out: folder with `docs-00000.arrow` …, a manifest, and where there is cause
`quarantine.jsonl` and `left_out.jsonl`. Runs as a datatrove pipeline (steps.py) on any executor. Consecutive units
(files, repositories) form groups of a fixed size; a group is one task and gives one file, so the result does not
depend on the number of workers.
Promise: every record is in the corpus, in quarantine or counted under the reason it was left out; a build that
was killed goes on with the groups that are missing; a half-built folder made from other inputs or settings
is thrown away.
Limit: documents are kept in file order up to and including the one that reaches `limit`; files
after it are not read, except those that other workers had already begun.
Price: one file is never split over workers.
Elsewhere: reading (readers/), generated documents (recall.py, synthetic/), rows (rows.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datatrove.pipeline.base import PipelineStep

from unspool.core.artifacts import CHECKSUM_LIMIT, FORMAT, digest, file_digest, read_manifest, seal, stale_reason
from unspool.core.errors import DataError
from unspool.core.progress import say
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.executors import check_engine, run_tasks, started
from unspool.data.corpus.pipeline import (
    QUARANTINE,
    WORK,
    GenerateDocuments,
    GenerateTasks,
    Ledger,
    ReadDocuments,
    TokenizeDocuments,
    WriteDocuments,
    describe,
    ledger_path,
    load_ledgers,
    refuse_too_many,
    shard_path,
    sizes_path,
)
from unspool.data.corpus.store import keep_first
from unspool.data.lengths import histogram
from unspool.data.sources.base import Document
from unspool.data.sources.config import (
    ChatSource,
    FileSource,
    MdsSource,
    RecallSource,
    Source,
    SyntheticSource,
    TextbooksSource,
)
from unspool.data.sources.readers import file_source, read_units, source_units
from unspool.data.sources.synthetic.generate import divide, plan_documents, sample_texts
from unspool.data.tokenize.chat import ChatEncoder, build_chat_encoder
from unspool.data.tokenize.chat_template import TEMPLATE_FILE, load_template
from unspool.data.tokenize.encoder import build_encoder, choose_route, forget_engines

# Only to name the type: importing it takes seconds, which every worker process would pay.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

KIND = "corpus"
# Of what tasks leave for the corpus to gather; raised when that changes, so that no half-built folder is gone on with.
WORK_FORMAT = 2
# Kinds whose documents depend on the seed.
SEEDED = ("recall", "synthetic", "repos", "textbooks")
# Bytes of input per task: enough to outweigh a task's start, small enough to lose little when killed.
GROUP_BYTES = 8 << 20
# The text on which a fast tokenizer has to agree with the model's own: a piece from each of so many places.
SAMPLE_PLACES = 16
SAMPLE_CHARS = 1 << 16
# Records looked at in each place, so that a file of bad ones is not read whole.
SAMPLE_RECORDS = 10_000


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
    name = out_dir.name
    root, out_dir = root.resolve(), out_dir.resolve()  # a task may run in another folder
    units = source_units(source, root)
    encoder = build_encoder(tokenizer)
    inputs = {"files": _units_digest(source, units), "tokenizer": encoder.digest}
    chat = _chat_encoder(source, tokenizer, root, name)
    if chat is not None:
        inputs["template"] = chat.template.digest
    # Where files lie, and how many bad records are put up with, does not change what is made of them.
    unchanging = {"path", "prose", "max_bad", "template"}
    settings: dict[str, Any] = {"source": source.model_dump(mode="json", exclude=unchanging)}
    if source.kind in SEEDED:
        settings["seed"] = seed
    reason = stale_reason(out_dir, kind=KIND, inputs=inputs, settings=settings)
    if reason is None:
        say(f"corpus {name}: up to date")
        return _counts_of(out_dir)

    partial = _resumable(out_dir, digest([inputs, settings, FORMAT, WORK_FORMAT]))
    if chat is None:
        encoder = choose_route(encoder, list(_sample(source, units, seed)))
    forget_engines()
    say(f"corpus {name}: tokenising with {encoder.route} ({reason})")
    ledger = Ledger()
    limit = getattr(source, "limit", None)
    read: PipelineStep
    if isinstance(source, RecallSource):
        num_tasks = 1
        read = GenerateDocuments(source, tokenizer, units, seed=seed, ledger=ledger)
    elif isinstance(source, SyntheticSource):
        parts = divide(plan_documents(source, seed))
        num_tasks = len(parts)
        read = GenerateTasks(source, encoder, parts, units, seed=seed, ledger=ledger)
    else:
        files = file_source(source)
        groups = _groups(files, units)
        num_tasks = len(groups)
        read = ReadDocuments(files, groups, root=root, seed=seed, vocabulary=len(tokenizer), ledger=ledger, chat=chat)
    write = WriteDocuments(partial, limit, ledger=ledger, masked=chat is not None)
    steps = [read, TokenizeDocuments(encoder), write]
    with started(engine):
        sizes = _run(steps, partial, num_tasks, engine, limit, label=f"corpus {name}")

    whole = load_ledgers(ledger_path(partial, rank) for rank in range(len(sizes)))
    whole.publish(partial)
    refuse_too_many(whole, name=name, max_bad=getattr(source, "max_bad", 0), listed=partial / QUARANTINE)
    documents = sum(map(len, sizes))
    if not documents:
        raise DataError(
            f"corpus {name}: no document holds any text. {describe(whole.bad) if whole.bad else ''}".strip()
        )
    tokens, chars, trained = np.concatenate(sizes).T
    counts = {
        "documents": documents,
        "tokens": int(tokens.sum()),
        "characters": int(chars.sum()),
        "units": len(units),
        "tokenised_with": encoder.route,
        "lengths": histogram(tokens),
        **whole.counts(documents=documents),
    }
    if chat is not None:
        counts["trained_tokens"] = int(trained.sum())
        (partial / TEMPLATE_FILE).write_text(chat.template.text, encoding="utf-8")
    if whole.bad:
        say(f"corpus {name}: {len(whole.bad)} unreadable records in {QUARANTINE}: {describe(whole.bad)}")
    shutil.rmtree(partial / WORK)
    seal(partial, out_dir, kind=KIND, inputs=inputs, settings=settings, counts=counts)
    return counts


def _chat_encoder(source: Source, tokenizer: PreTrainedTokenizerFast, root: Path, name: str) -> ChatEncoder | None:
    if not isinstance(source, ChatSource):
        return None
    template = None if source.template is None else load_template(root / Path(source.template).expanduser())
    return build_chat_encoder(tokenizer, template, source=name)


def _sample(source: Source, units: list[Path], seed: int) -> Iterator[str]:
    """Text of the source itself, from all over it; for recall, of the prose that its documents are built on."""
    if isinstance(source, SyntheticSource):
        yield from sample_texts(source, SAMPLE_CHARS // SAMPLE_PLACES, seed)
    if not units:
        return
    files = file_source(source)
    for place in np.unique(np.linspace(0, len(units) - 1, SAMPLE_PLACES).astype(int)):
        taken = 0
        for item in islice(read_units(files, [units[place]], seed), SAMPLE_RECORDS):
            if isinstance(item, Document):
                if item.tokens is not None:
                    return  # nothing is left to tokenise
                yield item.text[: SAMPLE_CHARS - taken]
                taken += len(item.text)
            if taken >= SAMPLE_CHARS:
                break


def _run(
    steps: list[PipelineStep], partial: Path, num_tasks: int, engine: EngineConfig, limit: int | None, *, label: str
) -> list[np.ndarray]:
    """Run the tasks, all at once or, up to a limit, as many at a time as there are workers; returns document sizes."""
    sizes: list[np.ndarray] = []
    kept = 0
    at_once = num_tasks if limit is None else engine.workers
    for first in range(0, num_tasks, at_once):
        ranks = range(first, min(first + at_once, num_tasks))
        run_tasks(steps, partial / WORK, ranks=ranks, num_tasks=num_tasks, engine=engine, label=label)
        for rank in ranks:
            if limit is not None and kept >= limit:
                break
            sizes.append(_cut_to_limit(partial, rank, None if limit is None else limit - kept))
            kept += int(sizes[-1][:, 0].sum())
        if limit is not None and kept >= limit:
            break
    # Beyond the limit there may be shards of other workers, or of an earlier run that had more workers.
    kept_paths = {shard_path(partial, rank) for rank, kept_sizes in enumerate(sizes) if len(kept_sizes)}
    for path in set(partial.glob("docs-*")) - kept_paths:
        path.unlink()
    return sizes


def _cut_to_limit(partial: Path, rank: int, room: int | None) -> np.ndarray:
    """Shorten a shard to the documents that fit into `room`, the one that reaches it included; returns their sizes."""
    sizes: np.ndarray = np.load(sizes_path(partial, rank))
    if room is None:
        return sizes
    count = int(np.searchsorted(np.cumsum(sizes[:, 0]), room)) + 1
    keep_first(shard_path(partial, rank), count)
    return sizes[:count]


def _resumable(out_dir: Path, key: str) -> Path:
    """The work folder, kept if it was begun for the same inputs and settings."""
    partial = out_dir.with_name(out_dir.name + ".partial")
    key_path = partial / WORK / "key"
    if not key_path.is_file() or key_path.read_text() != key:
        shutil.rmtree(partial, ignore_errors=True)
        key_path.parent.mkdir(parents=True)
        key_path.write_text(key)
    return partial


def _groups(source: FileSource, units: list[Path]) -> list[list[Path]]:
    """Consecutive units, a new group whenever the last one has reached its size."""
    if isinstance(source, TextbooksSource):
        return [units]  # chapters of one book may lie in several files
    groups: list[list[Path]] = [[]]
    size = 0
    for unit in units:
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += sum(file.stat().st_size for file in _files_of(unit))
    return groups


def _files_of(unit: Path) -> list[Path]:
    """A unit's files: itself, or for a repository's folder all that it holds (links are not followed)."""
    if not unit.is_dir():
        return [unit]
    return sorted(file for file in unit.rglob("*") if file.is_file() and not file.is_symlink())


def files_digest(source: Source, root: Path) -> str:
    """What a corpus of this source would name as its `files`."""
    return _units_digest(source, source_units(source, root.resolve()))


def _units_digest(source: Source, units: list[Path]) -> str:
    files = [(unit, file) for unit in units for file in _files_of(unit)]
    if isinstance(source, MdsSource):
        # What a shard holds is said by the index beside it.
        indexes = sorted({unit.parent / "index.json" for unit in units})
        files += [(index, index) for index in indexes if index.is_file() and index not in units]
    # Above the limit hashing would cost more than it protects from; a changed file changes its time.
    by_content = sum(file.stat().st_size for _, file in files) <= CHECKSUM_LIMIT
    marks = [
        [
            str(file.relative_to(unit.parent)),
            file_digest(file) if by_content else [file.stat().st_size, file.stat().st_mtime_ns],
        ]
        for unit, file in files
    ]
    return digest(marks)


def _counts_of(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    assert manifest is not None
    counts: dict[str, Any] = manifest["counts"]
    return counts
