"""Passages to fill contexts with: those most like a question that do not answer it.

In: passages, a question, its answers. Out: passages, the most like it first.
Promise: no distractor is one of the question's own passages or contains an answer; the order depends on passages and
question alone. A generated pool goes on for as long as a context wants.
Elsewhere: BM25 (data/retrieval.py).
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import count

import numpy as np

from unspool.data.retrieval import BM25, best
from unspool.eval.helmet.records import Item, Passage
from unspool.eval.metrics.normal import normalize

_WORD = re.compile(r"\w+")
# Beyond this many, how alike a passage is hardly matters any more, and sorting takes the time.
RANKED = 8192
# Scores are compared after rounding, so that a last digit that differs between machines changes no order.
STEPS = 1024

normalized = lru_cache(1 << 16)(normalize)


def has_answer(passage: Passage, answers: Collection[str]) -> bool:
    text = normalized(f"{passage.title} {passage.text}")
    return any(answer in text for answer in map(normalized, answers) if answer)


class Pool:
    def __init__(self, passages: Sequence[Passage], more: Callable[[int], Passage] | None = None) -> None:
        self.passages = list(passages)
        self._more = more

    @cached_property
    def _index(self) -> tuple[BM25, dict[str, int]]:
        words: dict[str, int] = {}
        chunks = [
            np.array([words.setdefault(word, len(words)) for word in _WORD.findall(f"{title} {text}".lower())])
            for title, text in self.passages
        ]
        return BM25(chunks, query_terms=None), words

    def ranked(self, question: str) -> Iterator[Passage]:
        """All passages: the most like the question first, then the rest in their own order, then generated ones."""
        bm25, words = self._index
        query = np.array([words[word] for word in _WORD.findall(question.lower()) if word in words], dtype=np.int64)
        scores = np.round(bm25.scores(query).astype(np.float64) * STEPS) if len(query) else np.zeros(len(self.passages))
        order = best(scores, RANKED)
        yield from (self.passages[at] for at in order)
        if len(order) < len(self.passages):
            used = set(order.tolist())
            yield from (passage for at, passage in enumerate(self.passages) if at not in used)
        if self._more is not None:
            yield from map(self._more, count())

    def distractors(self, item: Item) -> Iterator[Passage]:
        """What came with the question first, then the pool."""
        seen = {*item.gold, *item.others}
        yield from (one for one in item.others if not has_answer(one, item.answers))
        for one in self.ranked(item.question):
            if one not in seen and not has_answer(one, item.answers):
                yield one

    def gold_for(self, item: Item, among: int = 100) -> Passage | None:
        """For questions without passages: the one most like the question that has an answer."""
        for one, _ in zip(self.ranked(item.question), range(among), strict=False):
            if has_answer(one, item.answers):
                return one
        return None
