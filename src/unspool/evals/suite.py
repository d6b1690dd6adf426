"""What a task and a suite are: pure generators of questions, and pure scorers of answers.

In: a suite's sources (texts, data sets, a tokenizer), a length, a seed, an index. Out: `Question`, as text.
Promise: the same question for the same arguments on any machine, in any process, in any order; context, question,
prefix and room for the answer together never exceed the length, and stay within 1% of it where the task can fill it.
Two modes: `fixed`, the default, and `reference`, which follows the suite's own code, defects included where they
change scores, so that published numbers can be met. Results say which.
Elsewhere: token ids and shared contexts (prompt.py), order of work (plan.py), means and intervals (stats.py).
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from unspool.evals.wording import Forms

Mode = Literal["fixed", "reference"]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Which question is wanted."""

    length: int  # tokens, room for the answer included
    seed: int
    index: int  # 0, 1, 2 … within the task and length
    mode: Mode = "fixed"
    overhead: int = 0  # tokens that a chat template puts around the text


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question, as text: the model reads context + question + prefix and goes on from there."""

    context: str  # the long part; equal contexts are read once
    question: str
    prefix: str = ""  # how the answer begins; in a chat the assistant's first words
    references: tuple[str, ...]
    depth: float | None = None  # where in the context the answer stands, 0 to 1; None where that has no meaning
    meta: Mapping[str, Any] = field(default_factory=dict)  # what scorers and readers may want: keys, labels, ids


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    metric: str  # as shown: "recall", "SubEM", "nDCG@10", …
    answer_tokens: int
    build: Callable[[Any, Ask], Question]  # from the suite's sources
    score: Callable[[str, Question], float | None]  # 0 to 1; None where a judge has to say
    chat: bool = False  # whether the suite asks it through the chat template, if the model has one
    size: Callable[[Any], int] | None = None  # questions that the sources hold; None: any number can be made
    stratum: Callable[[Any, int], Hashable] | None = None  # depth or label of an index, for even subsets
    together: int = 1  # so many indices in a row are one whole, such as both claims of a pair: all are asked or none
    judge: Literal["qa", "summary"] | None = None  # how a judge scores it, where `score` says None


@dataclass(frozen=True, kw_only=True)
class Suite:
    name: str
    version: int  # raised when any prompt or score changes
    tasks: Mapping[str, Task]
    load: Callable[..., Any]  # tokenizer, paths that the user gave by name, a wording if there is one → sources
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names of tasks, where the suite has any
    wording: Forms = field(default_factory=dict)  # texts of its tasks that a user may word otherwise
