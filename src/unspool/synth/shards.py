"""Conversations as compressed JSON lines, in files of a size that can be read side by side."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zstandard

SHARD_BYTES = 64 << 20  # before compression


def write_shards(folder: Path, records: Iterable[bytes]) -> int:
    """Write `conversations-00000.jsonl.zst` …; returns how many files."""
    number = -1
    room = 0
    file: Any = None
    try:
        for record in records:
            if file is None or room <= 0:
                if file is not None:
                    file.close()
                number += 1
                # `close` ends the frame, so that a reader can tell a whole file from one that breaks off.
                raw = (folder / f"conversations-{number:05d}.jsonl.zst").open("wb")
                file = zstandard.ZstdCompressor(level=3).stream_writer(raw)
                room = SHARD_BYTES
            file.write(record)
            room -= len(record)
    finally:
        if file is not None:
            file.close()
    return number + 1
