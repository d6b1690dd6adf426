"""Sentences to stand between the facts of a document.

In: texts. Out: sentences, in their order.
Promise: none of them could be taken for a fact or a question of any task, so prose never changes an answer.
"""

import re
from collections.abc import Iterable

from unspool.base.errors import DataError
from unspool.data.synthetic import TASKS
from unspool.data.synthetic.solvers.reading import starts_question

# Enough for variety; more would only cost start-up time, in every worker.
PROSE_CHARS = 2_000_000
SENTENCE_CHARS = (20, 400)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def load_prose(texts: Iterable[str]) -> list[str]:
    sentences: list[str] = []
    chars = 0
    for text in texts:
        flat = " ".join(text[: PROSE_CHARS - chars].split())
        sentences += [sentence for sentence in _SENTENCE_END.split(flat) if _is_plain(sentence)]
        chars += len(text)
        if chars >= PROSE_CHARS:
            break
    if not sentences:
        shortest, longest = SENTENCE_CHARS
        raise DataError(
            f"synthetic: the prose holds no sentence of {shortest} to {longest} characters; give it ordinary text."
        )
    return sentences


def _is_plain(sentence: str) -> bool:
    return (
        SENTENCE_CHARS[0] <= len(sentence) <= SENTENCE_CHARS[1]
        and not starts_question(sentence)
        and not any(task.reads(sentence) for task in TASKS.values())
    )
