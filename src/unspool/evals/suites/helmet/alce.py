"""Answers with citations (ALCE): two examples, instruction, question, documents.

Scores are ASQA's str_em and QAMPARI's recall of five, as in HELMET's copy of ALCE's script. HELMET's category is the
mean of six numbers; the other four need an entailment model (`scoring.citations.citations` with `meta["documents"]`).
"""

import re
from itertools import islice
from string import Formatter

from unspool.evals.fill import Remembered, fill, room
from unspool.evals.scoring.citations import qampari, str_em
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.helmet.data import DEMO, PASSAGE, Sources, demo_form, template_form
from unspool.evals.suites.helmet.rag import PassagePrompt, demo_passages, gold_depths, table_count, with_gold
from unspool.evals.suites.helmet.rerank import ANY_ID, set_id
from unspool.evals.suites.records import Item, Passage
from unspool.evals.wording import Form, Text, Wording, literal

INSTRUCTIONS = {
    "asqa": (
        "Instruction: Answer the question precisely and in a few sentences, from the search results alone; not all of "
        "them are about it. Stay neutral. Say where every statement comes from: write the number of the document in "
        "square brackets, as in [x], and several numbers one after another, as in [x][y][z]. Every sentence needs one "
        "to three documents, and no more than are needed to support it."
    ),
    "qampari": (
        "Instruction: List the answers to the question, from the search results alone; not all of them are about it. "
        "Put commas between answers. After each answer write the number of the one document it comes from in square "
        "brackets, as in [x]. Where there are more than five answers, give at least five."
    ),
}


def _form(task: str) -> Form:
    instruction = literal(INSTRUCTIONS[task])
    demo = f"{instruction}\n\nQuestion: {{question}}\n\n{{documents}}\n\nAnswer: {{answer}}\n\n\n"
    return {
        **template_form(f"{{demos}}{instruction}\n\nQuestion: {{question}}\n\n{{context}}\n\n", "Answer:", "question"),
        **demo_form(demo, "documents", "question", "answer"),
        PASSAGE: Text(own="Document [{id}](Title: {title}): {text}", needs=("id", "text"), may=("title",), first="id"),
    }


FORMS: dict[str, Form] = {task: _form(task) for task in INSTRUCTIONS}
ANSWER_TOKENS = 300
DEMO_DOCUMENTS = 5
COUNTS = {4096: 8, 8192: 30, 16384: 75, 32768: 165, 65536: 345, 131072: 700}


def build(task: str, sources: Sources, ask: Ask) -> Question:
    meter, wording, limit = sources.meter, sources.wording, room(ask, ANSWER_TOKENS)
    prompt = PassagePrompt.build(task, sources, ask, limit, _write_demo)
    item, data = prompt.item, prompt.data
    gold = [_with_id(wording, task, ANY_ID, passage) for passage in item.gold]
    distractors = Remembered(_with_id(wording, task, ANY_ID, passage) for passage in data.pool.distractors(item))
    depths = gold_depths(task, ask, len(gold))
    pattern = _passage_pattern(wording.text(task, PASSAGE))

    def build_within(budget: int) -> Question:
        if ask.mode == "reference":
            wanted = table_count(COUNTS, ask.length)
            # Use the released order: documents are ranked, and gold ones keep their positions.
            released = [_with_id(wording, task, ANY_ID, passage) for passage in item.released[:wanted]]
            documents = released or with_gold(list(islice(distractors, max(0, wanted - len(gold)))), gold, depths)[0]
            documents = meter.take(documents, budget - prompt.tokens, between=meter.gap)
        else:
            free = budget - prompt.tokens - sum(meter.piece(text) + meter.gap for text in gold)
            documents, _ = with_gold(meter.take(distractors, free, between=meter.gap, keep=3), gold, depths)
        numbered = [set_id(wording, task, text, str(at)) for at, text in enumerate(documents, start=1)]
        return Question(
            context=prompt.head + "\n\n".join(numbered),
            question=prompt.question,
            prefix=prompt.prefix,
            references=(item.answers[0],),
            depth=None,
            meta={
                "mode": ask.mode,
                "oracle": item.answers[0],
                "generated": data.generated,
                "id": item.id,
                "shots": prompt.shots,
                "question": item.question,
                "answers": _short_answers(task, item),
                "documents": [_premise(pattern, text) for text in documents],
            },
        )

    return fill(build_within, meter, limit, what=f"helmet {task}", length=ask.length)


def _short_answers(task: str, item: Item) -> list[list[str]]:
    """Return ASQA's sub-questions or QAMPARI's entities, each with its aliases."""
    if "pairs" in item.extra:
        return [list(pair) for pair in item.extra["pairs"]]
    if task == "asqa" and item.extra.get("qa_pairs"):
        return [list(pair["short_answers"]) for pair in item.extra["qa_pairs"]]
    nested = item.extra.get("answers")
    if not isinstance(nested, list):
        return [list(item.answers)]
    return [list(aliases) if isinstance(aliases, list) else [aliases] for aliases in nested]


def _with_id(wording: Wording, task: str, number: str, passage: Passage) -> str:
    return wording.fill(task, PASSAGE, id=number, title=passage.title, text=passage.text)


def _passage_pattern(form: str) -> re.Pattern[str]:
    """Return a pattern that matches title and text in a passage written with this form."""
    found = ""
    for text, name, *_ in Formatter().parse(form):
        found += re.escape(text) + ("" if name is None else f"(?P<{name}>{'.*' if name == 'text' else '.*?'})")
    return re.compile(found, flags=re.DOTALL)


def _premise(pattern: re.Pattern[str], text: str) -> str:
    """Format a document like ALCE for its entailment model."""
    found = pattern.match(text)
    parts = found.groupdict() if found else {}
    return f"Title: {parts.get('title', '')}\n{parts.get('text', text if not found else '')}"


def _write_demo(task: str, sources: Sources, demo: Item) -> str:
    passages = demo_passages(sources.qa(task), demo, DEMO_DOCUMENTS)
    listed = "\n\n".join(
        _with_id(sources.wording, task, str(number), passage) for number, passage in enumerate(passages, start=1)
    )
    return sources.wording.fill(task, DEMO, documents=listed, question=demo.question, answer=demo.answers[0])


def score_asqa(output: str, question: Question) -> float:
    return str_em(_spoken(output, question), question.meta["answers"], question.meta["mode"])


def score_qampari(output: str, question: Question) -> float:
    return qampari(_spoken(output, question), question.meta["answers"])["recall_top5"]


def _spoken(output: str, question: Question) -> str:
    """With HELMET's own prompts, restore the cue, like HELMET: it costs base models QAMPARI's first item."""
    return question.prefix + output if "cue" in question.meta else output
