"""What RULER's prompts are made of: noise, essays, words, questions with documents, and a token counter."""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from unspool.core.config import lookup
from unspool.core.errors import ConfigError, DataError
from unspool.data.facts import FEWEST_WORDS
from unspool.evals.fill import Meter
from unspool.evals.heldout import heldout_documents
from unspool.evals.suites.ruler.qa_data import (
    QuestionSet,
    generate_hotpotqa,
    generate_squad,
    read_hotpotqa,
    read_squad,
)
from unspool.evals.wording import Wording

NOISE = "The lake is calm. The road is long. The bread is warm. Off we walk. Down the hill and home."
# Size units per line, so that the last line can be cut to meet a length.
PER_LINE = 16
# Files that users may give.
PATHS = {
    "haystack": "prose for the essay tasks: text or JSONL files",
    "words": "a word list, one word per line",
    "squad": "SQuAD: JSON as released, JSONL, or hub:ORG/NAME",
    "hotpotqa": "HotpotQA: JSON as released, JSONL, or hub:ORG/NAME",
    "hotpotqa_pool": "more documents for HotpotQA: JSONL with title and text",
}
_BUNDLED_WORDS = "assets/ruler_words.txt"
# Essays repeat after this many tokens, which is longer than any sensible prompt.
_ESSAY_TOKENS = 2_000_000
_SAMPLE_WORDS = 20_000
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]_]*$")
_SENTENCE_START = re.compile(r"[\"'“‘(\[_—-]*[A-Z0-9]")
_ABBREVIATIONS = re.compile(r"(mr|mrs|ms|dr|st|prof|sr|jr|vs|etc|e\.g|i\.e|no|vol|col|capt|gen|rev)\.", re.IGNORECASE)


def noise_lines(noise: str, size: int) -> list[str]:
    """Repeat the noise line `size / PER_LINE` times; the last line may be cut between words."""
    count, rest = divmod(size, PER_LINE)
    words = noise.split()
    cut = " ".join(words[: len(words) * rest // PER_LINE])
    return [noise] * count + ([cut] if cut else [])


def insert(pieces: list[str], positions: Sequence[int], facts: Sequence[str], separator: str) -> str:
    """Join pieces with facts inserted before the given positions, which are sorted."""
    joined: list[str] = []
    done = 0
    for position, fact in zip(positions, facts, strict=True):
        joined += [*pieces[done:position], fact]
        done = position
    return separator.join([*joined, *pieces[done:]])


@dataclass(frozen=True)
class Essay:
    """Prose as a haystack: its words, and where its sentences end."""

    words: list[str]
    ends: np.ndarray  # number of words up to each sentence end; the last is the number of all words

    @classmethod
    def of(cls, documents: Sequence[str]) -> "Essay":
        words = " ".join(documents).split()
        if not words:
            raise DataError("ruler: the haystack text is empty; give files with text.")
        pairs = zip(words, [*words[1:], "The"], strict=True)
        ends = [at for at, (word, after) in enumerate(pairs, 1) if _is_sentence_end(word, after)]
        if not ends or ends[-1] != len(words):
            ends.append(len(words))
        return cls(words, np.array(ends, dtype=np.int64))

    def excerpt(self, first: int, count: int) -> list[str]:
        """Return `count` words from word `first` on; the essay starts again at its end."""
        found = self.words[first : first + count]
        while len(found) < count:
            found += self.words[: count - len(found)]
        return found

    def sentence_ends(self, first: int, count: int) -> np.ndarray:
        """Return where sentences of an excerpt end, in words from its start; includes 0 and `count`."""
        rounds = (first + count) // len(self.words) + 1
        ends = (self.ends[None, :] + len(self.words) * np.arange(rounds)[:, None]).ravel() - first
        return np.concatenate([[0], ends[(ends > 0) & (ends < count)], [count]])


def _is_sentence_end(word: str, after: str) -> bool:
    if not _SENTENCE_END.search(word) or _ABBREVIATIONS.fullmatch(word.lstrip("\"'“‘(")):
        return False
    return bool(_SENTENCE_START.match(after))


class Sources:
    """A tokenizer and the data of all tasks; each is loaded at first use, from the user's files or bundled ones."""

    def __init__(self, tokenizer: Any, paths: Mapping[str, str], wording: Wording) -> None:
        for name in paths:
            lookup(PATHS, name, kind="ruler path")
        if "hotpotqa_pool" in paths and "hotpotqa" not in paths:
            raise ConfigError("ruler: paths.hotpotqa_pool adds documents to paths.hotpotqa; set paths.hotpotqa too.")
        self._tokenizer = tokenizer
        self._paths = paths
        self.wording = wording
        self._cache: dict[Hashable, int] = {}

    def count(self, text: str) -> int:
        return self._meter.count(text)

    def cached(self, key: Hashable, make: Callable[[], int]) -> int:
        """Compute a number once per key; it must depend on the key alone."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    @cached_property
    def _meter(self) -> Meter:
        prose = " ".join(self.essay.words[:_SAMPLE_WORDS])
        lines = [f"The number for {word}-{word} is {at:07}." for at, word in enumerate(self.words[:500])]
        return Meter(self._tokenizer, [prose, "\n".join(lines)])

    @cached_property
    def essay(self) -> Essay:
        return Essay.of(heldout_documents(self._paths.get("haystack"), Path(), tokens=_ESSAY_TOKENS))

    @cached_property
    def words(self) -> list[str]:
        path = self._paths.get("words", str(files("unspool") / _BUNDLED_WORDS))
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"ruler: cannot read the word list {path} ({error}); give a UTF-8 text file.") from error
        words = sorted(set(text.split()))
        if len(words) < FEWEST_WORDS:
            raise DataError(
                f"ruler: the word list {path} has {len(words)} different words; give {FEWEST_WORDS} or more."
            )
        return words

    @cached_property
    def squad(self) -> QuestionSet:
        path = self._paths.get("squad")
        return read_squad(path) if path else generate_squad()

    @cached_property
    def hotpotqa(self) -> QuestionSet:
        path = self._paths.get("hotpotqa")
        return read_hotpotqa(path, self._paths.get("hotpotqa_pool")) if path else generate_hotpotqa()
