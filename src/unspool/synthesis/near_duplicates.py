"""Near-copies among generated pairs, by datatrove's MinHash.

In: texts, in order. Out: whether one is almost the same as one that was kept before.
Promise: two texts whose word triples overlap (Jaccard) by less than the threshold are never taken for copies: MinHash
only proposes, the overlap decides. An overlap of 0.7 is proposed with probability 0.94, one of 0.8 with 0.999.
Price: about a kilobyte of memory per text that is kept.
"""

import hashlib
import re

import numpy as np
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.utils.hashing import HashConfig

_SHINGLE_WORD = re.compile(r"[^\W_]+")
TRIPLE = 3
# 14 groups of 8, datatrove's default, propose 56% of the pairs at 0.7; 32 groups of 7 propose 94%.
GROUPS, HASHES = 32, 7


class _Signatures(MinhashDedupSignature):  # type: ignore[misc]
    """datatrove's signatures of shingles that we hand over, so that neither spaCy nor an output folder is needed."""

    def __init__(self) -> None:
        self.config = MinhashConfig(
            n_grams=TRIPLE, num_buckets=GROUPS, hashes_per_bucket=HASHES, hash_config=HashConfig(hash_fc="sha1")
        )
        self.num_hashes = GROUPS * HASHES
        self._parameters = None


class NearCopies:
    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._signatures = _Signatures()
        self._groups: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(GROUPS)]
        self._kept: list[np.ndarray] = []

    def has_like(self, text: str) -> bool:
        shingles = _shingles(text)
        proposed = {
            number
            for group, part in zip(self._groups, self._parts(shingles), strict=True)
            for number in group.get(part, ())
        }
        return any(_overlap(shingles, self._kept[number]) >= self._threshold for number in proposed)

    def add(self, text: str) -> None:
        shingles = _shingles(text)
        for group, part in zip(self._groups, self._parts(shingles), strict=True):
            group.setdefault(part, []).append(len(self._kept))
        self._kept.append(shingles)

    def _parts(self, shingles: np.ndarray) -> list[tuple[int, ...]]:
        with np.errstate(over="ignore"):
            return [tuple(part) for part in self._signatures.get_signature(shingles.reshape(-1, 1))]


def _shingles(text: str) -> np.ndarray:
    """Hashes of a text's word triples, sorted; of a shorter text, of the whole of it."""
    found = _SHINGLE_WORD.findall(text.lower())
    triples = {" ".join(found[at : at + TRIPLE]) for at in range(max(1, len(found) - TRIPLE + 1))}
    hashes = (int.from_bytes(hashlib.blake2b(one.encode(), digest_size=4).digest()) for one in triples)
    return np.unique(np.fromiter(hashes, dtype=np.uint64, count=len(triples)))


def _overlap(one: np.ndarray, other: np.ndarray) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)
