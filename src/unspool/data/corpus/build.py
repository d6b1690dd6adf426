"""Build a corpus: a source's documents, tokenized, as an artifact.

The folder gets `docs-00000.arrow` …, a manifest and, if needed, `quarantine.jsonl` and `left_out.jsonl`. The work runs
as a datatrove pipeline on any executor. The source is divided into tasks, and each task writes one file, so the result
does not depend on the number of workers.

A source may drop documents by their gzip ratio (ratios.py) and insert tasks into documents.

Every record is in the corpus, in quarantine, or counted under the reason why it was skipped. After a kill, the next
build repeats only missing and damaged tasks. A partial folder made from other inputs or settings is renamed and kept.
With a limit, documents are kept in order up to and including the one that reaches it.
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datatrove.pipeline.base import PipelineStep

from unspool.core.artifacts import (
    CHECKSUM_LIMIT,
    FORMAT,
    KEY,
    clean_up,
    digest,
    file_digest,
    open_work,
    read_manifest,
    remove,
    seal,
    stale_reason,
)
from unspool.core.errors import ConfigError, DataError
from unspool.data.corpus.check import no_text
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.executors import check_engine, completed_tasks, forget_task, run_tasks, started
from unspool.data.corpus.ledger import QUARANTINE, Ledger, check_bad_share, describe_bad, load_ledgers
from unspool.data.corpus.pipeline import (
    WORK,
    ReadDocuments,
    SpillRecords,
    TokenizeDocuments,
    WriteDocuments,
    find_task_damage,
    ledger_path,
    shard_path,
    sizes_path,
    write_sums,
)
from unspool.data.corpus.ratios import FOLDER, MeasureRatios, RatioFilter, load_ratios
from unspool.data.corpus.store import keep_first
from unspool.data.lengths import histogram
from unspool.data.sources.aggregation.insert import describe_tasks
from unspool.data.sources.base import Source
from unspool.data.sources.gzip_ratio import TOO_HIGH, TOO_LOW, middle_bounds
from unspool.data.sources.spill import is_intact
from unspool.data.tokenize.chat import build_chat_encoder
from unspool.data.tokenize.chat_template import TEMPLATE_FILE
from unspool.data.tokenize.encoder import build_encoder, choose_route, forget_engines

# Importing this takes seconds, in every worker process.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

KIND = "corpus"
# Format of the files in the work folder. Increase it when it changes, so that no old folder is resumed.
WORK_FORMAT = 3


def build_corpus(
    source: Source,
    out_dir: Path,
    *,
    tokenizer: PreTrainedTokenizerFast,
    root: Path,
    engine: EngineConfig,
    seed: int,
) -> dict[str, Any]:
    """Write the documents of `source` to `out_dir`, unless it is up to date; return the counts of its manifest."""
    check_engine(engine)
    name = out_dir.name
    root, out_dir = root.resolve(), out_dir.resolve()  # a task may run in another folder
    units = source.units(root)
    _check_streaming(source, units, label=f"corpus {name}")
    encoder = build_encoder(tokenizer)
    inputs = {"files": _digest_units(source, units), "tokenizer": encoder.digest}
    chat = build_chat_encoder(tokenizer, source.chat_template(root), source=name) if source.is_chat else None
    if chat is not None:
        inputs["template"] = chat.template.digest
    # The location of the files and the number of bad records allowed do not change the result.
    unchanging = {*source.path_keys, "max_bad"}
    settings: dict[str, Any] = {"source": source.model_dump(mode="json", exclude=unchanging)}
    if source.depends_on_seed:
        settings["seed"] = seed
    reason = stale_reason(out_dir, kind=KIND, inputs=inputs, settings=settings)
    if reason is None:
        clean_up(out_dir, (WORK,))
        logger.info(f"corpus {name}: up to date")
        manifest = read_manifest(out_dir)
        assert manifest is not None
        counts: dict[str, Any] = manifest["counts"]
        return counts

    partial = out_dir.with_name(out_dir.name + ".partial")
    key = digest([inputs, settings, FORMAT, WORK_FORMAT])
    open_work(partial, key, key_file=f"{WORK}/{KEY}", label=f"corpus {name}", describe=_describe_work)
    _forget_damaged(partial, label=f"corpus {name}")
    if chat is None:
        encoder = choose_route(encoder, list(source.sample(units, seed)))
    forget_engines()
    logger.info(f"corpus {name}: tokenizing with {encoder.route} ({reason})")
    ledger = Ledger()
    limit = source.token_limit
    masked = source.has_loss_masks(units)
    with started(engine):
        tasks = _divide(source, units, partial, engine, seed=seed, label=f"corpus {name}")
        chosen = _ratio_filter(source, tasks, partial, engine, seed=seed, label=f"corpus {name}")
        read_options: dict[str, Any] = {"root": root, "seed": seed, "vocabulary": len(tokenizer), "chat": chat}
        steps = [
            ReadDocuments(source, tasks, encoder, ledger=ledger, ratio_filter=chosen, **read_options),
            TokenizeDocuments(encoder),
            WriteDocuments(partial, limit, ledger=ledger, masked=masked, measured=chosen is not None),
        ]
        sizes = _run(steps, partial, len(tasks), engine, limit, label=f"corpus {name}")

    _check_unchanged(source, units, inputs["files"], partial)
    total = load_ledgers(ledger_path(partial, rank) for rank in range(len(sizes)))
    total.publish(partial)
    check_bad_share(total, name=name, max_bad=source.max_bad_share, listed=partial / QUARANTINE)
    documents = sum(map(len, sizes))
    _report_choices(total, chosen, documents, label=f"corpus {name}")
    if not documents:
        raise no_text(name, total)
    tokens, chars, trained = np.concatenate(sizes).T
    counts = {
        "documents": documents,
        "tokens": int(tokens.sum()),
        "characters": int(chars.sum()),
        "units": len(units),
        "tokenized_with": encoder.route,
        "lengths": histogram(tokens),
        **total.counts(documents=documents),
    }
    if chosen is not None:
        bounds = {"low": chosen.bounds.low, "high": chosen.bounds.high}
        counts["gzip_ratio"] = {name: bound for name, bound in bounds.items() if 0 < bound < math.inf}
    if masked:
        counts["trained_tokens"] = int(trained.sum())
    if chat is not None:
        (partial / TEMPLATE_FILE).write_text(chat.template.text, encoding="utf-8")
    if total.bad:
        logger.warning(f"corpus {name}: {len(total.bad)} unreadable records in {QUARANTINE}: {describe_bad(total.bad)}")
    seal(partial, out_dir, kind=KIND, inputs=inputs, settings=settings, counts=counts, unlisted=(WORK,))
    return counts


def _divide(
    source: Source, units: list[Path], partial: Path, engine: EngineConfig, *, seed: int, label: str
) -> list[Any]:
    """Divide the source into read tasks; first sort its input on disk if the source requires it."""
    spill_tasks = source.spill_tasks(units)
    if not spill_tasks:
        return source.divide(units, seed)
    folder = partial / WORK / "spill"
    for rank in completed_tasks(folder):
        if not is_intact(folder, rank):
            forget_task(folder, rank)
    num_parts = source.num_parts(units)
    step = SpillRecords(source, spill_tasks, folder, num_parts=num_parts, seed=seed)
    logger.info(f"{label}: sorting {len(units)} files on disk, in {len(spill_tasks)} tasks")
    count = len(spill_tasks)
    run_tasks([step], folder, ranks=range(count), num_tasks=count, engine=engine, label=f"{label}, sorting")
    return source.divide_spilled(folder, num_parts)


def _check_streaming(source: Source, units: list[Path], *, label: str) -> None:
    middle = source.ratio_filter is not None and source.ratio_filter.middle is not None
    if middle and source.content_marks(units) is not None:
        raise ConfigError(
            f"{label}: gzip_ratio.middle reads all documents before the first is used, but this source is streamed "
            "from the Hub; download it and set path to its folder, or set gzip_ratio.min and max."
        )


def _ratio_filter(
    source: Source, tasks: list[Any], partial: Path, engine: EngineConfig, *, seed: int, label: str
) -> RatioFilter | None:
    """Return the filter of a source by gzip ratio; if its bounds depend on all documents, measure them first."""
    config = source.ratio_filter
    if config is None:
        return None
    if config.given_bounds is not None:
        return RatioFilter(config.given_bounds)
    assert config.middle is not None
    folder = partial / WORK / FOLDER
    for rank in completed_tasks(folder):
        if load_ratios(folder, rank) is None:
            logger.warning(f"{label}: the gzip ratios of task {rank} are damaged; measuring its documents again")
            forget_task(folder, rank)
    logger.info(f"{label}: measuring the gzip ratio of all documents")
    step = MeasureRatios(source, tasks, folder, seed=seed)
    count = len(tasks)
    run_tasks([step], folder, ranks=range(count), num_tasks=count, engine=engine, label=f"{label}, gzip ratios")
    measured = [load_ratios(folder, rank) for rank in range(count)]
    ratios = np.concatenate([np.zeros(0), *(each for each in measured if each is not None)])
    return RatioFilter(middle_bounds(ratios, config.middle), folder)


def _report_choices(total: Ledger, chosen: RatioFilter | None, documents: int, *, label: str) -> None:
    """Log what the gzip ratio dropped and which tasks were inserted; DataError if no document is left."""
    if chosen is not None:
        between = chosen.bounds.describe()
        dropped = f"{total.filtered[TOO_LOW]:,} below and {total.filtered[TOO_HIGH]:,} above"
        if not documents and total.filtered[TOO_LOW] + total.filtered[TOO_HIGH]:
            raise DataError(f"{label}: no document has a gzip ratio {between} ({dropped}); change gzip_ratio.")
        logger.info(f"{label}: kept {documents:,} documents with a gzip ratio {between}; dropped {dropped}")
    if total.tasks:
        logger.info(f"{label}: {describe_tasks(total.tasks)}")


def _run(
    steps: list[PipelineStep], partial: Path, num_tasks: int, engine: EngineConfig, limit: int | None, *, label: str
) -> list[np.ndarray]:
    """Run the tasks, all at once or, with a limit, as many at a time as there are workers; return document sizes."""
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
    # Other workers, or an earlier run with more workers, may have written shards beyond the limit.
    kept_paths = {shard_path(partial, rank) for rank, kept_sizes in enumerate(sizes) if len(kept_sizes)}
    for path in set(partial.glob("docs-*")) - kept_paths:
        if path.suffix == ".arrow":
            write_sums(partial, int(path.stem.removeprefix("docs-")), with_shard=False)
        path.unlink()
    return sizes


def _cut_to_limit(partial: Path, rank: int, tokens_left: int | None) -> np.ndarray:
    """Truncate a shard after the document that reaches `tokens_left`; return the sizes of its documents."""
    sizes: np.ndarray = np.load(sizes_path(partial, rank))
    if tokens_left is None:
        return sizes
    count = int(np.searchsorted(np.cumsum(sizes[:, 0]), tokens_left)) + 1
    if count < len(sizes):
        keep_first(shard_path(partial, rank), count)
        write_sums(partial, rank)
    return sizes[:count]


def _describe_work(partial: Path) -> str | None:
    tasks = len(completed_tasks(partial / WORK))
    return f"{tasks} completed tasks" if tasks else None


def _forget_damaged(partial: Path, *, label: str) -> None:
    """Mark tasks whose files have changed as incomplete, so that they run again."""
    ranks = completed_tasks(partial / WORK)
    with ThreadPoolExecutor() as pool:  # hashing uses all cores
        found = list(pool.map(lambda rank: find_task_damage(partial, rank), ranks))
    for rank, damage in zip(ranks, found, strict=True):
        if damage is not None:
            logger.warning(f"{label}: unfinished work of task {rank} is damaged ({damage}); reading its input again")
            forget_task(partial / WORK, rank)


def _check_unchanged(source: Source, units: list[Path], digest_before: str, partial: Path) -> None:
    """Reject a build whose files changed or vanished while they were read; the next build reads all files again."""
    try:
        changed = _digest_units(source, units) != digest_before
    except OSError:
        remove(partial)
        raise
    if changed:
        remove(partial)
        raise DataError(
            f"corpus {partial.stem}: a file of the source changed during reading; stop the program that "
            "writes to it, and run the same command again."
        )


def files_digest(source: Source, root: Path) -> str:
    """Return the digest of a source's files, as in the inputs of its corpus."""
    return _digest_units(source, source.units(root.resolve()))


def _digest_units(source: Source, units: list[Path]) -> str:
    known = source.content_marks(units)
    if known is not None:
        return digest(known)
    files = source.input_files(units)
    # Above the limit, hashing costs too much; the modification time then reveals a changed file.
    by_content = sum(file.stat().st_size for _, file in files) <= CHECKSUM_LIMIT
    marks = [
        [
            str(file.relative_to(unit.parent)),
            file_digest(file) if by_content else [file.stat().st_size, file.stat().st_mtime_ns],
        ]
        for unit, file in files
    ]
    return digest(marks)
