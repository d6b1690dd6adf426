"""Re-ranking: order passages by relevance to a query (MS MARCO). Scored by nDCG@10.

`meta["relevance"]` has the grade of every shown id. `fixed` fills the length and spreads the depth of the relevant
passages evenly over indices. `reference` uses HELMET's number of passages and three depths per query, and cuts the end
of a prompt that is too long.
"""

from itertools import islice

from unspool.core.rng import rng_for
from unspool.evals.fill import Remembered, fill, room
from unspool.evals.scoring.ranking import ndcg, parse_ranking
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.helmet.data import DEMO, PASSAGE, Sources, demo_form, template_form
from unspool.evals.suites.helmet.rag import PassagePrompt, first_line, gold_depths, table_count
from unspool.evals.suites.records import Item, Passage
from unspool.evals.wording import Form, Text, Wording, literal, said_before

INSTRUCTION = (
    "Below are documents, each with an ID. Order all of them by how well they help to answer the question, the best "
    "one first, and leave none out. Answer with their IDs in this form:\nRanking: ID3 > ID1 > ID2\n\n"
)
UNTITLED = "passage_untitled"
FORMS: dict[str, Form] = {
    "msmarco": {
        **template_form(literal(INSTRUCTION) + "{demos}{context}\n\nQuery: {question}\n", "Ranking:", "question"),
        **demo_form("{documents}\n\nQuery: {question}\nRanking: {answer}\n\n", "documents", "question", "answer"),
        PASSAGE: Text(
            own="[ID: {id}] Document (Title: {title}): {text}", needs=("id", "text"), may=("title",), first="id"
        ),
        UNTITLED: Text(own="[ID: {id}] Document: {text}", needs=("id", "text"), first="id"),
    }
}
ANSWER_TOKENS = 200
DEMO_PASSAGES, DEPTHS = 10, 3
COUNTS = {4096: 14, 8192: 50, 16384: 130, 32768: 285, 65536: 600, 131072: 1000}
ANY_ID = "1000"  # placeholder for ids during token counting


def build(task: str, sources: Sources, ask: Ask) -> Question:
    meter, wording, limit = sources.meter, sources.wording, room(ask, ANSWER_TOKENS)
    reference = ask.mode == "reference"
    prompt = PassagePrompt.build(task, sources, ask, limit, _write_demo, repeats=DEPTHS)
    item, data = prompt.item, prompt.data
    grade = dict(zip(item.gold, item.grades, strict=True))
    depth = (ask.index % DEPTHS) / (DEPTHS - 1) if reference else gold_depths(task, ask, 1)[0]
    distractors = Remembered(_with_id(wording, task, ANY_ID, passage) for passage in data.pool.distractors(item))
    known = {_with_id(wording, task, ANY_ID, passage): passage for passage in item.gold}

    def build_within(budget: int) -> Question:
        rng = rng_for(ask.seed, "helmet passages", task, ask.length, ask.index)
        if reference:
            wanted = max(0, table_count(COUNTS, ask.length) - len(known))
            texts = _insert(list(islice(distractors, wanted)), list(known), depth)
            texts = meter.take(texts, budget - prompt.tokens, between=meter.gap)
        else:
            free = budget - prompt.tokens - sum(meter.piece(text) + meter.gap for text in known)
            others = meter.take(distractors, free, between=meter.gap, keep=4)
            texts = _insert([others[at] for at in rng.permutation(len(others))], list(known), depth)
        ids = [str(1 + number) for number in rng.permutation(len(texts))]
        relevance = {
            number: grade[known[text]] if text in known else 0 for number, text in zip(ids, texts, strict=True)
        }
        best = sorted(ids, key=lambda number: -relevance[number])
        passages = [set_id(wording, task, text, number) for number, text in zip(ids, texts, strict=True)]
        return Question(
            context=prompt.head + "\n\n".join(passages),
            question=prompt.question,
            prefix=prompt.prefix,
            references=(" " + " > ".join(best),),
            depth=depth,
            meta={
                "mode": ask.mode,
                "generated": data.generated,
                "id": item.id,
                "shots": prompt.shots,
                "relevance": relevance,
            },
        )

    return fill(build_within, meter, limit, what=f"helmet {task}", length=ask.length)


def _insert(others: list[str], gold: list[str], depth: float) -> list[str]:
    """Insert all relevant texts together at the depth."""
    position = round(depth * len(others))
    return [*others[:position], *gold, *others[position:]]


def _with_id(wording: Wording, task: str, number: str, passage: Passage) -> str:
    if passage.title:
        return wording.fill(task, PASSAGE, id=number, title=passage.title, text=passage.text)
    return wording.fill(task, UNTITLED, id=number, text=passage.text)


def set_id(wording: Wording, task: str, text: str, new: str) -> str:
    """Replace `ANY_ID` in a passage, which may be cut. The id is the first placeholder of its text."""
    for form in (PASSAGE, UNTITLED):
        before = said_before(wording.text(task, form), "id") if form in wording.forms[task] else None
        if before is not None and text.startswith(before + ANY_ID):
            return before + new + text[len(before + ANY_ID) :]
    return text


def _write_demo(task: str, sources: Sources, demo: Item) -> str:
    data, wording = sources.qa(task), sources.wording
    grades = dict(zip(demo.gold, demo.grades, strict=True))
    shown: list[Passage] = [*demo.gold[:DEMO_PASSAGES]]
    shown += islice(data.pool.distractors(demo), DEMO_PASSAGES - len(shown))
    order = rng_for(0, "helmet demo", demo.id).permutation(len(shown))
    ids = {shown[at]: str(number + 1) for number, at in enumerate(order)}
    listed = "\n\n".join(_with_id(wording, task, number, passage) for passage, number in ids.items())
    ranking = " > ".join(ids[passage] for passage in sorted(ids, key=lambda passage: -grades.get(passage, 0)))
    return wording.fill(task, DEMO, documents=listed, question=demo.question, answer=ranking)


def score(output: str, question: Question) -> float:
    return ndcg(parse_ranking(first_line(output, question)), question.meta["relevance"])
