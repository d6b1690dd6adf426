"""What RULER's prompts are made of: words, essays, questions with their documents, and a counter of tokens.

In: a tokenizer, the paths a user gave by name. Out: `Sources`.
Promise: without any path everything ships with the package or is generated, so the suite runs offline.
Price: what is remembered saves time and never changes a prompt: it depends on its key alone.
"""

from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from unspool.base.errors import ConfigError, DataError
from unspool.base.lookup import lookup
from unspool.data.wording import FEWEST_WORDS
from unspool.eval.ruler.counting import Counter
from unspool.eval.ruler.essays import Essay
from unspool.eval.ruler.qa_data import Questions, read_hotpotqa, read_squad
from unspool.eval.ruler.qa_made import made_hotpotqa, made_squad
from unspool.eval.ruler.wording import OWN, needle
from unspool.eval.text import heldout_documents
from unspool.eval.wording import Wording

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
