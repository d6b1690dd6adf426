"""What RULER's prompts are made of: words, essays, questions with their documents, and a counter of tokens.

In: a tokenizer, the paths a user gave by name. Out: `Sources`.
Promise: without any path everything ships with the package or is generated, so the suite runs offline.
Price: what is remembered saves time and never changes a prompt: it depends on its key alone.
"""

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
from unspool.evals.heldout import heldout_documents
from unspool.evals.suites.ruler.fitting import Counter
from unspool.evals.suites.ruler.qa_data import Questions, made_hotpotqa, made_squad, read_hotpotqa, read_squad
from unspool.evals.suites.ruler.task_texts import OWN, needle
from unspool.evals.wording import Wording

# Prose as a haystack: words in a row, with the places where sentences end.


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


# What a user may bring, by name.
PATHS = {
    "haystack": "prose for the essay tasks: text or JSONL files",
    "words": "a word list, one word per line",
    "squad": "SQuAD: JSON as released, JSONL, or hub:ORG/NAME",
    "hotpotqa": "HotpotQA: JSON as released, JSONL, or hub:ORG/NAME",
    "hotpotqa_pool": "more documents for HotpotQA: JSONL with title and text",
}
_SHIPPED_WORDS = "assets/ruler_words.txt"
# Longer than any sensible prompt of essays; a longer one begins again.
_ESSAY_TOKENS = 2_000_000
_SAMPLE_CHARS = 100_000


class Sources:
    def __init__(self, tokenizer: Any, paths: Mapping[str, str], wording: Wording = OWN) -> None:
        for name in paths:
            lookup(PATHS, name, kind="ruler path")
        if "hotpotqa_pool" in paths and "hotpotqa" not in paths:
            raise ConfigError("ruler: paths.hotpotqa_pool needs paths.hotpotqa, whose documents it adds to.")
        self._tokenizer = tokenizer
        self._paths = paths
        self.wording = wording
        self._memory: dict[Hashable, int] = {}

    def count(self, text: str) -> int:
        return self._counter.count(text)

    def remembered(self, key: Hashable, make: Callable[[], int]) -> int:
        if key not in self._memory:
            self._memory[key] = make()
        return self._memory[key]

    @cached_property
    def _counter(self) -> Counter:
        prose = " ".join(self.essay.words[: _SAMPLE_CHARS // 5])
        fact = needle(OWN, "niah_single_1", "numbers")
        lines = [fact(f"{word}-{word}", f"{at:07}") for at, word in enumerate(self.words[:500])]
        return Counter(self._tokenizer, [prose, "\n".join(lines)])

    @cached_property
    def essay(self) -> Essay:
        text = self._paths.get("haystack")
        return Essay.of(heldout_documents(text, Path(), tokens=_ESSAY_TOKENS))

    @cached_property
    def words(self) -> list[str]:
        path = self._paths.get("words")
        try:
            text = Path(path or str(files("unspool") / _SHIPPED_WORDS)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"ruler: the word list {path} cannot be read ({error}); give a UTF-8 text file.") from error
        words = sorted(set(text.split()))
        if len(words) < FEWEST_WORDS:
            raise DataError(
                f"ruler: the word list {path} has {len(words)} different words; give {FEWEST_WORDS} or more."
            )
        return words

    @cached_property
    def squad(self) -> Questions:
        path = self._paths.get("squad")
        return read_squad(path) if path else made_squad()

    @cached_property
    def hotpotqa(self) -> Questions:
        path = self._paths.get("hotpotqa")
        return read_hotpotqa(path, self._paths.get("hotpotqa_pool")) if path else made_hotpotqa()


def load(tokenizer: Any, paths: Mapping[str, str], wording: Wording = OWN) -> Sources:
    """What the user brought is read at once, so that a wrong file is known before any work."""
    sources = Sources(tokenizer, paths, wording)
    if "haystack" in paths:
        assert sources.essay
    if "words" in paths:
        assert sources.words
    if "squad" in paths:
        assert sources.squad
    if "hotpotqa" in paths:
        assert sources.hotpotqa
    return sources
