"""Checks of generated pairs and summaries, with a reason for every rejection.

Support is measured by shared words. An answer that uses quite different words than its text is rejected, and a false
statement in the text's own words passes. The optional judge detects such statements.
"""

import hashlib
import re
from functools import lru_cache

import numpy as np
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.utils.hashing import HashConfig

from unspool.evals.scoring.rouge import stem
from unspool.synthesis.config import ChecksConfig
from unspool.synthesis.templates import Pair

# Repetition: at most this share of an answer's word n-grams may occur earlier in it. Names and set phrases recur, but
# whole sentences do not.
REPEAT_NGRAM, MAX_REPEATED = 5, 0.2
# A short answer may contain only words of its question: "Red." answers "Was it red or blue?".
MAX_ECHO_WORDS = 2
SUMMARY_FACTOR = 3  # maximum words of a summary, as a multiple of those of an answer
_SEEN = r"snippet|passage|excerpt|extract|paragraph|section|fragment|chunk|segment"
_POINTING = r"above|below|given|provided|following|here|shown|quoted|preceding|presented|supplied"
_REFERS = re.compile(
    rf"\b(?:the|this|that|given|provided|following|above|our|your)\s+(?:\w+\s+)?(?:{_SEEN})s?\b"
    rf"|\b(?:{_SEEN}|text|part|document|story)s?\s+(?:{_POINTING})\b"
    rf"|\b(?:{_POINTING})\s+(?:text|part|document|story)\b"
    r"|\b(?:in|from|of)\s+(?:this|the)\s+part\s+of\s+the\s+(?:text|document|book|story)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_FUNCTION_WORD_LIST = """
a about above after again against all also am an and any are as at be because been before being below between
both but by can could did do does doing done down during each either else ever every few for from further had
has have having he her here hers herself him himself his how however i if in into is it its itself just may me
might more most much must my myself neither no nor not now of off on once one only or other others our ours out
over own per said same say says she should since so some such than that the their theirs them themselves then
there these they this those though through thus to too under until up upon us very was we were what when where
whether which while who whom whose why will with within without would yet you your yours yourself
"""
_FUNCTION_WORDS = frozenset(_FUNCTION_WORD_LIST.split())


def pair_reason(pair: Pair, part: str, checks: ChecksConfig) -> str | None:
    """Reason to reject a pair about a part of a document, or None."""
    if len(words(pair.answer)) > checks.answer_words:
        return "too_long"
    if repeats(pair.question) or repeats(pair.answer):
        return "repeats"
    if echoes(pair):
        return "echoes"
    if refers(pair.question) or refers(pair.answer):
        return "refers"
    return None if supports(part, pair.answer, checks.support) else "unsupported"


def summary_reason(summary: str, document: str, checks: ChecksConfig) -> str | None:
    """Reason to reject a summary of a document, or None."""
    if len(words(summary)) > SUMMARY_FACTOR * checks.answer_words:
        return "too_long"
    if repeats(summary):
        return "repeats"
    if refers(summary):
        return "refers"
    return None if supports(document, summary, checks.support) else "unsupported"


def repeats(text: str) -> bool:
    """True if a text repeats itself, which is common in greedy decoding of weak models."""
    found = words(text)
    ngrams = [tuple(found[at : at + REPEAT_NGRAM]) for at in range(len(found) - REPEAT_NGRAM + 1)]
    return bool(ngrams) and 1 - len(set(ngrams)) / len(ngrams) > MAX_REPEATED


def echoes(pair: Pair) -> bool:
    """True if all content words of an answer are in its question."""
    answer = content_stems(pair.answer)
    return len(answer) > MAX_ECHO_WORDS and answer <= content_stems(pair.question)


def refers(text: str) -> bool:
    """True if a text mentions the snippet that its writer saw."""
    return _REFERS.search(text) is not None


def supports(text: str, answer: str, min_share: float) -> bool:
    """True if a text contains enough content words of an answer, and all its numbers."""
    known_numbers = set(_NUMBER.findall(text))
    if any(number not in known_numbers for number in _NUMBER.findall(answer)):
        return False
    return support(text, answer) >= min_share


def support(text: str, answer: str) -> float:
    """Share of an answer's content words (by stem) that a text contains; 1 if the answer has none."""
    wanted = content_stems(answer)
    return len(wanted & content_stems(text)) / len(wanted) if wanted else 1.0


def content_stems(text: str) -> set[str]:
    return {_stem(word) for word in {*words(text)} - _FUNCTION_WORDS}


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


@lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    return stem(word)


# Near-duplicates by MinHash: datatrove's signatures propose candidates, exact Jaccard similarity decides

SHINGLE_WORDS = 3
# datatrove's default of 14 buckets of 8 hashes proposes 56% of pairs with similarity 0.7. These settings propose 94%,
# and 99.9% at similarity 0.8.
BUCKETS, HASHES_PER_BUCKET = 32, 7
_SHINGLE_WORD = re.compile(r"[^\W_]+")


class _Signatures(MinhashDedupSignature):  # type: ignore[misc]
    """datatrove's signatures of given shingles, without its spaCy tokenizer and output folder."""

    def __init__(self) -> None:
        self.config = MinhashConfig(
            n_grams=SHINGLE_WORDS,
            num_buckets=BUCKETS,
            hashes_per_bucket=HASHES_PER_BUCKET,
            hash_config=HashConfig(hash_fc="sha1"),
        )
        self.num_hashes = BUCKETS * HASHES_PER_BUCKET
        self._parameters = None


class NearDuplicates:
    """Detects near-duplicates: texts whose Jaccard similarity of word triples is at least `threshold`.

    Uses about 1 KB of memory per text.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._signatures = _Signatures()
        self._buckets: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(BUCKETS)]
        self._texts: list[np.ndarray] = []

    def has_similar(self, text: str) -> bool:
        shingles = _shingles(text)
        candidates = {
            number
            for bucket, signature in zip(self._buckets, self._signature(shingles), strict=True)
            for number in bucket.get(signature, ())
        }
        return any(_jaccard(shingles, self._texts[number]) >= self._threshold for number in candidates)

    def add(self, text: str) -> None:
        shingles = _shingles(text)
        for bucket, signature in zip(self._buckets, self._signature(shingles), strict=True):
            bucket.setdefault(signature, []).append(len(self._texts))
        self._texts.append(shingles)

    def _signature(self, shingles: np.ndarray) -> list[tuple[int, ...]]:
        with np.errstate(over="ignore"):
            return [tuple(part) for part in self._signatures.get_signature(shingles.reshape(-1, 1))]


def _shingles(text: str) -> np.ndarray:
    """Sorted hashes of a text's word triples. For a shorter text, the hash of all its words."""
    found = _SHINGLE_WORD.findall(text.lower())
    triples = {" ".join(found[at : at + SHINGLE_WORDS]) for at in range(max(1, len(found) - SHINGLE_WORDS + 1))}
    hashes = (int.from_bytes(hashlib.blake2b(triple.encode(), digest_size=4).digest()) for triple in triples)
    return np.unique(np.fromiter(hashes, dtype=np.uint64, count=len(triples)))


def _jaccard(first: np.ndarray, second: np.ndarray) -> float:
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)
