"""RULER's question answering: SQuAD (qa_1) and HotpotQA (qa_2), or generated questions.

Any one of the references is correct. `fixed`: questions come from the whole set in random order. Each gold document
occurs once, at a depth that depends on the index. Documents of the same article or context come first, and the last
document is cut between words to fit the length.
`reference` reproduces RULER's random draws. Questions come in file order. Documents are shuffled with a constant seed,
so a gold paragraph has one depth per number of documents. When documents run out, all are repeated, including gold
documents.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np

from unspool.core.errors import ConfigError
from unspool.core.rng import rng_for
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.ruler import fitting, published
from unspool.evals.suites.ruler.fitting import Builder, Draft, TaskSpec, fill_prompt
from unspool.evals.suites.ruler.haystacks import Sources
from unspool.evals.suites.ruler.published import Draws, Script
from unspool.evals.suites.ruler.qa_data import Query, QuestionSet
from unspool.evals.wording import PREFIX, TEMPLATE, Form, Text

_INSTRUCTION = "Answer the question from the documents, with nothing but the answer itself."
_FORM: Form = {
    TEMPLATE: Text(
        own=f"{_INSTRUCTION}\n\nThese are the documents.\n\n{{context}}\n\n{_INSTRUCTION}\n\nQuestion: {{query}}",
        needs=("context", "query"),
    ),
    PREFIX: Text(own=" Answer:", may=("query",)),
    "document": Text(own="Document {i}:\n{document}", needs=("document",), may=("i",)),
}
FORMS: dict[str, Form] = {"qa_1": _FORM, "qa_2": _FORM}
_STEP = 10
ANSWER_TOKENS = 32
# Characters of text with about as many tokens as a document's header.
_HEADER_CHARS = 30


@dataclass(frozen=True, kw_only=True)
class QaTask:
    name: str
    questions: Callable[[Sources], QuestionSet]

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec(task=self.name, answer_tokens=ANSWER_TOKENS)

    def build(self, sources: Sources, ask: Ask) -> Question:
        if ask.mode == "reference":
            known = len(self.questions(sources).queries)
            if ask.index >= known:
                raise ConfigError(
                    f"ruler {self.name}: mode: reference uses each of the file's {known} questions once; use fewer "
                    "samples, or mode: fixed."
                )
            return published.build(sources, ask, self.spec, partial(_reference, self))
        # Sizes are characters of other documents. The smallest prompt has only the gold documents.
        return fitting.build_fixed(sources, ask, self.spec, partial(_fixed, self), fewest=1, guess=4 * ask.length)


def _fixed(task: QaTask, sources: Sources, ask: Ask) -> Builder:
    questions = task.questions(sources)
    rng = task.spec.rng(ask)
    order = rng_for(ask.seed, "ruler", task.name, "questions").permutation(len(questions.queries))
    query = questions.queries[order[ask.index % len(order)]]
    golds = [questions.documents[at] for at in query.golds]
    targets = [fitting.grid_depth(ask.index)] if len(golds) == 1 else fitting.stratified_depths(len(golds), rng)
    rng.shuffle(golds)
    others = _rank_others(questions, query, rng)
    seed = int(rng.integers(2**62))

    def build(size: int) -> Draft:
        taken = _take(questions.documents, others, size)
        taken = [taken[at] for at in np.random.Generator(np.random.PCG64(seed)).permutation(len(taken))]
        positions = [round(target * len(taken)) for target in targets]
        depths = [position / max(1, len(taken)) for position in positions]
        for before, (position, gold) in enumerate(zip(positions, golds, strict=True)):
            taken.insert(position + before, gold)
        return _draft(task, sources, query, taken, depths)

    return build


def _take(documents: list[str], numbers: list[int], chars: int) -> list[str]:
    """Take about `chars` characters of documents. The last one is cut, or extended if little is left."""
    taken: list[str] = []
    for at in cycle(numbers):
        if taken and chars < 2 * _HEADER_CHARS:
            taken[-1] = f"{taken[-1]} {_cut(documents[at], chars)}".rstrip()
            break
        text = _cut(documents[at], max(1, chars - _HEADER_CHARS))
        taken += [text] if text else []
        chars -= len(text) + _HEADER_CHARS
        if chars <= 0:
            break
    return taken


def _cut(text: str, chars: int) -> str:
    """Cut a text between words to at most `chars` characters."""
    return text if len(text) <= chars else text[: text.rfind(" ", 0, chars + 1) + 1].rstrip()


def _rank_others(questions: QuestionSet, query: Query, rng: np.random.Generator) -> list[int]:
    """Number the documents without the answer: same article or context first, each part in random order."""
    golds = set(query.golds)
    near = [at for at in dict.fromkeys((*query.context, *query.more)) if at not in golds]
    known = golds | set(near)
    far = [at for at in rng.permutation(len(questions.documents)).tolist() if at not in known]
    return [near[at] for at in rng.permutation(len(near))] + far


def _reference(task: QaTask, sources: Sources, ask: Ask, draws: Draws) -> Script:
    questions = task.questions(sources)
    total = len(questions.documents)

    def generate(index: int, size: int) -> Draft:
        query = questions.queries[index]
        context, more = list(query.context), list(query.more)
        spare = size - len(context)
        if size >= total:
            taken = (list(range(total)) * (size // total + 1))[:size]
        elif spare > len(more):
            known = {*context, *more}
            foreign = [at for at in range(total) if at not in known]
            taken = [*context, *more, *draws.random.sample(foreign, spare - len(more))]
        else:
            taken = context + draws.random.sample(more, spare)
        taken, golds = draws.shuffled(taken), set(query.golds)
        depths = [at / max(1, len(taken) - 1) for at, number in enumerate(taken) if number in golds]
        return _draft(task, sources, query, [questions.documents[at] for at in taken], depths)

    return Script(generate=generate, step=_STEP)


def _draft(task: QaTask, sources: Sources, query: Query, documents: list[str], depths: list[float]) -> Draft:
    form = sources.wording.text(task.name, "document")
    listed = "\n\n".join(form.format(i=str(number), document=text) for number, text in enumerate(documents, 1))
    return Draft(
        prompt=fill_prompt(sources.wording, task.name, listed, query=query.question),
        references=query.answers,
        depths=tuple(depths),
        meta={"documents": len(documents), "data": task.questions(sources).origin},
    )


TASKS = (
    QaTask(name="qa_1", questions=lambda sources: sources.squad),
    QaTask(name="qa_2", questions=lambda sources: sources.hotpotqa),
)
