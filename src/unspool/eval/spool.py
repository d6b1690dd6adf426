"""Prompts that were made for their hashes, kept on disk until they are asked.

In: questions with their token ids. Out: the same again.
Promise: no more memory than a number per prompt; the file has no name, so that nothing of it is left when the process
ends in whatever way. What is not in it (the disk is full, the file has grown to its limit, the run was killed after
its prompts were listed) is simply made again.
Price: about half a megabyte of disk for a prompt of 128K tokens.
"""

import pickle
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from unspool.eval.task import Asked

# More than a suite of 6,500 prompts of 64K tokens takes.
MOST_BYTES = 2 << 30
# Text and ids come in long repeats where it matters; higher levels cost more than they save.
_LEVEL = 1

Made = tuple[Asked, np.ndarray]


class Spool:
    def __init__(self, folder: Path, *, most_bytes: int = MOST_BYTES) -> None:
        # Beside the results and not in /tmp, which is memory on some machines.
        self._file: Any = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._most_bytes = most_bytes
        self._end = 0
        self._places: dict[Hashable, tuple[int, int]] = {}
        self._packer, self._unpacker = zstandard.ZstdCompressor(level=_LEVEL), zstandard.ZstdDecompressor()

    def put(self, key: Hashable, made: Made) -> None:
        if self._file is None:
            return
        asked, ids = made
        packed = self._packer.compress(pickle.dumps((asked, ids), protocol=pickle.HIGHEST_PROTOCOL))
        if self._end + len(packed) > self._most_bytes:
            return
        try:
            self._file.seek(self._end)
            self._file.write(packed)
            self._file.flush()
        except OSError:
            self.close()
            return
        self._places[key] = self._end, len(packed)
        self._end += len(packed)

    def take(self, key: Hashable) -> Made | None:
        """What was put there, once: prompts are asked once."""
        if key not in self._places:
            return None
        start, size = self._places.pop(key)
        self._file.seek(start)
        # Written by this process into a file that no other can open.
        made: Made = pickle.loads(self._unpacker.decompress(self._file.read(size)))
        return made

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._places.clear()
