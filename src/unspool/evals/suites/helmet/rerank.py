"""Passages to be ranked by how well they answer a query: MS MARCO's, or any judged passages.

In: sources, an `Ask`. Out: `Question`; `meta["relevance"]` has the grade of every id shown. Score: nDCG@10.
`fixed` fills the length, relevant passages at depths spread over indices; `reference` takes HELMET's number of
passages, three depths for each query, and cuts the end off where it is too long.
"""

from itertools import islice

from unspool.core.rng import rng_for
from unspool.evals.fill import Remembered, fill, room, spread
from unspool.evals.scoring.ranking import ndcg, parse_ranking
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.helmet.datasets import Sources, chosen
from unspool.evals.suites.helmet.instructions import DEMO, PASSAGE, UNTITLED
from unspool.evals.suites.helmet.rag import demos, first_line, fitting_demos, table_count
from unspool.evals.suites.helmet.records import Item, Passage
from unspool.evals.wording import PREFIX, Wording, said_before

ANSWER_TOKENS = 200
SHOTS, DEMO_PASSAGES, DEPTHS = 2, 10, 3
COUNTS = {4096: 14, 8192: 50, 16384: 130, 32768: 285, 65536: 600, 131072: 1000}
_ID = "1000"  # stands for any id while tokens are counted


def build(task: str, sources: Sources, ask: Ask) -> Question:
    data, meter, wording = sources.qa(task), sources.meter, sources.wording
    reference = ask.mode == "reference"
    item = chosen(data.items, task, ask.seed, ask.index // DEPTHS if reference else ask.index)
    limit = room(ask, ANSWER_TOKENS)
    texts = [_demo_text(task, sources, demo) for demo in demos(data, item, SHOTS)]
    shown = texts if reference else fitting_demos(texts, meter, limit)
    head, question = wording.around(task, demos="".join(shown), question=item.question)
    cue = wording.fill(task, PREFIX)
    grade = dict(zip(item.gold, item.grades, strict=True))
    start = float(rng_for(ask.seed, "helmet depth", task).random())
    at = (ask.index % DEPTHS) / (DEPTHS - 1) if reference else spread(ask.index, start)
    distractors = Remembered(_numbered(wording, task, _ID, passage) for passage in data.pool.distractors(item))
    known = {_numbered(wording, task, _ID, passage): passage for passage in item.gold}
    used = meter.piece(head) + meter.piece(question + cue)

    def asked(budget: int) -> Question:
        rng = rng_for(ask.seed, "helmet passages", task, ask.length, ask.index)
        if reference:
            wanted = max(0, table_count(COUNTS, ask.length) - len(known))
            texts = _at_depth(list(islice(distractors, wanted)), list(known), at)
            texts = meter.take(texts, budget - used, between=meter.gap)
        else:
            free = budget - used - sum(meter.piece(text) + meter.gap for text in known)
            others = meter.take(distractors, free, between=meter.gap, keep=4)
            texts = _at_depth([others[place] for place in rng.permutation(len(others))], list(known), at)
        ids = [str(1 + number) for number in rng.permutation(len(texts))]
        relevance = {
            number: grade[known[text]] if text in known else 0 for number, text in zip(ids, texts, strict=True)
        }
        best = sorted(ids, key=lambda number: -relevance[number])
        written = [renumbered(wording, task, text, _ID, number) for number, text in zip(ids, texts, strict=True)]
        return Question(
            context=head + "\n\n".join(written),
            question=question,
            prefix=cue,
            references=(" " + " > ".join(best),),
            depth=at,
            meta={
                "mode": ask.mode,
                "generated": data.generated,
                "id": item.id,
                "shots": len(shown),
                "relevance": relevance,
            },
        )

    return fill(asked, meter, limit, what=f"helmet {task}", length=ask.length)


def _at_depth(others: list[str], gold: list[str], depth: float) -> list[str]:
    """Relevant texts side by side, in the order of their grades, at the depth."""
    place = round(depth * len(others))
    return [*others[:place], *gold, *others[place:]]


def _numbered(wording: Wording, task: str, number: str, passage: Passage) -> str:
    if passage.title:
        return wording.fill(task, PASSAGE, id=number, title=passage.title, text=passage.text)
    return wording.fill(task, UNTITLED, id=number, text=passage.text)


def renumbered(wording: Wording, task: str, text: str, old: str, new: str) -> str:
    """A passage that may have lost its end, with another id: the id stands first in its text."""
    for form in (PASSAGE, UNTITLED):
        said = said_before(wording.text(task, form), "id") if form in wording.forms[task] else None
        if said is not None and text.startswith(said + old):
            return said + new + text[len(said + old) :]
    return text


def _demo_text(task: str, sources: Sources, demo: Item) -> str:
    data, wording = sources.qa(task), sources.wording
    grades = dict(zip(demo.gold, demo.grades, strict=True))
    shown: list[Passage] = [*demo.gold[:DEMO_PASSAGES]]
    shown += islice(data.pool.distractors(demo), DEMO_PASSAGES - len(shown))
    order = rng_for(0, "helmet demo", demo.id).permutation(len(shown))
    ids = {shown[at]: str(number + 1) for number, at in enumerate(order)}
    listed = "\n\n".join(_numbered(wording, task, number, passage) for passage, number in ids.items())
    ranking = " > ".join(ids[passage] for passage in sorted(ids, key=lambda passage: -grades.get(passage, 0)))
    return wording.fill(task, DEMO, documents=listed, question=demo.question, answer=ranking)


def score(output: str, asked: Question) -> float:
    return ndcg(parse_ranking(first_line(output, asked)), asked.meta["relevance"])
