"""Questions with passages: instruction, two examples with three passages each, passages, question.

In: sources, an `Ask`. Out: `Question`. `fixed` fills the length with the passages most like the question, in random
order, and spreads the depth of the gold passage evenly over indices; `reference` takes HELMET's number of passages
for the length, six depths (HotpotQA three) for each question, and cuts the end off where it is too long.
Price: at lengths that two examples would take a third of, there are fewer; `meta` says how many.
"""

import hashlib
from collections.abc import Sequence
from itertools import islice

import numpy as np

from unspool.core.rng import rng_for
from unspool.evals.fill import Meter, Remembered, fill, room, spread
from unspool.evals.scoring.answers import raw_or_parsed, sub_em, sub_em_reference
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.helmet.datasets import QaSet, Sources, chosen
from unspool.evals.suites.helmet.instructions import DEMO, PASSAGE
from unspool.evals.suites.helmet.records import Item, Passage
from unspool.evals.wording import PREFIX

ANSWER_TOKENS = 20
SHOTS, DEMO_PASSAGES = 2, 3
# HELMET's number of passages at each of its lengths.
COUNTS = {4096: 20, 8192: 50, 16384: 105, 32768: 220, 65536: 440, 131072: 1000}
# Two examples of one third of the context each would leave no context.
DEMO_SHARE = 3


def table_count(counts: dict[int, int], length: int) -> int:
    """What HELMET takes at a length; in between and beyond, in proportion to its nearest length."""
    nearest = min(counts, key=lambda known: abs(known - length))
    return max(1, round(counts[nearest] * length / nearest))


def demo_order(identity: str, count: int) -> np.ndarray:
    """HELMET's: a shuffle whose seed is the question's hash."""
    seed = int(hashlib.sha256(identity.encode()).hexdigest(), 16) % 2**31
    order: np.ndarray = np.random.default_rng(seed).permutation(count)
    return order


def demos(data: QaSet, item: Item, shots: int) -> list[Item]:
    chosen = (data.demos[at] for at in demo_order(item.id, len(data.demos)))
    return list(islice((demo for demo in chosen if demo.id != item.id), shots))


def demo_passages(data: QaSet, demo: Item, count: int) -> list[Passage]:
    """Its gold passages and distractors, gold at a place of its own."""
    if demo.fixed and len(demo.fixed) <= count:
        return list(demo.fixed)
    gold = list(demo.gold[:count])
    shown = [*gold, *islice(data.pool.distractors(demo), count - len(gold))]
    return [shown[at] for at in demo_order(f"{demo.id} order", len(shown))]


def fitting_demos(texts: Sequence[str], meter: Meter, limit: int) -> list[str]:
    """As many examples as take no more than their share."""
    kept = list(texts)
    while kept and sum(map(meter.piece, kept)) * DEMO_SHARE > limit:
        kept.pop()
    return kept


def with_gold(others: Sequence[str], gold: Sequence[str], depths: Sequence[float]) -> tuple[list[str], list[int]]:
    """Gold texts put among the others at their depths; where each ended up."""
    texts: list[str | None] = [None] * (len(others) + len(gold))
    places = []
    for text, depth in zip(gold, depths, strict=True):
        place = round(depth * (len(texts) - 1))
        while texts[place] is not None:
            place = (place + 1) % len(texts)
        texts[place] = text
        places.append(place)
    rest = iter(others)
    return [next(rest) if text is None else text for text in texts], places


def build(task: str, depths: int, sources: Sources, ask: Ask) -> Question:
    data, meter, wording = sources.qa(task), sources.meter, sources.wording
    reference = ask.mode == "reference"
    item = chosen(data.items, task, ask.seed, ask.index // depths if reference else ask.index)
    limit = room(ask, ANSWER_TOKENS)
    texts = [_demo_text(task, sources, demo) for demo in demos(data, item, SHOTS)]
    shown = texts if reference else fitting_demos(texts, meter, limit)
    head, question = wording.around(task, demos="".join(shown), question=item.question)
    cue = wording.fill(task, PREFIX)

    def document(passage: Passage) -> str:
        return wording.fill(task, PASSAGE, title=passage.title, text=passage.text)

    gold = [document(passage) for passage in item.gold]
    variants = data.variants.get(item.id, [])
    released = variants[ask.index % depths % len(variants)] if variants else None
    wanted = table_count(COUNTS, ask.length)
    others = Remembered(document(passage) for passage in data.pool.distractors(item))
    rng = rng_for(ask.seed, "helmet depth", task)
    start = float(rng.random())
    at = [
        (ask.index % depths) / (depths - 1) if reference else spread(ask.index, (start + 0.618 * number) % 1)
        for number in range(len(gold))
    ]
    fixed = meter.piece(head) + meter.piece(question + cue) + sum(meter.piece(text) + meter.gap for text in gold)

    def filled(budget: int) -> Question:
        kept = meter.take(others, budget - fixed, between=meter.gap, keep=4)
        order = rng_for(ask.seed, "helmet passages", task, ask.length, ask.index).permutation(len(kept))
        passages, places = with_gold([kept[at] for at in order], gold, at)
        return asked("\n\n".join(passages), [place / max(1, len(passages) - 1) for place in places])

    def cut(budget: int) -> Question:
        passages, places = with_gold(list(islice(others, max(0, wanted - len(gold)))), gold, at)
        if released and len(released.fixed) == wanted:
            passages = [document(passage) for passage in released.fixed]
            places = [at for at, passage in enumerate(released.fixed) if passage in item.gold]
        used = meter.piece(head) + meter.piece(question + cue)
        kept = meter.take(passages, budget - used, between=meter.gap)
        return asked("\n\n".join(kept), [place / max(1, len(passages) - 1) for place in places])

    def asked(passages: str, found: list[float]) -> Question:
        meta = {
            "mode": ask.mode,
            "oracle": item.answers[0],
            "generated": data.generated,
            "id": item.id,
            "shots": len(shown),
            "depths": found,
            "question": item.question,
        }
        return Question(
            context=head + passages,
            question=question,
            prefix=cue,
            references=item.answers,
            depth=found[0],
            meta=meta,
        )

    return fill(cut if reference else filled, meter, limit, what=f"helmet {task}", length=ask.length)


def _demo_text(task: str, sources: Sources, demo: Item) -> str:
    shown = demo_passages(sources.qa(task), demo, DEMO_PASSAGES)
    passages = "\n\n".join(sources.wording.fill(task, PASSAGE, title=one.title, text=one.text) for one in shown)
    return sources.wording.fill(task, DEMO, documents=passages, question=demo.question, answer=demo.answers[0])


def first_line(output: str, asked: Question) -> str:
    """What generation would have stopped at: HELMET's configs ask for a stop at a new line, which its parser misses."""
    return output if asked.meta["mode"] == "reference" else output.lstrip().split("\n", 1)[0]


def score(output: str, asked: Question) -> float:
    mode = asked.meta["mode"]
    metric = sub_em_reference if mode == "reference" else sub_em
    return raw_or_parsed(metric, first_line(output, asked), asked.references, asked.prefix, mode)
