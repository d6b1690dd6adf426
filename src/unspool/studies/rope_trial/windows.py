"""The text of a trial: windows of the target length to score, and what is left of the text to train on."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from unspool.core.artifacts import ASIDE, digest, file_digest
from unspool.core.errors import ConfigError, DataError
from unspool.core.progress import progress_bar
from unspool.core.rng import rng_for
from unspool.core.sizes import format_size
from unspool.data.sources.base import read_strictly
from unspool.evals.heldout import CHARS_PER_TOKEN, heldout_files, heldout_source
from unspool.evals.prompts import encode, opening_ids, prompt_hash

# Windows per document, as long as there are other documents. More documents make the windows more independent; some
# documents must be left to train on.
PER_DOCUMENT = 2
MIN_WINDOWS = 2  # one window has no variation


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows of token ids, the same for every candidate."""

    ids: list[np.ndarray] = field(repr=False)
    documents: list[str] = field(repr=False)
    """By window: the digest of the document that it is from."""
    tokens_each: int

    @property
    def names(self) -> list[str]:
        """One digest per window. Losses are compared only between equal digests."""
        return [prompt_hash(window)[:16] for window in self.ids]

    def __len__(self) -> int:
        return len(self.ids)


def draw_windows(text: str | None, tokenizer: Any, *, length: int, count: int, seed: int) -> Windows:
    """Draw `count` windows of `length` tokens that do not overlap, each within one document, in file order."""
    opening = opening_ids(tokenizer)
    body = length - len(opening)
    chosen: dict[str, np.ndarray] = {}  # the documents, cut to whole windows: [windows, body]
    longest = 0
    for document in _with_progress(_documents(text)):
        if len(document.encode()) < body:  # a token has at least one byte
            continue
        ids = encode(tokenizer, document)
        longest = max(longest, len(ids))
        if len(ids) >= body:
            chosen[_name(document)] = _cut(ids, body, seed)
        if sum(min(PER_DOCUMENT, len(each)) for each in chosen.values()) >= count:
            break
    available = sum(map(len, chosen.values()))
    if available < count:
        raise DataError(_too_short(text, length, count, available, longest))
    # First one window of each document, then a second one, and so on.
    rounds = [(at, name) for name, each in chosen.items() for at in range(len(each))]
    taken = sorted(rounds, key=lambda place: place[0])[:count]
    return Windows(
        ids=[np.concatenate([opening, chosen[name][at]]) for at, name in taken],
        documents=[name for _, name in taken],
        tokens_each=length,
    )


def _cut(ids: np.ndarray, body: int, seed: int) -> np.ndarray:
    """Cut a document into windows at a random offset, in random order: not every window starts a document."""
    rng = rng_for(seed, "rope-trial", len(ids), body)
    first = int(rng.integers(len(ids) % body + 1))
    return rng.permutation(ids[first : first + len(ids) // body * body].reshape(-1, body))


def _too_short(text: str | None, length: int, count: int, available: int, longest: int) -> str:
    source = "the bundled held-out text" if text is None else f"`text` {text}"
    size = format_size(length)
    if available >= MIN_WINDOWS:
        return (
            f"{source} has only {available} windows of {size} tokens, and {count} are wanted; give "
            f"`windows={available}`, a shorter context or more long documents as `text`."
        )
    found = f"{available or 'no'} window{'s' * (available != 1)} of {size} tokens"
    has = f"; its longest document has {longest:,}" if longest else ", because its documents are shorter"
    return (
        f"{source} has {found}{has}. A trial needs at least {MIN_WINDOWS} windows; give a shorter context or longer "
        "documents as `text`."
    )


def write_rest(text: str, windows: Windows, path: Path, *, tokens: int) -> None:
    """Write the documents that no window is from to a JSONL file, until they are enough for `tokens` tokens."""
    missing = tokens * CHARS_PER_TOKEN
    rest = (each for each in _documents(text) if each and _name(each) not in windows.documents)
    first = next(rest, None)
    if first is None:
        raise ConfigError(
            f"every document of {text} is needed for the windows, so none is left to train on; give `train_text`, or "
            "more documents as `text`."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ASIDE)
    with aside.open("w", encoding="utf-8") as file:
        for document in chain([first], rest):
            if missing <= 0:
                break
            file.write(json.dumps({"text": document}) + "\n")
            missing -= len(document)
    aside.replace(path)


def files_of(text: str) -> dict[str, str]:
    """Return the digest of each file of a text."""
    return {str(path): file_digest(path) for path in heldout_files(text, Path.cwd())}


def _with_progress(documents: Iterator[str]) -> Iterator[str]:
    with progress_bar("documents read", None) as advance:
        for document in documents:
            yield document
            advance(1)


def _documents(text: str | None) -> Iterator[str]:
    for document in read_strictly(heldout_source(text), heldout_files(text, Path.cwd())):
        yield document.text


def _name(document: str) -> str:
    return digest(document)
