"""Generate the documents of a `synthetic` source: plan number, lengths and tasks, then fit each document to its length.

Document i depends only on the seed, i, the source's settings, the tokenizer and the prose, so parts can be generated
anywhere in any order. No document is longer than planned, and nearly all have at least `LEAST` of the planned tokens. A
document is written and tokenized again until its length is right: two or three times if short, once or twice if long.
The tests solve generated documents in a second way and compare all answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from re import Pattern
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from unspool.core.errors import DataError
from unspool.core.rng import rng_for
from unspool.core.sizes import format_size
from unspool.data.sources.base import SAMPLE_CHARS, SAMPLE_UNITS, Document, Item
from unspool.data.sources.generated import GeneratedSource, split_sentences
from unspool.data.sources.synthetic import attributes, hops, similarity, sorting, states
from unspool.data.sources.synthetic.draft import QUESTION_START, Builder, compose, draw_layout

if TYPE_CHECKING:
    from unspool.data.tokenize.encoder import Encoder

# Tokens per task of the pipeline: enough to outweigh the start of a worker, small enough to lose little in a kill.
PART_TOKENS = 2 << 20
# Minimum share of the planned tokens that a document must have, and the share to aim at.
LEAST, AIM = 0.96, 0.983
MOST_ATTEMPTS = 40
# Documents are planned in blocks, so that the plan of the first ones does not depend on the number of documents.
PLAN_BLOCK = 4096
SAMPLED_THEMES = 8
CHARS_PER_TOKEN = 3.0  # assumed for the first attempt
# Before a longer document, a small one measures the characters per token.
PROBE_ABOVE = 4096
PROBE_SHARE = 1 / 12
# Enough prose for variety; more would only slow down the start of every worker.
PROSE_CHARS = 2_000_000

Encode = Callable[[str], np.ndarray]


class Task(NamedTuple):
    choose: Callable[[np.random.Generator], Builder]  # draw a theme and its wording
    line: Pattern[str]  # match lines that could be read as facts


TASKS: dict[str, Task] = {
    "sorting": Task(sorting.choose, sorting.LINE),
    "hops": Task(hops.choose, hops.LINE),
    "states": Task(states.choose, states.LINE),
    "similar": Task(similarity.choose, similarity.LINE),
    "attributes": Task(attributes.choose, attributes.LINE),
}
TaskName = Literal["sorting", "hops", "states", "similar", "attributes"]


class SyntheticSource(GeneratedSource):
    """Generated documents of tasks whose answers can be checked."""

    kind: Literal["synthetic"]
    prose: str | None = Field(
        None, description="JSONL or text files whose sentences are inserted between the facts. Default: no other text."
    )
    tasks: dict[TaskName, float] = Field(
        {"sorting": 1, "hops": 1, "states": 1, "similar": 1, "attributes": 1},
        description="Tasks and their shares of documents. Only the proportions count.",
    )

    min_length: ClassVar[int] = 512
    example_length: ClassVar[str] = "[1K, 32K]"

    @model_validator(mode="after")
    def _check_tasks(self) -> SyntheticSource:
        if not self.tasks or min(self.tasks.values()) <= 0:
            raise ValueError("tasks needs shares above 0, such as {sorting: 1, hops: 2}")
        return self

    def divide(self, units: list[Path], seed: int) -> list[tuple[list[Path], range]]:
        return [(units, part) for part in split_plan(plan_documents(self, seed))]

    def read(self, task: tuple[list[Path], range], seed: int, encoder: Encoder | None = None) -> Iterator[Item]:
        assert encoder is not None, "generating needs a tokenizer"
        units, part = task
        plan = plan_documents(self, seed)
        prose = load_prose(self.read_prose(units)) if self.prose is not None else []
        for index in part:
            name = plan.tasks[index]
            # Fitting the length requires tokenization, so the document keeps its tokens.
            text, tokens = generate_document(
                name, int(plan.lengths[index]), lambda text: encoder.encode([text])[0], prose, seed, index
            )
            yield Document(f"{name}:{index}", text, tokens)

    def sample(self, units: list[Path], seed: int) -> Iterator[str]:
        for task in self.tasks:
            for number in range(SAMPLED_THEMES):
                style = rng_for(seed, "synthetic", "sample", task, number)
                layout = draw_layout(style, with_prose=False)
                yield compose(TASKS[task].choose(style), layout, SAMPLE_CHARS // SAMPLE_UNITS, [], style)[0]
        yield from super().sample(units, seed)


class Plan(NamedTuple):
    """The length in tokens and the task of each document."""

    lengths: np.ndarray
    tasks: list[str]


class Generated(NamedTuple):
    text: str
    tokens: np.ndarray


def plan_documents(source: SyntheticSource, seed: int) -> Plan:
    """Plan documents of log-uniform length until their expected total is `source.tokens`."""
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


def split_plan(plan: Plan) -> list[range]:
    """Divide a plan into runs of documents with about `PART_TOKENS` in total."""
    parts = (np.cumsum(plan.lengths) - plan.lengths) // PART_TOKENS
    starts = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(parts)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def generate_document(task: str, length: int, encode: Encode, prose: Sequence[str], seed: int, index: int) -> Generated:
    """Generate one document of at most `length` tokens, and little less."""
    style = rng_for(seed, "synthetic", index, "style")
    layout = draw_layout(style, with_prose=bool(prose))
    build = TASKS[task].choose(style)

    def attempt(number: int, chars: float) -> tuple[str, int]:
        return compose(build, layout, int(chars), prose, rng_for(seed, "synthetic", index, number))

    chars = AIM * length * CHARS_PER_TOKEN
    if length > PROBE_ABOVE:
        text, context = attempt(0, max(PROBE_ABOVE * CHARS_PER_TOKEN, PROBE_SHARE * chars))
        chars = AIM * length * context / len(encode(text[:context]))
    best: Generated | None = None
    tried: dict[bool, tuple[float, int]] = {}  # last attempt that was too long (True), and last that was not
    for number in range(1, MOST_ATTEMPTS + 1):
        text, _ = attempt(number, chars)
        tokens = encode(text)
        if len(tokens) <= length and (best is None or len(tokens) > len(best.tokens)):
            best = Generated(text, tokens)
            if len(tokens) >= LEAST * length:
                break
        tried[len(tokens) > length] = (chars, len(tokens))
        chars = _next_size(chars, len(tokens), AIM * length, tried)
    if best is None:
        raise DataError(
            f"synthetic: task {task} cannot make a document as short as {format_size(length)} tokens with this "
            "tokenizer; raise the shortest length."
        )
    return best


def _next_size(chars: float, num_tokens: int, wanted: float, tried: dict[bool, tuple[float, int]]) -> float:
    """Return the characters to try next: in proportion, or between a too long attempt and one that was not."""
    if len(tried) == 2:
        (less, fewer), (more, many) = tried[False], tried[True]
        between = less + (more - less) * (wanted - fewer) / (many - fewer)
        if less < between < more:
            return between
    return chars * wanted / num_tokens


def load_prose(texts: Iterable[str]) -> list[str]:
    """Collect sentences to put between facts; none of them looks like a question or a fact."""

    def is_plain(sentence: str) -> bool:
        return not QUESTION_START.match(sentence) and not any(task.line.match(sentence) for task in TASKS.values())

    return split_sentences(texts, kind="synthetic", max_chars=PROSE_CHARS, keep=is_plain)
