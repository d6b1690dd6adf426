"""Which chunks are most like a given one, by the cosine of their vectors.

In: chunks as token arrays, and a callable that makes a vector of each. Out: a `Retriever` (retrieval.py).
Promise: exact, every chunk is compared; equal cosines are ordered by chunk number.
Price: 4 bytes per chunk and dimension, and the model's time for every chunk, once to index it and once to ask.
Vectors come from matrix products, whose last digits differ between machines, so results can as well.
Elsewhere: the vectors (model/embed.py, given as an argument).
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from unspool.base.progress import progress_bar
from unspool.data.retrieval import best


class Embed(Protocol):
    """Makes a vector of each text, float32[n, d]."""

    def __call__(self, texts: Sequence[np.ndarray], /) -> np.ndarray: ...

    @property
    def digest(self) -> str:
        """Of the model: other vectors, other rows."""


# Chunks whose vectors are made, and compared, at a time.
_EMBED_AT_ONCE = 64
_COMPARE_AT_ONCE = 1 << 16


class Embeddings:
    def __init__(self, chunks: Sequence[np.ndarray], embed: Embed) -> None:
        self._embed = embed
        parts = []
        with progress_bar("embeddings", len(chunks)) as advance:
            for start in range(0, len(chunks), _EMBED_AT_ONCE):
                part = chunks[start : start + _EMBED_AT_ONCE]
                parts.append(_unit(embed(part)))
                advance(len(part))
        self._vectors = np.concatenate(parts)

    def search(self, queries: Sequence[np.ndarray], k: int, hidden: slice) -> list[np.ndarray]:
        asked = _unit(self._embed(queries))
        kept: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in queries]  # numbers and scores, by block
        begin, end, _ = hidden.indices(len(self._vectors))
        for start in range(0, len(self._vectors), _COMPARE_AT_ONCE):
            block = self._vectors[start : start + _COMPARE_AT_ONCE]
            scores = asked @ block.T
            scores[:, max(begin - start, 0) : max(end - start, 0)] = -np.inf
            for found, of_query in zip(kept, scores, strict=True):
                top = best(of_query, k)
                found.append((top + start, of_query[top]))
        return [_merge(found, k) for found in kept]


def _merge(found: list[tuple[np.ndarray, np.ndarray]], k: int) -> np.ndarray:
    numbers = np.concatenate([part for part, _ in found])
    scores = np.concatenate([part for _, part in found])
    in_order = np.argsort(numbers)
    numbers, scores = numbers[in_order], scores[in_order]
    merged: np.ndarray = numbers[best(scores, k)]
    return merged


def _unit(vectors: np.ndarray) -> np.ndarray:
    vectors = np.asarray(vectors, dtype=np.float32)
    # A vector of zeros is like nothing, rather than not a number.
    unit: np.ndarray = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return unit
