"""Prose as a haystack: words in a row, with the places where sentences end.

In: documents. Out: `Essay`: any number of words from any sentence on, begun again where the text ends.
Promise: all white space is one space, as in RULER; facts are put between sentences.
Price: sentences are told by their punctuation and a short list of abbreviations, not by NLTK's trained model.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unspool.base.errors import DataError

_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]_]*$")
_SENTENCE_START = re.compile(r"[\"'“‘(\[_—-]*[A-Z0-9]")
_ABBREVIATIONS = re.compile(r"(mr|mrs|ms|dr|st|prof|sr|jr|vs|etc|e\.g|i\.e|no|vol|col|capt|gen|rev)\.", re.IGNORECASE)


@dataclass(frozen=True)
class Essay:
    words: list[str]
    ends: np.ndarray  # after how many words a sentence has ended; the last is the number of words

    @classmethod
    def of(cls, documents: Sequence[str]) -> "Essay":
        words = " ".join(documents).split()
        if not words:
            raise DataError("ruler: the haystack text is empty; give files with text.")
        following = [*words[1:], "The"]
        ends = [at for at, (word, after) in enumerate(zip(words, following, strict=True), 1) if _ends(word, after)]
        if not ends or ends[-1] != len(words):
            ends.append(len(words))
        return cls(words, np.array(ends, dtype=np.int64))

    def stretch(self, first: int, count: int) -> list[str]:
        """`count` words from word `first` on."""
        found = self.words[first : first + count]
        while len(found) < count:
            found += self.words[: count - len(found)]
        return found

    def borders(self, first: int, count: int) -> np.ndarray:
        """Where sentences end within a stretch, in words from its start; 0 and `count` are always among them."""
        rounds = (first + count) // len(self.words) + 1
        ends = (self.ends[None, :] + len(self.words) * np.arange(rounds)[:, None]).ravel() - first
        return np.concatenate([[0], ends[(ends > 0) & (ends < count)], [count]])


def _ends(word: str, after: str) -> bool:
    if not _SENTENCE_END.search(word) or _ABBREVIATIONS.fullmatch(word.lstrip("\"'“‘(")):
        return False
    return bool(_SENTENCE_START.match(after))
