"""Materials of RULER's prompts: noise, essays, words, questions with documents, and a token counter."""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.resources import files
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

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
# Size units per line, so that the last line can be cut to fit a length.
PER_LINE = 16
# Files that users may provide.
PATHS = {
    "haystack": "prose for the essay tasks: text or JSONL files",
    "words": "a word list, one word per line",
    "squad": "SQuAD: JSON as released, JSONL, or hub:ORG/NAME",
    "hotpotqa": "HotpotQA: JSON as released, JSONL, or hub:ORG/NAME",
    "hotpotqa_pool": "more documents for HotpotQA: JSONL with title and text",
    "essays": "RULER's PaulGrahamEssays.json, split into sentences by NLTK",
    "wonderwords": "folder with the word lists of the Python package wonderwords",
    "english_words": "RULER's english_words.json",
}
WORD_LISTS = ("nounlist.txt", "adjectivelist.txt", "verblist.txt")
_BUNDLED_WORDS = "assets/ruler_words.txt"
# Essays repeat after this many tokens, which is longer than any realistic prompt.
_ESSAY_TOKENS = 2_000_000
_SAMPLE_WORDS = 20_000
_CACHED_SIZES = 8
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]_]*$")
_SENTENCE_START = re.compile(r"[\"'“‘(\[_—-]*[A-Z0-9]")
_ABBREVIATIONS = re.compile(r"(mr|mrs|ms|dr|st|prof|sr|jr|vs|etc|e\.g|i\.e|no|vol|col|capt|gen|rev)\.", re.IGNORECASE)

Made = TypeVar("Made")


def noise_lines(noise: str, size: int) -> list[str]:
    """Repeat the noise line `size / PER_LINE` times. The last line may be cut between words."""
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
    """Prose as a haystack: its words and sentence ends."""

    words: list[str]
    ends: np.ndarray  # number of words up to each sentence end; the last is the total

    @classmethod
    def of(cls, documents: Sequence[str]) -> "Essay":
        words = " ".join(documents).split()
        if not words:
            raise DataError("ruler: the haystack text is empty; use files that contain text.")
        pairs = zip(words, [*words[1:], "The"], strict=True)
        ends = [at for at, (word, after) in enumerate(pairs, 1) if _is_sentence_end(word, after)]
        if not ends or ends[-1] != len(words):
            ends.append(len(words))
        return cls(words, np.array(ends, dtype=np.int64))

    def excerpt(self, first: int, count: int) -> list[str]:
        """Return `count` words starting at word `first`. The essay repeats after its end."""
        found = self.words[first : first + count]
        while len(found) < count:
            found += self.words[: count - len(found)]
        return found

    def sentence_ends(self, first: int, count: int) -> np.ndarray:
        """Return the sentence ends of an excerpt, in words from its start, including 0 and `count`."""
        rounds = (first + count) // len(self.words) + 1
        ends = (self.ends[None, :] + len(self.words) * np.arange(rounds)[:, None]).ravel() - first
        return np.concatenate([[0], ends[(ends > 0) & (ends < count)], [count]])


def _is_sentence_end(word: str, after: str) -> bool:
    if not _SENTENCE_END.search(word) or _ABBREVIATIONS.fullmatch(word.lstrip("\"'“‘(")):
        return False
    return bool(_SENTENCE_START.match(after))


def split_sentences(text: str) -> list[str]:
    essay = Essay.of([text])
    return [" ".join(essay.words[start:end]) for start, end in pairwise([0, *essay.ends.tolist()])]


def nltk_sentences(text: str) -> list[str]:
    """Split a text like RULER. Raises ConfigError if NLTK or its model is missing."""
    try:
        found: list[str] = import_module("nltk.tokenize").sent_tokenize(text)
    except ImportError as error:
        raise ConfigError(
            "RULER splits its essays with NLTK, which is not installed; run `pip install nltk`."
        ) from error
    except LookupError as error:
        raise ConfigError(
            "RULER splits its essays with NLTK, whose model is missing; run `python -m nltk.downloader punkt_tab`."
        ) from error
    return found


class WordPairs(Sequence[str]):
    """All distinct "first-second" pairs in sorted order. Computed on access, because there are millions."""

    def __init__(self, firsts: Sequence[str], seconds: Sequence[str]) -> None:
        self._seconds = sorted(set(seconds))
        alike: list[list[str]] = []
        for head in sorted({f"{first}-" for first in firsts}):
            # Pairs of heads with a common start, such as "far-" and "far-off-", are interleaved in sorted order.
            if alike and head.startswith(alike[-1][0]):
                alike[-1].append(head)
            else:
                alike.append([head])
        # One head, which represents its pairs, or the pairs of several heads.
        self._groups = [
            heads[0] if len(heads) == 1 else sorted({head + second for head in heads for second in self._seconds})
            for heads in alike
        ]
        sizes = (len(self._seconds) if isinstance(group, str) else len(group) for group in self._groups)
        self._starts = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        at = bisect_right(self._starts, index) - 1
        group, place = self._groups[at], index - self._starts[at]
        return group + self._seconds[place] if isinstance(group, str) else group[place]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"ruler: cannot read {path} ({error}); use a UTF-8 text file.") from error


def _read_json(path: str) -> Any:
    try:
        return json.loads(_read_text(Path(path)))
    except ValueError as error:
        raise DataError(f"ruler: {path} is not JSON ({error}); correct the file.") from error


class Sources:
    """A tokenizer and the data of all tasks. Data is loaded on first use, from user files or bundled files."""

    def __init__(self, tokenizer: Any, paths: Mapping[str, str], wording: Wording) -> None:
        for name in paths:
            lookup(PATHS, name, kind="ruler path")
        if "hotpotqa_pool" in paths and "hotpotqa" not in paths:
            raise ConfigError("ruler: paths.hotpotqa_pool adds documents to paths.hotpotqa; also set paths.hotpotqa.")
        self._tokenizer = tokenizer
        self._paths = paths
        self.wording = wording
        self._cache: dict[Hashable, Any] = {}
        # A run uses few sizes, and splitting a long text takes seconds.
        self.sentences = lru_cache(_CACHED_SIZES)(self._sentences)

    def count(self, text: str) -> int:
        return self._meter.count(text)

    def cached(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Compute a value once per key. It must depend only on the key."""
        if key not in self._cache:
            self._cache[key] = make()
        found: Made = self._cache[key]
        return found

    @cached_property
    def _meter(self) -> Meter:
        prose = " ".join(self.essay.words[:_SAMPLE_WORDS])
        lines = [f"The number for {word}-{word} is {at:07}." for at, word in enumerate(self.words[:500])]
        return Meter(self._tokenizer, [prose, "\n".join(lines)])

    @cached_property
    def essay(self) -> Essay:
        if "essays" in self._paths:
            return Essay.of([" ".join(self._essay_words)])
        return Essay.of(heldout_documents(self._paths.get("haystack"), Path(), tokens=_ESSAY_TOKENS))

    @cached_property
    def _essay_words(self) -> list[str]:
        if "essays" not in self._paths:
            return self.essay.words
        text = _read_json(self._paths["essays"])
        if not isinstance(text, dict) or not isinstance(text.get("text"), str) or not text["text"].strip():
            raise DataError(f"ruler: {self._paths['essays']} is not RULER's file of essays: it has no text.")
        return re.sub(r"\s+", " ", text["text"]).split(" ")

    def _sentences(self, size: int) -> list[str]:
        """Sentences of the essay's first `size` words. The essay repeats after its end."""
        words = self._essay_words
        text = " ".join((words * -(-size // len(words)))[:size]).strip()
        return nltk_sentences(text) if "essays" in self._paths else split_sentences(text)

    @cached_property
    def _word_lists(self) -> list[list[str]] | None:
        """Nouns, adjectives and verbs of wonderwords."""
        folder = self._paths.get("wonderwords")
        if folder is None:
            return None
        texts = [_read_text(Path(folder) / name).removesuffix("\n") for name in WORD_LISTS]
        return [[line.rstrip() for line in text.split("\n")] for text in texts]

    @cached_property
    def word_pairs(self) -> "WordPairs":
        """Keys from which RULER draws: an adjective and a noun, or two built-in words."""
        nouns, adjectives = self._word_lists[:2] if self._word_lists else (self.words, self.words)
        return WordPairs(adjectives, nouns)

    @cached_property
    def listed_words(self) -> list[str]:
        """Words from which RULER draws a `cwe` list, if there are enough."""
        return sorted({word for each in self._word_lists for word in each}) if self._word_lists else self.words

    @cached_property
    def more_words(self) -> Sequence[str]:
        """Words from which RULER draws longer lists."""
        path = self._paths.get("english_words")
        return self.word_pairs if path is None else [str(word) for word in _read_json(path).values()]

    @cached_property
    def words(self) -> list[str]:
        path = self._paths.get("words", str(files("unspool") / _BUNDLED_WORDS))
        words = sorted(set(_read_text(Path(path)).split()))
        if len(words) < FEWEST_WORDS:
            raise DataError(
                f"ruler: the word list {path} has {len(words)} different words; at least {FEWEST_WORDS} are required."
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
