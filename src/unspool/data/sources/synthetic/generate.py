"""Make the documents of a synthetic source: how many, how long, of which task, and each one fitted to its length.

In: a source, an encoder, sentences. Out: documents with their tokens.
Promise: document i depends on the seed, i, the source's settings, the tokenizer and the prose alone, so parts can be
made anywhere in any order. None is longer than planned, and nearly all have at least `LEAST` of the planned tokens.
One in `VERIFY_EVERY` is solved again (verify.py); a wrong one ends the work.
Price: a document is made and tokenised again until its length is right: short ones two or three times, long ones once
or twice.
Elsewhere: what a document says (draft.py and the tasks), running parts (data/steps.py).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from unspool.core.errors import DataError
from unspool.core.rng import rng_for
from unspool.core.sizes import format_size
from unspool.data.sources.config import SyntheticSource
from unspool.data.sources.synthetic import TASKS
from unspool.data.sources.synthetic.draft import compose, draw_layout
from unspool.data.sources.synthetic.solvers.reading import starts_question
from unspool.data.sources.synthetic.verify import verify

# Tokens of one part: enough to outweigh a worker's start, small enough to lose little when killed.
PART_TOKENS = 2 << 20
# Share of the planned tokens that a document must have, and that is aimed at.
LEAST, AIM = 0.96, 0.983
MOST_ATTEMPTS = 40
VERIFY_EVERY = 100
# Documents are planned in blocks, so that the plan of the first ones does not depend on how many there are.
PLAN_BLOCK = 4096
SAMPLED_THEMES = 8
# Before anything is known of a document.
CHARS_PER_TOKEN = 3.0
# A longer document is preceded by a small one, which tells how many characters its tokens have.
PROBE_ABOVE = 4096
PROBE_SHARE = 1 / 12

Encode = Callable[[str], np.ndarray]


class Plan(NamedTuple):
    """For each document its length in tokens and its task."""

    lengths: np.ndarray
    tasks: list[str]


class Made(NamedTuple):
    task: str
    text: str
    tokens: np.ndarray


def plan_documents(source: SyntheticSource, seed: int) -> Plan:
    """Lengths spread evenly over their logarithm, until `source.tokens` are expected."""
    names = list(source.tasks)
    shares = np.array([source.tasks[name] for name in source.tasks])
    shortest, longest = source.length
    lengths: list[np.ndarray] = []
    tasks: list[np.ndarray] = []
    total = 0.0
    while total < source.tokens:
        rng = rng_for(seed, "synthetic", "plan", len(lengths))
        drawn = np.exp(rng.uniform(np.log(shortest), np.log(longest + 1), size=PLAN_BLOCK)).astype(np.int64)
        lengths.append(np.clip(drawn, shortest, longest))
        tasks.append(rng.choice(len(names), p=shares / shares.sum(), size=PLAN_BLOCK))
        total += AIM * lengths[-1].sum()
    every = np.concatenate(lengths)
    count = int(np.searchsorted(AIM * np.cumsum(every), source.tokens)) + 1
    return Plan(every[:count], [names[at] for at in np.concatenate(tasks)[:count].tolist()])


def sample_texts(source: SyntheticSource, chars: int, seed: int) -> Iterator[str]:
    """A document of each task and a few themes, for trying out tokenizers."""
    for task in source.tasks:
        for number in range(SAMPLED_THEMES):
            style = rng_for(seed, "synthetic", "sample", task, number)
            layout = draw_layout(style, with_prose=False)
            yield compose(TASKS[task].choose(style), layout, chars, [], style)[0]


def divide(plan: Plan) -> list[range]:
    """Consecutive documents of about `PART_TOKENS` together."""
    parts = (np.cumsum(plan.lengths) - plan.lengths) // PART_TOKENS
    starts = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(parts)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def make_documents(
    plan: Plan, part: Sequence[int], encode: Encode, prose: Sequence[str], seed: int
) -> Iterator[tuple[int, Made]]:
    """The documents of one part, each with its number."""
    for index in part:
        made = make_document(plan.tasks[index], int(plan.lengths[index]), encode, prose, seed, index)
        if index % VERIFY_EVERY == 0:
            verify(made.task, made.text, f"{made.task}:{index}")
        yield index, made


def make_document(task: str, length: int, encode: Encode, prose: Sequence[str], seed: int, index: int) -> Made:
    """One document of at most `length` tokens and not much less."""
    style = rng_for(seed, "synthetic", index, "style")
    layout = draw_layout(style, with_prose=bool(prose))
    build = TASKS[task].choose(style)

    def attempt(number: int, chars: float) -> tuple[str, int]:
        return compose(build, layout, int(chars), prose, rng_for(seed, "synthetic", index, number))

    chars = AIM * length * CHARS_PER_TOKEN
    if length > PROBE_ABOVE:
        text, context = attempt(0, max(PROBE_ABOVE * CHARS_PER_TOKEN, PROBE_SHARE * chars))
        chars = AIM * length * context / len(encode(text[:context]))
    best: Made | None = None
    tried: dict[bool, tuple[float, int]] = {}  # the last attempt that was too long, and the last that was not
    for number in range(1, MOST_ATTEMPTS + 1):
        text, _ = attempt(number, chars)
        tokens = encode(text)
        if len(tokens) <= length and (best is None or len(tokens) > len(best.tokens)):
            best = Made(task, text, tokens)
            if len(tokens) >= LEAST * length:
                break
        tried[len(tokens) > length] = (chars, len(tokens))
        chars = _next_size(chars, len(tokens), AIM * length, tried)
    if best is None:
        raise DataError(
            f"synthetic: no document of the task {task} is as short as {format_size(length)} tokens with this "
            "tokenizer; raise the shortest length."
        )
    return best


def _next_size(chars: float, num_tokens: int, wanted: float, tried: dict[bool, tuple[float, int]]) -> float:
    """Characters to try next: in proportion, or between an attempt that was too long and one that was not."""
    if len(tried) == 2:
        (less, fewer), (more, many) = tried[False], tried[True]
        between = less + (more - less) * (wanted - fewer) / (many - fewer)
        if less < between < more:
            return between
    return chars * wanted / num_tokens


# Sentences to stand between the facts of a document.


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
