"""Indirect needle: a fact in prose whose question shares no content word with it.

"Bafige jogs past the Eiffel Tower every morning." – "Who lives in Paris?" Matching words does not help: the model must
know the world. In the same wording, other people with other clues stand in the prose. Sentences of the prose with a
content word of the question are dropped, so that no such word occurs anywhere in the context. All names are invented.

The idea is NoLiMa's (arXiv 2502.05167). Pairs, wording and prose are our own, so scores are not comparable with it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np

from unspool.core.config import lookup
from unspool.core.errors import DataError
from unspool.core.rng import rng_for
from unspool.evals.config import TaskEval
from unspool.evals.fill import Meter, Remembered, fill, room, spread
from unspool.evals.heldout import heldout_documents
from unspool.evals.scoring.rouge import stem
from unspool.evals.suite import Ask, Question, Task
from unspool.evals.suites import generated_world
from unspool.evals.suites.indirect_pairs import KINDS, Kind
from unspool.evals.suites.ruler.haystacks import split_sentences
from unspool.evals.task_suite import TaskSuite

OTHERS = 5  # people with other clues
ANSWER_TOKENS = 16
NAMES = 300_000  # numbers of invented names
PROSE_TOKENS = 1_000_000  # of held-out text; longer prompts repeat it
HEAD = "Here is a text, then a question about it.\n\n"
ASK = "\n\nQuestion: {question} Write only the name.\n"
PREFIX = "Answer:"
# Words without content. A needle and its question may share them.
_FUNCTION_WORDS = (
    "a about after all an and any are as at be been before beside by could did do does ever every for from had has "
    "have if in into is it its no nobody of on one or than that the their them there they this to until was were what "
    "when where which who whose will with without would"
)
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
_WORD = re.compile(r"[^\W_]+")


def content_stems(text: str) -> frozenset[str]:
    """Return the Porter stems of all words of a text, without function words."""
    return frozenset(stem(word) for word in _WORD.findall(text.lower()) if word not in FUNCTION_WORDS)


class Sources:
    def __init__(self, tokenizer: Any, paths: Mapping[str, str]) -> None:
        for name in paths:
            lookup({"haystack": None}, name, kind="path of indirect_needle")
        documents = heldout_documents(paths.get("haystack"), Path(), tokens=PROSE_TOKENS)
        self.meter = Meter(tokenizer, [text[:2000] for text in documents])
        self._text = "\n\n".join(documents)
        if not self._text.strip():
            raise DataError("indirect_needle: the haystack text is empty; use files that contain text.")

    @cached_property
    def sentences(self) -> list[str]:
        return split_sentences(self._text)

    @cached_property
    def _by_stem(self) -> dict[str, list[int]]:
        """Numbers of the sentences with each stem."""
        found: dict[str, list[int]] = {}
        for number, sentence in enumerate(self.sentences):
            for one in content_stems(sentence):
                found.setdefault(one, []).append(number)
        return found

    def prose(self, without: frozenset[str], rng: np.random.Generator) -> Iterator[str]:
        """Yield sentences without those stems, from a random one on. Starts again at the end of the text."""
        dropped = set(chain.from_iterable(self._by_stem.get(one, ()) for one in without))
        kept = [number for number in range(len(self.sentences)) if number not in dropped]
        if not kept:
            raise DataError("indirect_needle: every sentence of the haystack has a word of a question; use more text.")
        first = int(rng.integers(len(kept)))
        return (f"{self.sentences[number]} " for number in cycle(kept[first:] + kept[:first]))


@dataclass(frozen=True, kw_only=True)
class Design:
    """What one question tests. Pairs vary fastest, then wordings."""

    clue: str
    topic: str
    statement: str
    question: str

    @classmethod
    def of(cls, kind: Kind, seed: int, name: str, index: int) -> "Design":
        lap, at = divmod(index, len(kind.pairs))
        order = rng_for(seed, "indirect needle pairs", name, lap).permutation(len(kind.pairs))
        pair = int(order[at])
        clue, topic = list(kind.pairs.items())[pair]
        turn = pair + lap  # a pair has another wording in every lap
        statements, questions = kind.statements, kind.questions
        question = questions[turn // len(statements) % len(questions)]
        return cls(
            clue=clue, topic=topic, statement=statements[turn % len(statements)], question=question.format(topic=topic)
        )


def build(name: str, sources: Sources, ask: Ask) -> Question:
    meter, kind = sources.meter, KINDS[name]
    design = Design.of(kind, ask.seed, name, ask.index)
    rng = rng_for(ask.seed, "indirect needle", name, ask.length, ask.index)
    people = [generated_world.name(int(at)) for at in rng.choice(NAMES, size=1 + OTHERS, replace=False)]
    clues = [clue for clue in kind.pairs if clue != design.clue]
    clues = [design.clue, *(clues[at] for at in rng.permutation(len(clues))[:OTHERS].tolist())]
    facts = [design.statement.format(name=one, clue=clue) + " " for one, clue in zip(people, clues, strict=True)]
    depth = spread(ask.index, float(rng_for(ask.seed, "indirect needle depth", name).random()))
    targets = [depth, *rng.random(OTHERS).tolist()]
    prose = Remembered(sources.prose(content_stems(design.question), rng))
    asked = ASK.format(question=design.question)
    used = meter.piece(HEAD) + meter.piece(asked + PREFIX) + sum(map(meter.piece, facts))

    def build_within(budget: int) -> Question:
        kept = meter.take(prose, budget - used)
        ends = np.cumsum([0, *map(len, kept)])
        # Nothing follows the last sentence, which may be cut.
        borders = ends[: max(1, len(kept))]
        places = [int(np.argmin(np.abs(borders - target * ends[-1]))) for target in targets]
        order = sorted(range(len(facts)), key=lambda at: (places[at], targets[at]))
        pieces = [
            "".join([*(facts[at] for at in order if places[at] == number), sentence])
            for number, sentence in enumerate(kept or [""])
        ]
        return Question(
            context=HEAD + "".join(pieces).rstrip(),
            question=asked,
            prefix=PREFIX,
            references=(people[0],),
            depth=round(float(ends[places[0]] / max(1, ends[-1])), 4),
            items=tuple(f" {people[at]}." for at in order),
            meta={"mode": ask.mode, "question": design.question, "people": [people[at] for at in order]},
        )

    return fill(build_within, meter, room(ask, ANSWER_TOKENS), what=f"indirect_needle {name}", length=ask.length)


def score(output: str, question: Question) -> float:
    """Return 1 if the first name in the output is the right one."""
    found = {name: match.start() for name in question.meta["people"] if (match := re.search(rf"\b{name}\b", output))}
    return float(bool(found) and min(found, key=lambda name: found[name]) == question.references[0])


class IndirectNeedleEval(TaskEval):
    """Facts whose questions share no content word with them, so that finding them needs knowledge of the world."""

    suite: Literal["indirect_needle"]


SUITE = TaskSuite(
    name="indirect_needle",
    title="Indirect needle",
    config=IndirectNeedleEval,
    version=1,
    tasks={
        name: Task(
            name=name,
            metric="accuracy",
            answer_tokens=ANSWER_TOKENS,
            build=partial(build, name),
            score=score,
            chat=True,
        )
        for name in KINDS
    },
    load=Sources,
)
