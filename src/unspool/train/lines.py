"""JSON lines that each name the step they belong to, cut back to a checkpoint.

Elsewhere: writing them (growing_file.py).
"""

import json
from pathlib import Path

from unspool.base.artefact import write_atomic


def keep_lines(path: Path, done: int) -> None:
    """Drop lines of steps after `done`, which will be made again, and a last one that a kill cut short."""
    if path.is_file():
        kept = [line for line in _lines(path) if (step := _step_of(line)) is not None and step <= done]
        write_atomic(path, "".join(kept))


def has_step(path: Path, step: int) -> bool:
    return path.is_file() and any(_step_of(line) == step for line in _lines(path))


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None
