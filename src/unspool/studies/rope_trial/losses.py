"""Measure the losses of one candidate, and keep those that are measured.

A candidate has one file of lines, one line per window. Its name has a digest of all that the losses depend on besides
the window, so an interrupted or repeated trial measures only what is missing.
"""

import gc
import json
import re
from collections.abc import Sequence
from pathlib import Path

from unspool.core.checked_lines import CheckedLines, intact_lines
from unspool.core.errors import ConfigError
from unspool.core.progress import progress_bar
from unspool.core.sizes import format_size
from unspool.evals.backends.base import BackendOptions, build_backend
from unspool.studies.rope_trial.ranking import is_finite, range_means
from unspool.studies.rope_trial.windows import Windows

_NO_NAME = re.compile(r"[^A-Za-z0-9_.]+")
MAX_NAME = 60


def file_name(label: str, key: str) -> str:
    """Return the name of a candidate's files and stage."""
    return f"{_NO_NAME.sub('-', label).strip('-')[:MAX_NAME]}-{key[:8]}"


def read_losses(path: Path, windows: Windows) -> dict[str, tuple[float, ...]]:
    """Return the stored losses of the given windows, in their order."""
    stored = {line["window"]: tuple(line["losses"]) for line in map(json.loads, intact_lines(path))}
    return {name: stored[name] for name in windows.names if name in stored}


def measure(options: BackendOptions, windows: Windows, edges: Sequence[int], path: Path, *, label: str) -> None:
    """Measure the windows that the file lacks, one after the other, and append each at once.

    Raises ConfigError if the model refuses the RoPE method, or if a loss is not finite.
    """
    kept = intact_lines(path)
    done = read_losses(path, windows)
    backend = build_backend(options)
    # The same for every candidate and after an interruption, so that the same kernels compute all losses.
    backend.planned_tokens = len(windows) * windows.tokens_each
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with progress_bar(label, len(windows)) as advance, CheckedLines(path, kept) as file:
            advance(len(done), f"windows of {format_size(windows.tokens_each)}")
            for name, ids in zip(windows.names, windows.ids, strict=True):
                if name in done:
                    continue
                losses = backend.window_losses(ids)
                if not is_finite(losses):
                    raise ConfigError("its loss is not finite")
                line = {"window": name, "losses": range_means(losses, edges)}
                file.append(json.dumps(line).encode() + b"\n")
                advance(1, f"windows of {format_size(windows.tokens_each)}")
    finally:
        backend.stop()
        del backend
        gc.collect()  # frees the model's memory before the next one is loaded
