"""Read JSON, JSON lines and single values of result files.

Missing and non-finite values become None. An unreadable file raises a DataError that names it.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unspool.core.artifacts import MANIFEST, WORK_ENDINGS
from unspool.core.errors import DataError
from unspool.core.sizes import parse_size


def published(folder: Path) -> list[Path]:
    """Published subfolders, sorted by name. Unfinished folders have no manifest or a suffix."""
    if not folder.is_dir():
        return []
    found = (path.parent for path in folder.glob(f"*/{MANIFEST}"))
    return sorted(path for path in found if not path.name.endswith(WORK_ENDINGS))


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text; restore the file.") from error


def json_object(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is missing or not JSON ({error}); run the recipe again to rebuild it.") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{path} should hold a JSON object; run the recipe again to rebuild it.")
    return loaded


def json_lines(path: Path, whole: bool = True) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line. With `whole=False`, a partial last line is ignored."""
    lines = read_text(path).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            loaded = json.loads(line)
        except ValueError as error:
            if not whole and number == len(lines):
                return
            raise DataError(f"{path}: line {number} is not JSON ({error}).") from error
        if not isinstance(loaded, dict):
            raise DataError(f"{path}: line {number} should be a JSON object.")
        yield number, loaded


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if value is None:
        return None
    found = float(value)
    return found if math.isfinite(found) else None


def whole(value: Any) -> int | None:
    return None if value is None else int(value)


def size(value: Any) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except ValueError:
        return None


def optional_text(value: Any) -> str | None:
    return None if value is None else str(value)
