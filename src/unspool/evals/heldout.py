"""Held-out text: what haystacks are made of and loss is measured on.

In: files as a recipe names them, or none for the shipped book. Out: documents, in file order.
Price: only as much is read as the evaluations could use, counted in characters.
Elsewhere: file formats (data/readers).
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from unspool.core.artifacts import file_digest
from unspool.data.sources.base import FileSource, read_strictly
from unspool.data.sources.jsonl import text_or_jsonl

SHIPPED = "assets/demo/heldout.jsonl.zst"
# Longer than tokens are on average in any language we know of, so that enough text is read.
CHARS_PER_TOKEN = 8
# Below this, reading less saves no time worth having.
FEWEST_CHARS = 4_000_000


def heldout_source(text: str | None) -> FileSource:
    return text_or_jsonl(str(files("unspool") / SHIPPED) if text is None else text)


def heldout_files(text: str | None, root: Path) -> list[Path]:
    """The files; ConfigError if there are none."""
    return heldout_source(text).units(root)


def heldout_digest(text: str | None, root: Path) -> dict[str, str]:
    return {path.name: file_digest(path) for path in heldout_files(text, root)}


def heldout_documents(text: str | None, root: Path, *, tokens: int) -> list[str]:
    """Documents with text for at least `tokens` tokens, or all there are."""
    documents: list[str] = []
    missing = max(FEWEST_CHARS, tokens * CHARS_PER_TOKEN)
    for document in read_strictly(heldout_source(text), heldout_files(text, root)):
        if missing <= 0:
            break
        documents.append(document.text)
        missing -= len(document.text)
    return documents


# Both ends of a prompt as text, for people who read samples.


# The question stands at the end.
START_TOKENS, END_TOKENS = 100, 150


def excerpt(tokenizer: Any, length: int, lengths: Sequence[int], *parts: np.ndarray) -> dict[str, Any]:
    """Nothing for a prompt that is not of the longest of `lengths`."""
    if length < max(lengths):
        return {}
    ids = np.concatenate(parts).tolist()
    if len(ids) <= START_TOKENS + END_TOKENS:
        return {"prompt": {"start": tokenizer.decode(ids), "end": "", "cut_tokens": 0}}
    start, end = tokenizer.decode(ids[:START_TOKENS]), tokenizer.decode(ids[-END_TOKENS:])
    return {"prompt": {"start": start, "end": end, "cut_tokens": len(ids) - START_TOKENS - END_TOKENS}}
