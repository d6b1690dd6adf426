"""Questions to be answered with citations (ALCE): two examples, instruction, question, documents.

In: sources, an `Ask`. Out: `Question`. Score: ASQA's str_em, QAMPARI's recall of five. Whether the citations bear an
answer out takes an entailment model: metrics/cite.py with `meta["documents"]`. HELMET's category is the mean of six
numbers, of which only these two can be known without one.
"""

import re
from itertools import islice
from string import Formatter

from unspool.core.rng import rng_for
from unspool.evals.fill import Remembered, fill, room, spread
from unspool.evals.scoring.citations import qampari, str_em
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.helmet.datasets import Sources, chosen
from unspool.evals.suites.helmet.instructions import DEMO, PASSAGE
from unspool.evals.suites.helmet.rag import demo_passages, demos, fitting_demos, table_count, with_gold
from unspool.evals.suites.helmet.records import Item, Passage
from unspool.evals.suites.helmet.rerank import renumbered
from unspool.evals.wording import PREFIX, Wording

ANSWER_TOKENS = 300
SHOTS, DEMO_DOCUMENTS = 2, 5
COUNTS = {4096: 8, 8192: 30, 16384: 75, 32768: 165, 65536: 345, 131072: 700}
_ID = "1000"  # stands for any number while tokens are counted


def build(task: str, sources: Sources, ask: Ask) -> Question:
    data, meter, wording = sources.qa(task), sources.meter, sources.wording
    reference = ask.mode == "reference"
    item = chosen(data.items, task, ask.seed, ask.index)
    limit = room(ask, ANSWER_TOKENS)
    texts = [_demo_text(task, sources, demo) for demo in demos(data, item, SHOTS)]
    shown = texts if reference else fitting_demos(texts, meter, limit)
    head, after = wording.around(task, demos="".join(shown), question=item.question)
    cue = wording.fill(task, PREFIX)
    gold = [_cited(wording, task, _ID, passage) for passage in item.gold]
    distractors = Remembered(_cited(wording, task, _ID, passage) for passage in data.pool.distractors(item))
    start = float(rng_for(ask.seed, "helmet depth", task).random())
    at = [spread(ask.index, (start + 0.618 * number) % 1) for number in range(len(gold))]
    used = meter.piece(head) + meter.piece(after + cue)

    pattern = _pattern(wording.text(task, PASSAGE))

    def asked(budget: int) -> Question:
        if reference:
            wanted = table_count(COUNTS, ask.length)
            # As released: documents come ranked, and nothing moves the ones that answer.
            released = [_cited(wording, task, _ID, passage) for passage in item.fixed[:wanted]]
            documents = released or with_gold(list(islice(distractors, max(0, wanted - len(gold)))), gold, at)[0]
            documents = meter.take(documents, budget - used, between=meter.gap)
        else:
            free = budget - used - sum(meter.piece(text) + meter.gap for text in gold)
            documents, _ = with_gold(meter.take(distractors, free, between=meter.gap, keep=3), gold, at)
        written = [renumbered(wording, task, text, _ID, str(at)) for at, text in enumerate(documents, start=1)]
        return Question(
            context=head + "\n\n".join(written),
            question=after,
            prefix=cue,
            references=(item.answers[0],),
            depth=None,
            meta={
                "mode": ask.mode,
                "oracle": item.answers[0],
                "generated": data.generated,
                "id": item.id,
                "shots": len(shown),
                "question": item.question,
                "answers": _short_answers(task, item),
                "documents": [_premise(pattern, text) for text in documents],
            },
        )

    return fill(asked, meter, limit, what=f"helmet {task}", length=ask.length)


def _short_answers(task: str, item: Item) -> list[list[str]]:
    """ASQA's sub-questions or QAMPARI's entities, each with its aliases."""
    if "pairs" in item.extra:
        return [list(pair) for pair in item.extra["pairs"]]
    if task == "asqa" and item.extra.get("qa_pairs"):
        return [list(pair["short_answers"]) for pair in item.extra["qa_pairs"]]
    nested = item.extra.get("answers") or []
    return [list(aliases) if isinstance(aliases, list) else [aliases] for aliases in nested]


def _cited(wording: Wording, task: str, number: str, passage: Passage) -> str:
    return wording.fill(task, PASSAGE, id=number, title=passage.title, text=passage.text)


def _pattern(passage: str) -> re.Pattern[str]:
    """Finds title and text again in a passage as it is worded."""
    found = ""
    for said, name, *_ in Formatter().parse(passage):
        found += re.escape(said) + ("" if name is None else f"(?P<{name}>{'.*' if name == 'text' else '.*?'})")
    return re.compile(found, flags=re.DOTALL)


def _premise(pattern: re.Pattern[str], text: str) -> str:
    """As ALCE shows a document to its entailment model."""
    found = pattern.match(text)
    parts = found.groupdict() if found else {}
    return f"Title: {parts.get('title', '')}\n{parts.get('text', text if not found else '')}"


def _demo_text(task: str, sources: Sources, demo: Item) -> str:
    passages = demo_passages(sources.qa(task), demo, DEMO_DOCUMENTS)
    listed = "\n\n".join(
        _cited(sources.wording, task, str(number), passage) for number, passage in enumerate(passages, start=1)
    )
    return sources.wording.fill(task, DEMO, documents=listed, question=demo.question, answer=demo.answers[0])


def score_asqa(output: str, asked: Question) -> float:
    return str_em(output, asked.meta["answers"])


def score_qampari(output: str, asked: Question) -> float:
    return qampari(output, asked.meta["answers"])["recall_top5"]
