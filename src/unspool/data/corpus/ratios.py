"""The gzip ratios of a source: a first pass that measures every document, and the decision which ones to keep.

The first pass is needed for `gzip_ratio: {middle: …}` only. Each task writes the ratios of its documents to one file
with a checksum. The second pass reads the same documents in the same order, and takes their ratios from that file.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datatrove.pipeline.base import PipelineStep

from unspool.core.artifacts import write_atomic
from unspool.core.errors import DataError
from unspool.data.sources.base import Document, Filtered, Source, read_items
from unspool.data.sources.gzip_ratio import Bounds, gzip_ratio

FOLDER = "ratios"


def _path(folder: Path, rank: int) -> Path:
    return folder / f"ratios-{rank:05d}.txt"


def save_ratios(folder: Path, rank: int, ratios: list[float]) -> None:
    data = np.array(ratios, dtype="<f8").tobytes()
    write_atomic(_path(folder, rank), f"{hashlib.sha256(data).hexdigest()}\n{data.hex()}\n")


def load_ratios(folder: Path, rank: int) -> np.ndarray | None:
    """Read the ratios of a task's documents; None if the file is missing or damaged."""
    try:
        checksum, _, rest = _path(folder, rank).read_text(encoding="ascii").partition("\n")
        data = bytes.fromhex(rest)
    except (OSError, ValueError):
        return None
    return np.frombuffer(data, dtype="<f8") if hashlib.sha256(data).hexdigest() == checksum else None


class MeasureRatios(PipelineStep):  # type: ignore[misc]
    """Task r measures every document with text of the r-th task of a source."""

    name = "gzip ratios"
    type = "READER"

    def __init__(self, source: Source, tasks: list[Any], folder: Path, *, seed: int) -> None:
        super().__init__()
        self.source = source
        self.tasks = tasks
        self.folder = folder
        self.seed = seed

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        items = read_items(self.source, self.tasks[rank], self.seed)
        save_ratios(
            self.folder, rank, [gzip_ratio(item.text) for item in items if isinstance(item, Document) and item.text]
        )


class RatioFilter(NamedTuple):
    """Decides by bounds which documents to keep. With a folder, ratios come from the first pass."""

    bounds: Bounds
    folder: Path | None = None

    def ratios(self, rank: int) -> Iterator[float] | None:
        """Return the measured ratios of a task's documents, in order; None without a first pass."""
        if self.folder is None:
            return None
        found = load_ratios(self.folder, rank)
        if found is None:
            raise DataError(f"the gzip ratios of task {rank} are missing or damaged; run the same command again.")
        return map(float, found)

    def apply(self, document: Document, measured: Iterator[float] | None) -> tuple[Document | Filtered, float]:
        """Return a document, or why it is dropped, and its ratio."""
        ratio = gzip_ratio(document.text) if measured is None else next(measured, None)
        if ratio is None:
            raise _changed(f"at {document.id}")
        reason = self.bounds.reason_to_drop(ratio)
        return (document if reason is None else Filtered(document.id, reason)), ratio

    def check_all_used(self, measured: Iterator[float] | None, rank: int) -> None:
        """Raise DataError if a task had more documents in the first pass, so that ratios belong to others."""
        if measured is not None and next(measured, None) is not None:
            raise _changed(f"in task {rank}")


def _changed(where: str) -> DataError:
    return DataError(
        f"a file of the source changed while it was read ({where}); stop the program that writes to it, and run the "
        "same command again."
    )
