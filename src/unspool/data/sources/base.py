"""What readers hand on: documents, and what could not or should not become one.

Promise: a reader yields exactly one item for every record of its input, so that
records = documents + quarantined + filtered holds for every corpus. A file that breaks off counts as one
more quarantined record, since nobody can know how many it would have held.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Longer records are set aside: a book has 1 MB, and a runaway line must not fill the memory.
MAX_RECORD_BYTES = 64 << 20


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str  # system, user or assistant
    content: str


@dataclass(frozen=True, slots=True)
class Document:
    id: str  # "<file name>:<record number>", counted from 1 as editors count lines
    text: str
    tokens: np.ndarray | None = None  # uint32, where the source was tokenised already; `text` is then empty
    left_out: tuple[tuple[str, str], ...] = ()  # parts of a document that were skipped: (name, reason)
    messages: tuple[Message, ...] = ()  # of a conversation that is still to be written out; `text` is then empty
    loss_mask: np.ndarray | None = None  # bool, over target tokens (labels.py); None means all of them


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that cannot be read; it goes to the quarantine file."""

    file: str
    record: str  # "line 17", "record 3", "after line 40"
    reason: str  # one of a few words that can be counted, such as "invalid_utf8"
    detail: str  # a sentence for people


@dataclass(frozen=True, slots=True)
class Filtered:
    """A record that was read and left out on purpose, counted by its reason."""

    id: str
    reason: str  # such as "empty"


Item = Document | Bad | Filtered
