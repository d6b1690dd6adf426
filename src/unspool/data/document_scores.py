"""Scores of the documents of a corpus, as an artifact: `scores-00000.arrow` with the columns id, tokens and gain.

The documents are in the order of the corpus. A document's gain depends on its tokens and the scorer alone. Finished
gains are appended to a file in the `.partial` folder, so a killed build continues and ends with the same bytes.
"""

import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from unspool.core.artifacts import FORMAT, KEY, clean_up, digest, open_work, read_manifest, seal, stale_reason
from unspool.core.checked_lines import CheckedLines, intact_lines
from unspool.core.errors import DataError
from unspool.core.formatting import format_duration
from unspool.core.progress import long_bar
from unspool.core.sizes import format_count, format_size
from unspool.data.corpus.store import CorpusReader, open_corpus
from unspool.data.packing.store import ArrowFile, open_arrow
from unspool.data.strategies.long_context_gain import LongContextGain, document_gain, is_scored

logger = logging.getLogger(__name__)

KIND = "document_scores"
SCORES_FILE = "scores-00000.arrow"
_WORK = "work"
_DONE = "gains.jsonl"
_SCHEMA = pa.schema([("id", pa.string()), ("tokens", pa.int64()), ("gain", pa.float64())])
_BATCH = 1 << 16  # documents


class Scorer(Protocol):
    """A language model, as scoring uses it."""

    @property
    def digest(self) -> str:
        """Hash of everything that losses depend on, besides the tokens."""

    def losses(self, tokens: np.ndarray) -> np.ndarray:
        """Return −log p of every token except the first, in nats."""


class DocumentScores(NamedTuple):
    """The columns of a scores folder."""

    ids: Any  # pyarrow strings
    lens: np.ndarray  # int64, tokens
    gains: np.ndarray  # float64, nats per token


def score_documents(config: LongContextGain, corpus: Path, out_dir: Path, *, scorer: Scorer) -> dict[str, Any]:
    """Write the gain of every document of a corpus to `out_dir`, unless it is up to date; return the counts."""
    name = out_dir.name
    inputs = {"corpus": digest((read_manifest(corpus) or {}).get("files")), "model": scorer.digest}
    settings = config.scoring()
    reason = stale_reason(out_dir, kind=KIND, inputs=inputs, settings=settings)
    if reason is None:
        clean_up(out_dir, (_WORK,))
        logger.info(f"scores of {name}: up to date")
        counts: dict[str, Any] = (read_manifest(out_dir) or {})["counts"]
        return counts
    reader = open_corpus(corpus)
    partial = out_dir.with_name(out_dir.name + ".partial")
    key = digest([inputs, settings, FORMAT])
    open_work(partial, key, key_file=f"{_WORK}/{KEY}", label=f"scores of {name}", describe=_describe_work)
    scored = np.flatnonzero(is_scored(reader.lens, config.short))
    logger.info(
        f"scores of {name}: {len(scored):,} documents with {format_size(config.long)} and {format_size(config.short)} "
        f"of context ({reason}); {len(reader) - len(scored):,} of at most {format_size(config.short)} have gain 0"
    )
    gains = np.zeros(len(reader))
    gains[scored] = _gains(config, reader, scored, scorer, partial / _WORK / _DONE, label=f"scores of {name}")
    _write(partial / SCORES_FILE, reader, gains)
    counts = {
        "documents": len(reader),
        "tokens": reader.num_tokens,
        "documents_up_to_short": len(reader) - len(scored),
        "tokens_scored": int(reader.lens[scored].sum()),
        "mean_gain": float((gains * reader.lens).sum() / reader.num_tokens),
    }
    seal(partial, out_dir, kind=KIND, inputs=inputs, settings=settings, counts=counts, unlisted=(_WORK,))
    return counts


def read_scores(folder: Path) -> DocumentScores:
    """Read a scores folder."""
    table = open_arrow(folder / SCORES_FILE).read_all()
    return DocumentScores(table["id"], table["tokens"].to_numpy(), table["gain"].to_numpy())


def _gains(
    config: LongContextGain, reader: CorpusReader, scored: np.ndarray, scorer: Scorer, path: Path, *, label: str
) -> np.ndarray:
    """Return the gains of the documents `scored`; those in the file of finished ones are not computed again."""
    kept = intact_lines(path)[: len(scored)]
    gains = [float(json.loads(line)["gain"]) for line in kept]
    if gains:
        logger.info(f"{label}: {len(gains):,} of {len(scored):,} documents are scored already")
    left = scored[len(gains) :]
    total, done, began = int(reader.lens[left].sum()), 0, time.monotonic()
    with CheckedLines(path, kept) as lines, long_bar(f"{label}, tokens", total) as advance:
        for doc in left.tolist():
            gain = document_gain(scorer.losses, reader[doc], long=config.long, short=config.short)
            if not math.isfinite(gain):
                raise DataError(
                    f"{label}: document {reader.id(doc)!r} has a gain of {gain}, because the model's losses are not "
                    "finite; check the weights of score.model, or use another one."
                )
            lines.append(json.dumps({"gain": gain}).encode() + b"\n")
            gains.append(gain)
            done += len(reader[doc])
            speed = done / max(time.monotonic() - began, 1e-9)
            advance(
                len(reader[doc]),
                f"{format_count(round(speed))} tokens/s  eta {format_duration((total - done) / speed)}",
            )
    return np.array(gains, dtype=np.float64)


def _write(path: Path, reader: CorpusReader, gains: np.ndarray) -> None:
    file = ArrowFile(path, _SCHEMA)
    for docs in _ranges(len(reader)):
        ids = pa.array([reader.id(doc) for doc in docs], pa.string())
        part = slice(docs.start, docs.stop)
        columns = [ids, pa.array(reader.lens[part], pa.int64()), pa.array(gains[part])]
        file.write(pa.record_batch(columns, schema=_SCHEMA))
    file.finish()


def _ranges(count: int) -> Iterator[range]:
    return (range(start, min(start + _BATCH, count)) for start in range(0, count, _BATCH))


def _describe_work(partial: Path) -> str | None:
    count = len(intact_lines(partial / _WORK / _DONE))
    return f"{count:,} scored documents" if count else None
