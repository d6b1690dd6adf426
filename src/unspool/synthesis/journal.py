"""What was finished so far: a line per job, and the conversations that were kept; both only grow.

Promise: a conversation is on disk before the line that says so. After a kill, what follows the last whole line is cut
off, so that nothing is there twice and nothing that a line speaks of is missing. A journal of other inputs or settings
is thrown away; the replies are not in it, so nothing is asked again.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from unspool.core.artifacts import write_atomic

JOURNAL, EXAMPLES, KEY = "journal.jsonl", "examples.jsonl", "key"
Line = dict[str, Any]


class Journal:
    """The work folder of one set: `with Journal(folder, key) as journal`; `lines` are those of earlier runs."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        if not (folder / KEY).is_file() or (folder / KEY).read_text() != key:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write_atomic(folder / KEY, key)
        self.lines = _whole_lines(folder / JOURNAL)
        end = max((line["end"] for line in self.lines), default=0)
        # In this order: examples beyond the last line are made again.
        _shorten(folder / EXAMPLES, end)
        self._lines = (folder / JOURNAL).open("ab", buffering=0)
        self._examples = (folder / EXAMPLES).open("ab", buffering=0)
        self._end = end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._lines.close()
        self._examples.close()

    def add(self, line: Line, example: dict[str, Any] | None) -> None:
        if example is not None:
            data = (json.dumps(example, ensure_ascii=False) + "\n").encode()
            _write_journal(self._examples, data)
            self._end += len(data)
        line = {**line, "end": self._end}
        _write_journal(self._lines, (json.dumps(line) + "\n").encode())
        self.lines.append(line)

    def examples(self) -> Iterator[tuple[Line, bytes]]:
        """Every conversation that was kept, with its line, in order."""
        with (self.folder / EXAMPLES).open("rb") as file:
            for line in (line for line in self.lines if line["kept"]):
                yield line, file.readline()


def _whole_lines(path: Path) -> list[Line]:
    """The lines, numbered from 0; the file is cut after the last one that is whole."""
    found: list[Line] = []
    good = 0
    if path.is_file():
        with path.open("rb") as file:
            for data in file:
                try:
                    line = json.loads(data)
                except ValueError:
                    break
                if not data.endswith(b"\n") or line.get("n") != len(found):
                    break
                found.append(line)
                good += len(data)
        _shorten(path, good)
    return found


def _shorten(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.truncate(size)


def _write_journal(file: Any, data: bytes) -> None:
    while data:
        data = data[file.write(data) or 0 :]
