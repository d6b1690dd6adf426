"""Decontamination: detect texts that share a word n-gram with an evaluation."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from unspool.core.errors import DataError
from unspool.core.progress import progress_bar
from unspool.data.sources.base import Bad, Document
from unspool.data.sources.files import find_files
from unspool.data.sources.jsonl import ENDINGS, read_jsonl
from unspool.data.sources.text import TextSource
from unspool.evals.config import EvalConfig
from unspool.evals.eval_plan import EvalPlan
from unspool.evals.heldout import heldout_documents
from unspool.evals.suites import suite_of

# Ignore shorter evaluation texts, because half of all documents would contain them.
MIN_WORDS = 6
_WORD = re.compile(r"[^\W_]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
# Words to collect before removing duplicate n-grams; contexts of one suite repeat each other.
_BATCH_WORDS = 1 << 22


class NgramIndex:
    """Hashes of all n-grams of evaluation texts: `ngram` consecutive words, or all words of a shorter text.

    Case, punctuation and spacing do not matter. Uses eight bytes per n-gram. Two different n-grams have the same hash
    with a probability of about 1e-19.
    """

    def __init__(self, ngram: int) -> None:
        self.ngram = ngram
        self._known: dict[int, np.ndarray] = {}  # sorted hashes by number of words
        self._new: dict[int, list[np.ndarray]] = {}
        self._num_new_words = 0
        self.num_texts = 0

    def add(self, texts: Iterable[str]) -> None:
        for text in texts:
            words = _hash_words(text)
            length = min(len(words), self.ngram)
            if length < MIN_WORDS:
                continue
            self.num_texts += 1
            self._new.setdefault(length, []).append(_hash_ngrams(words, length))
            self._num_new_words += len(words)
            if self._num_new_words >= _BATCH_WORDS:
                self._merge()

    def __len__(self) -> int:
        self._merge()
        return sum(map(len, self._known.values()))

    def overlaps(self, text: str) -> bool:
        """True if a text shares an n-gram with an evaluation."""
        self._merge()
        words = _hash_words(text)
        return any(
            _any_in(_hash_ngrams(words, length), known) for length, known in self._known.items() if len(words) >= length
        )

    def _merge(self) -> None:
        if not self._num_new_words:
            return
        for length, arrays in self._new.items():
            known = [self._known[length]] if length in self._known else []
            self._known[length] = np.unique(np.concatenate([*known, *arrays]))
        self._new, self._num_new_words = {}, 0


def _hash_words(text: str) -> np.ndarray:
    found = _WORD.findall(text.lower())
    return np.fromiter(map(_hash, found), dtype=np.uint64, count=len(found))


def _hash_ngrams(words: np.ndarray, length: int) -> np.ndarray:
    """Hashes of every `length` consecutive words."""
    count = len(words) - length + 1
    ngrams = np.zeros(max(0, count), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for at in range(length):
            ngrams = ngrams * _FACTOR + words[at : at + count]
    return ngrams


def _any_in(ngrams: np.ndarray, known: np.ndarray) -> bool:
    places = np.minimum(np.searchsorted(known, ngrams), len(known) - 1)
    return bool((known[places] == ngrams).any())


@lru_cache(maxsize=1 << 18)
def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest())


def eval_texts(evals: Sequence[EvalConfig], tokenizer: Any, *, seed: int, root: Path) -> Iterator[str]:
    """Questions, answers and contexts of all prompts, and the held-out text of haystacks."""
    for config in evals:
        heldout = suite_of(config).heldout(config)
        if heldout is not None:
            yield from heldout_documents(heldout.text, root, tokens=heldout.tokens)
    units = EvalPlan(evals, tokenizer, seed=seed, root=root).units
    with progress_bar("decontamination: read evaluations", len(units)) as advance:
        for unit in units:
            yield from unit.planned.texts(unit)
            advance(1)


def file_texts(paths: Sequence[str]) -> Iterator[str]:
    """Texts of files. For JSONL files: every string in a record, at any depth."""
    for given in paths:
        for path in find_files(given, Path(), kind="text", endings=("",)):
            yield from _record_texts(path) if path.name.endswith(ENDINGS) else _plain_texts(path)


def _plain_texts(path: Path) -> Iterator[str]:
    for item in TextSource(kind="text", path=str(path)).read_units([path]):
        if not isinstance(item, Document):
            raise DataError(f"decontaminate.files: {path} cannot be read as text; use a UTF-8 text or JSONL file.")
        yield item.text


def _record_texts(path: Path) -> Iterator[str]:
    for found in read_jsonl(path, lambda _, record: list(_strings(record))):
        if isinstance(found, Bad):
            raise DataError(f"decontaminate.files: {path}, {found.record}: {found.detail}; correct or remove it.")
        yield from found


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
