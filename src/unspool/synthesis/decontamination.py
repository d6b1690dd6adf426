"""Keep evaluations out of training data: texts that share a run of words with them are refused.

In: texts of evaluations (questions, answers, contexts, files). Out: whether a text shares `ngram` words in a row with
any of them, or the whole of a shorter question or answer of at least `SHORTEST` words.
Promise: case, punctuation and spacing do not hide a copy. Two different runs of words have the same hash with a
probability of about 10⁻¹⁹ each.
Price: eight bytes of memory per run of words of the evaluations. Answers below `SHORTEST` words are not looked for:
half of all documents would hold them.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from unspool.core.errors import DataError
from unspool.core.progress import progress_bar
from unspool.data.sources import jsonl
from unspool.data.sources import text as text_source
from unspool.data.sources.base import Bad, Document
from unspool.data.sources.config import TextSource
from unspool.data.sources.files import find_files
from unspool.evals.config import EvalConfig
from unspool.evals.heldout import heldout_documents
from unspool.evals.plan import EvalPlan
from unspool.evals.suites import suite_of

SHORTEST = 6
_WORD = re.compile(r"[^\W_]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
# Runs gathered before doubles are thrown out: contexts of one suite repeat each other.
_BATCH = 1 << 22


class Evaluations:
    """The runs of words that must not be trained on."""

    def __init__(self, ngram: int) -> None:
        self.ngram = ngram
        self._runs: dict[int, np.ndarray] = {}
        self._new: dict[int, list[np.ndarray]] = {}
        self._held = 0
        self.texts = 0

    def add(self, text: str) -> None:
        """A text of an evaluation; one that is too short to tell anything is passed over."""
        hashes = _words(text)
        length = min(len(hashes), self.ngram)
        if length < SHORTEST:
            return
        self.texts += 1
        self._new.setdefault(length, []).append(_hash_runs(hashes, length))
        self._held += len(hashes)
        if self._held >= _BATCH:
            self._merge()

    def add_all(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.add(text)

    @property
    def num_runs(self) -> int:
        self._merge()
        return sum(map(len, self._runs.values()))

    def holds_part_of(self, text: str) -> bool:
        """Whether a text shares a run of words with an evaluation."""
        self._merge()
        hashes = _words(text)
        return any(
            _any_in(_hash_runs(hashes, length), known) for length, known in self._runs.items() if len(hashes) >= length
        )

    def _merge(self) -> None:
        if not self._held:
            return
        for length, arrays in self._new.items():
            known = [self._runs[length]] if length in self._runs else []
            self._runs[length] = np.unique(np.concatenate([*known, *arrays]))
        self._new, self._held = {}, 0


def _words(text: str) -> np.ndarray:
    found = _WORD.findall(text.lower())
    return np.fromiter(map(_hash, found), dtype=np.uint64, count=len(found))


def _hash_runs(words: np.ndarray, length: int) -> np.ndarray:
    """A hash of every `length` words in a row."""
    count = len(words) - length + 1
    runs = np.zeros(max(0, count), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for at in range(length):
            runs = runs * _FACTOR + words[at : at + count]
    return runs


def _any_in(runs: np.ndarray, known: np.ndarray) -> bool:
    """Whether one of the runs is among the known ones, which are sorted."""
    places = np.minimum(np.searchsorted(known, runs), len(known) - 1)
    return bool((known[places] == runs).any())


@lru_cache(maxsize=1 << 18)
def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest())


# The texts of evaluations: what a recipe's `evals` ask, and files of the user's.


def eval_texts(evals: Sequence[EvalConfig], tokenizer: Any, *, seed: int, root: Path) -> Iterator[str]:
    """Questions, answers and contexts of all prompts, and all held-out text that haystacks are made of."""
    for config in evals:
        heldout = suite_of(config).heldout(config)
        if heldout is not None:
            yield from heldout_documents(heldout.text, root, tokens=heldout.tokens)
    units = EvalPlan(evals, tokenizer, seed=seed, root=root).units
    with progress_bar("evaluations to keep out", len(units)) as advance:
        for unit in units:
            yield from unit.planned.texts(unit)
            advance(1)


def file_texts(paths: Sequence[str]) -> Iterator[str]:
    """Texts of files; of JSON lines every text in a record, however deep."""
    for given in paths:
        for path in find_files(given, Path(), kind="text", endings=("",)):
            if path.name.endswith(jsonl.ENDINGS):
                yield from _record_texts(path)
            else:
                yield from _plain_texts(path)


def _plain_texts(path: Path) -> Iterator[str]:
    source = TextSource.model_validate({"kind": "text", "path": str(path)})
    for item in text_source.read(source, [path], 0):
        if not isinstance(item, Document):
            raise DataError(f"decontaminate.files: {path} cannot be read as text.")
        yield item.text


def _record_texts(path: Path) -> Iterator[str]:
    for found in jsonl.records(path, lambda _, record: list(_texts(record))):
        if isinstance(found, Bad):
            raise DataError(f"decontaminate.files: {path}, {found.record}: {found.detail}; correct or remove it.")
        yield from found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
