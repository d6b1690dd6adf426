"""Questions on documents: SQuAD (qa_1), HotpotQA (qa_2), or the generated sets that ship in their place.

In: sources, `Ask`. Out: `Question`; any one of the references is an answer.
Promise (`fixed`): questions come from the whole set in random order; the gold documents stand once, at depths that
are spread over the index; documents of the same article or context come before foreign ones.
`reference` follows RULER: questions in file order; documents shuffled by a seed that never changes, so that a gold
paragraph stands at one depth for every number of documents; when documents run out all are repeated, gold too.
Price: the last document taken is cut between words to meet the length (`fixed`).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from unspool.core.errors import ConfigError
from unspool.core.rng import rng_for
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.ruler import fitting
from unspool.evals.suites.ruler.haystacks import Sources
from unspool.evals.suites.ruler.qa_data import Query, Questions
from unspool.evals.suites.ruler.question import Builder, Draft, Place, RandomBuilder, fixed, reference
from unspool.evals.suites.ruler.task_texts import Parts, documents

_STEP = 10
ANSWER_TOKENS = 32
# What opening a document costs, in characters of text with as many tokens.
_HEADER = 30


@dataclass(frozen=True, kw_only=True)
class Asking:
    name: str
    questions: Callable[[Sources], Questions]

    @property
    def place(self) -> Place:
        return Place(task=self.name, answer_tokens=ANSWER_TOKENS)

    def build(self, sources: Sources, ask: Ask) -> Question:
        if ask.mode == "reference":
            return reference(sources, ask, self.place, lambda ask: _reference(self, sources, ask), step=_STEP)
        # In characters; the smallest prompt has the gold documents alone.
        return fixed(sources, ask, self.place, lambda ask: _fixed(self, sources, ask), fewest=1, guess=4 * ask.length)


def _fixed(task: Asking, sources: Sources, ask: Ask) -> Builder:
    questions = task.questions(sources)
    rng = task.place.rng(ask)
    order = rng_for(ask.seed, "ruler", task.name, "questions").permutation(len(questions.queries))
    query = questions.queries[order[ask.index % len(order)]]
    golds = [questions.documents[at] for at in query.golds]
    targets = [fitting.target(ask.index)] if len(golds) == 1 else fitting.parts(len(golds), rng)
    rng.shuffle(golds)
    others = _others(questions, query, rng)
    seed = int(rng.integers(2**62))

    def build(size: int) -> Draft:
        taken = _taken(questions.documents, others, size)
        taken = [taken[at] for at in np.random.Generator(np.random.PCG64(seed)).permutation(len(taken))]
        places = [fitting.place(target, len(taken)) for target in targets]
        for before, (place, gold) in enumerate(zip(places, golds, strict=True)):
            taken.insert(place + before, gold)
        asked = documents(sources.wording, task.name, taken, query.question)
        return _draft(
            questions, query, asked, len(taken), [place / max(1, len(taken) - len(golds)) for place in places]
        )

    return build


def _taken(documents: list[str], numbers: list[int], chars: int) -> list[str]:
    """Documents in turn, the last one cut; too little for a document of its own continues the one before."""
    taken: list[str] = []
    for at in cycle(numbers):
        if taken and chars < 2 * _HEADER:
            taken[-1] = f"{taken[-1]} {_cut(documents[at], chars)}".rstrip()
            break
        text = _cut(documents[at], max(1, chars - _HEADER))
        taken += [text] if text else []
        chars -= len(text) + _HEADER
        if chars <= 0:
            break
    return taken


def _cut(text: str, chars: int) -> str:
    """Whole words of at most so many characters."""
    return text if len(text) <= chars else text[: text.rfind(" ", 0, chars + 1) + 1].rstrip()


def _others(questions: Questions, query: Query, rng: np.random.Generator) -> list[int]:
    golds = set(query.golds)
    near = [at for at in dict.fromkeys((*query.context, *query.more)) if at not in golds]
    apart = golds | set(near)
    far = [at for at in rng.permutation(len(questions.documents)).tolist() if at not in apart]
    return [near[at] for at in rng.permutation(len(near))] + far


def _reference(task: Asking, sources: Sources, ask: Ask) -> RandomBuilder:
    questions = task.questions(sources)
    if ask.index >= len(questions.queries):
        raise ConfigError(
            f"ruler {task.name}: mode reference asks every question of the file once, and there are "
            f"{len(questions.queries)}; use fewer samples, or mode: fixed."
        )
    query = questions.queries[max(0, ask.index)]

    def build(size: int, rng: np.random.Generator) -> Draft:
        context, more, total = list(query.context), list(query.more), len(questions.documents)
        if size < total:
            spare = max(0, size - len(context))
            if spare > len(more):
                known = {*context, *more}
                foreign = np.array([at for at in range(total) if at not in known])
                more += rng.choice(foreign, size=min(spare - len(more), len(foreign)), replace=False).tolist()
            else:
                more = [more[at] for at in rng.permutation(len(more))[:spare]]
            taken = context + more
        else:
            taken = (list(range(total)) * (size // total + 1))[:size]
        # The same permutation for every sample of so many documents, as in RULER.
        random.Random(ask.seed).shuffle(taken)
        golds = set(query.golds)
        places = [at / max(1, len(taken) - 1) for at, number in enumerate(taken) if number in golds]
        texts = [questions.documents[at] for at in taken]
        asked = documents(sources.wording, task.name, texts, query.question)
        return _draft(questions, query, asked, len(taken), places)

    return build


def _draft(questions: Questions, query: Query, asked: Parts, count: int, places: list[float]) -> Draft:
    return Draft(
        parts=asked,
        references=query.answers,
        depths=tuple(places),
        meta={"documents": count, "data": questions.origin},
    )


TASKS = (
    Asking(name="qa_1", questions=lambda sources: sources.squad),
    Asking(name="qa_2", questions=lambda sources: sources.hotpotqa),
)
