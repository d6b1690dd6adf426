"""LV-Eval as a `Suite`: instruction, article, instruction again, question; what is too long loses its middle.

In: sources, an `Ask`. Out: `Asked`. `fixed` cuts the article's middle where the length is full; `reference` cuts the
whole prompt to the length less 500 tokens, as LV-Eval's runs do. Only the first reference counts, as there.
Elsewhere: scores (metrics/keywords.py).
"""

from functools import partial
from itertools import count

from unspool.base.rng import rng_for
from unspool.eval.fill import Meter, Remembered, fill, room, spread
from unspool.eval.helmet.generated import filler
from unspool.eval.lveval.sources import Question, Sources, language_of, load
from unspool.eval.lveval.wording import FORMS, PROMPTS
from unspool.eval.lveval.words import words_for
from unspool.eval.metrics.keywords import filtered_rouge_l, gated_f1, plain_f1
from unspool.eval.task import Ask, Asked, Suite, Task
from unspool.eval.wording import PREFIX

VERSION = 1
ANSWER_TOKENS, FACT_TOKENS = 64, 16
SET_ASIDE = 500  # tokens that LV-Eval leaves free of the context
BLOCK = 1000  # characters that are counted at once


def build(task: str, answer_tokens: int, sources: Sources, ask: Ask) -> Asked:
    meter, language = sources.meter, language_of(task)
    questions = sources.questions(task, ask.length)
    order = rng_for(ask.seed, "lveval order", task).permutation(len(questions))
    question = questions[int(order[ask.index % len(questions)])]
    before, asked_text = sources.wording.around(task, input=question.text)
    cue = sources.wording.fill(task, PREFIX)
    limit = room(ask, answer_tokens)
    if ask.mode == "reference":
        limit = min(limit, ask.length - SET_ASIDE)
    used = meter.piece(before) + meter.piece(asked_text + cue)
    depth = spread(ask.index, float(rng_for(ask.seed, "lveval depth", task).random()))
    filling = Remembered(filler(90_000 + 500 * ask.index + number).text + "\n" for number in count())
    blacklist = sorted(sources.words[language].blacklist)

    def asked(budget: int) -> Asked:
        free = budget - used
        return Asked(
            context=before + _article(question, meter, free, filling, depth),
            question=asked_text,
            prefix=cue,
            references=question.answers,
            depth=depth if question.article is None else None,
            meta={
                "mode": ask.mode,
                "generated": question.article is None,
                "oracle": question.answers[0],
                "keywords": question.keywords,
                "blacklist": blacklist,
                "own_blacklist": sources.own_blacklist[language],
                "segmenter": sources.segmenter,
            },
        )

    return fill(asked, meter, limit, what=f"lveval {task}", length=ask.length)


def _article(question: Question, meter: Meter, free: int, filling: Remembered, depth: float) -> str:
    if question.article is None:
        kept = meter.take(filling, free - meter.piece(question.fact) - 1)
        kept.insert(round(depth * len(kept)), question.fact + "\n")
        return "".join(kept).rstrip()
    text = question.article
    blocks = [text[at : at + BLOCK] for at in range(0, len(text), BLOCK)]
    sizes = [meter.piece(block) for block in blocks]
    if sum(sizes) <= free:
        return text
    return _head(blocks, sizes, free // 2) + _tail(blocks, sizes, free // 2)


def _head(blocks: list[str], sizes: list[int], free: int) -> str:
    """The beginning, of which the last block is cut in proportion: Chinese has no spaces to cut at."""
    kept = ""
    for block, size in zip(blocks, sizes, strict=True):
        if size > free:
            return kept + block[: max(0, free) * len(block) // size]
        kept, free = kept + block, free - size
    return kept


def _tail(blocks: list[str], sizes: list[int], free: int) -> str:
    kept = ""
    for block, size in zip(reversed(blocks), reversed(sizes), strict=True):
        if size > free:
            part = max(0, free) * len(block) // size
            return block[len(block) - part :] + kept
        kept, free = block + kept, free - size
    return kept


def score(task: str, output: str, asked: Asked) -> float:
    meta = asked.meta
    words = words_for(language_of(task), frozenset(meta["blacklist"]), meta["segmenter"])
    answer = asked.references[0]
    if task.startswith("factrecall"):
        return plain_f1(output, answer, words)
    if task == "dureader_mixup":
        return filtered_rouge_l(output, answer, words, meta["mode"])
    return gated_f1(output, answer, meta["keywords"], words, meta["mode"])


def _task(name: str) -> Task:
    answer_tokens = FACT_TOKENS if name.startswith("factrecall") else ANSWER_TOKENS
    metrics = {"dureader_mixup": "ROUGE-L"}
    return Task(
        name=name,
        metric="F1" if name.startswith("factrecall") else metrics.get(name, "keyword F1"),
        answer_tokens=answer_tokens,
        build=partial(build, name, answer_tokens),
        score=partial(score, name),
        size=lambda sources: len(sources.questions(name, 0)),
        stratum=lambda sources, index: index % 8,  # depths of generated articles go round in eighths
    )


SUITE = Suite(name="lveval", version=VERSION, tasks={name: _task(name) for name in PROMPTS}, load=load, wording=FORMS)
