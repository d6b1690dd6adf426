"""RAG: instruction, two examples with three passages each, passages, question.

`fixed` fills the length with the passages most similar to the question, in random order. The depth of the gold passage
is spread evenly over indices. `reference` uses HELMET's number of passages for the length and six depths per question
(HotpotQA three). It cuts the end of a prompt that is too long.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self

import numpy as np

from unspool.core.rng import rng_for
from unspool.evals.fill import Remembered, fill, room, spread
from unspool.evals.scoring.answers import raw_or_parsed, sub_em, sub_em_reference
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.helmet.data import DEMO, PASSAGE, RAG, QaSet, Sources, choose, demo_form, template_form
from unspool.evals.suites.records import Item, Passage
from unspool.evals.wording import PREFIX, Form, Text, literal

_INSTRUCTION = (
    "Read the documents and answer the question in as few words as possible. Give your answer in this form:\n"
    "Answer: [answer]\n\n"
)
_FORM: Form = {
    **template_form(literal(_INSTRUCTION) + "{demos}{context}\n\nQuestion: {question}\n", "Answer:", "question"),
    **demo_form("{documents}\n\nQuestion: {question}\nAnswer: {answer}\n\n", "documents", "question", "answer"),
    PASSAGE: Text(own="Document (Title: {title}): {text}", needs=("text",), may=("title",)),
}
FORMS: dict[str, Form] = dict.fromkeys(RAG, _FORM)
WriteDemo = Callable[[str, Sources, Item], str]
ANSWER_TOKENS = 20
SHOTS, DEMO_PASSAGES = 2, 3
# HELMET's number of passages at each of its lengths.
COUNTS = {4096: 20, 8192: 50, 16384: 105, 32768: 220, 65536: 440, 131072: 1000}
# Examples may use at most 1/3 of the prompt.
DEMO_SHARE = 3


def table_count(counts: dict[int, int], length: int) -> int:
    """Return HELMET's number for a length. Other lengths scale the nearest one."""
    nearest = min(counts, key=lambda known: abs(known - length))
    return max(1, round(counts[nearest] * length / nearest))


def demo_order(item_id: str, count: int) -> np.ndarray:
    """Shuffle with the hash of the question's id as seed, like HELMET."""
    seed = int(hashlib.sha256(item_id.encode()).hexdigest(), 16) % 2**31
    order: np.ndarray = np.random.default_rng(seed).permutation(count)
    return order


def choose_demos(data: QaSet, item: Item, shots: int) -> list[Item]:
    shuffled = (data.demos[at] for at in demo_order(item.id, len(data.demos)))
    return list(islice((demo for demo in shuffled if demo.id != item.id), shots))


def demo_passages(data: QaSet, demo: Item, count: int) -> list[Passage]:
    """Return gold passages and distractors of an example, shuffled."""
    if demo.released and len(demo.released) <= count:
        return list(demo.released)
    gold = list(demo.gold[:count])
    shown = [*gold, *islice(data.pool.distractors(demo), count - len(gold))]
    return [shown[at] for at in demo_order(f"{demo.id} order", len(shown))]


@dataclass(frozen=True, kw_only=True)
class PassagePrompt:
    """A question and its prompt without passages."""

    item: Item
    data: QaSet
    head: str  # text before the passages, including examples
    question: str
    prefix: str
    shots: int
    tokens: int  # tokens of head, question and prefix

    @classmethod
    def build(cls, task: str, sources: Sources, ask: Ask, limit: int, write_demo: WriteDemo, repeats: int = 1) -> Self:
        """Choose question and examples. `fixed` mode drops examples that use too much of the limit.

        `write_demo` formats an example. In `reference` mode, each question occurs `repeats` times.
        """
        data, meter, wording = sources.qa(task), sources.meter, sources.wording
        reference = ask.mode == "reference"
        item = choose(data.items, task, ask.seed, ask.index // repeats if reference else ask.index)
        demos = [write_demo(task, sources, demo) for demo in choose_demos(data, item, SHOTS)]
        while not reference and demos and sum(map(meter.piece, demos)) * DEMO_SHARE > limit:
            demos.pop()
        head, question = wording.around(task, demos="".join(demos), question=item.question)
        prefix = wording.fill(task, PREFIX)
        tokens = meter.piece(head) + meter.piece(question + prefix)
        return cls(item=item, data=data, head=head, question=question, prefix=prefix, shots=len(demos), tokens=tokens)


def with_gold(others: Sequence[str], gold: Sequence[str], depths: Sequence[float]) -> tuple[list[str], list[int]]:
    """Insert gold texts at their depths. Returns (all texts, positions of gold texts)."""
    texts: list[str | None] = [None] * (len(others) + len(gold))
    positions = []
    for text, depth in zip(gold, depths, strict=True):
        position = round(depth * (len(texts) - 1))
        while texts[position] is not None:
            position = (position + 1) % len(texts)
        texts[position] = text
        positions.append(position)
    rest = iter(others)
    return [next(rest) if text is None else text for text in texts], positions


def gold_depths(task: str, ask: Ask, count: int) -> list[float]:
    """Spread the depths of `count` gold passages evenly over indices, each with its own offset."""
    start = float(rng_for(ask.seed, "helmet depth", task).random())
    return [spread(ask.index, (start + 0.618 * number) % 1) for number in range(count)]


def build(task: str, depths: int, sources: Sources, ask: Ask) -> Question:
    meter, wording, limit = sources.meter, sources.wording, room(ask, ANSWER_TOKENS)
    prompt = PassagePrompt.build(task, sources, ask, limit, _write_demo, repeats=depths)
    item, data = prompt.item, prompt.data

    def document(passage: Passage) -> str:
        return wording.fill(task, PASSAGE, title=passage.title, text=passage.text)

    gold = [document(passage) for passage in item.gold]
    others = Remembered(document(passage) for passage in data.pool.distractors(item))

    def build_fixed(budget: int) -> Question:
        used = prompt.tokens + sum(meter.piece(text) + meter.gap for text in gold)
        kept = meter.take(others, budget - used, between=meter.gap, keep=4)
        order = rng_for(ask.seed, "helmet passages", task, ask.length, ask.index).permutation(len(kept))
        passages, positions = with_gold([kept[at] for at in order], gold, gold_depths(task, ask, len(gold)))
        return question(passages, [position / max(1, len(passages) - 1) for position in positions])

    def build_reference(budget: int) -> Question:
        wanted = table_count(COUNTS, ask.length)
        at = [(ask.index % depths) / (depths - 1)] * len(gold)
        passages, positions = with_gold(list(islice(others, max(0, wanted - len(gold)))), gold, at)
        variants = data.variants.get(item.id, [])
        released = variants[ask.index % depths % len(variants)].released if variants else ()
        if len(released) == wanted:
            passages = [document(passage) for passage in released]
            positions = [at for at, passage in enumerate(released) if passage in item.gold]
        kept = meter.take(passages, budget - prompt.tokens, between=meter.gap)
        return question(kept, [position / max(1, len(passages) - 1) for position in positions])

    def question(passages: list[str], found: list[float]) -> Question:
        return Question(
            context=prompt.head + "\n\n".join(passages),
            question=prompt.question,
            prefix=prompt.prefix,
            references=item.answers,
            depth=found[0],
            meta={
                "mode": ask.mode,
                "oracle": item.answers[0],
                "generated": data.generated,
                "id": item.id,
                "shots": prompt.shots,
                "depths": found,
                "question": item.question,
            },
        )

    builder = build_reference if ask.mode == "reference" else build_fixed
    return fill(builder, meter, limit, what=f"helmet {task}", length=ask.length)


def _write_demo(task: str, sources: Sources, demo: Item) -> str:
    wording = sources.wording
    shown = demo_passages(sources.qa(task), demo, DEMO_PASSAGES)
    passages = "\n\n".join(wording.fill(task, PASSAGE, title=title, text=text) for title, text in shown)
    return wording.fill(task, DEMO, documents=passages, question=demo.question, answer=demo.answers[0])


def first_line(output: str, question: Question) -> str:
    """Cut an output at its first newline, except in `reference` mode.

    HELMET's configs request a stop at newlines with `stop_new_line`, which its parser does not know.
    """
    return output if question.meta["mode"] == "reference" else output.lstrip().split("\n", 1)[0]


def spoken(output: str, question: Question) -> str:
    """Return the scored text: in `reference` mode the whole output after the cue, else its first line."""
    return question.prefix + output if question.meta["mode"] == "reference" else first_line(output, question)


def cue_of(question: Question) -> str:
    """Return the cue before an answer. HELMET omits it for chat models and searches it in their output."""
    cue: str = question.meta.get("cue", question.prefix)
    return cue


def score(output: str, question: Question) -> float:
    metric = sub_em_reference if question.meta["mode"] == "reference" else sub_em
    return raw_or_parsed(metric, spoken(output, question), question.references, cue_of(question))
