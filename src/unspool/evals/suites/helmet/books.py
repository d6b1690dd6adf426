"""Long texts with a question or to be summed up: NarrativeQA, ∞Bench, Multi-LexSum.

In: sources, an `Ask`. Out: `Question`: instruction, two examples without their stories, the text, the question.
The end of the text is cut off and a notice says so. `fixed` cuts where the length is full; `reference` cuts to the
length less the answer and 200 tokens (Multi-LexSum 300) as HELMET does, but in the model's tokens, not Llama 2's.
Price: the answer may stand in what is cut off, as in HELMET; a text shorter than the length leaves it unfilled.
Generated texts are as long as wanted, and the passage that answers stands at depths spread evenly over indices.
"""

import textwrap
from dataclasses import dataclass
from itertools import count

import numpy as np

from unspool.core.errors import DataError
from unspool.core.rng import rng_for
from unspool.evals.fill import Remembered, fill, room, spread
from unspool.evals.scoring.answers import best, exact_match, exact_match_reference, parse_answer, raw_or_parsed
from unspool.evals.scoring.rouge import rouge_l
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.helmet import generated
from unspool.evals.suites.helmet.datasets import Sources, chosen
from unspool.evals.suites.helmet.instructions import DEMO, DEMOS, NO_DEMOS, OMITTED_NOTICE
from unspool.evals.suites.helmet.rag import demo_order
from unspool.evals.suites.helmet.records import Item, Record, one_of, strings
from unspool.evals.wording import PREFIX, Wording

SHOTS = 2
ANSWER_TOKENS = {"narrativeqa": 100, "infbench_qa": 10, "infbench_mc": 10, "infbench_sum": 1200, "multi_lexsum": 400}
SUMMARIES = ("infbench_sum", "multi_lexsum")
SET_ASIDE = {"multi_lexsum": 300}  # tokens for everything but text and answer; else 200
BLOCK = 2000  # characters that are counted at once
LETTERS = "ABCD"
INFBENCH_SEED = 42


@dataclass(frozen=True, kw_only=True)
class Book:
    item: Item
    text: str | None  # None: generated
    options: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        return self.item.answers[0]


def books(task: str, sources: Sources) -> list[Book]:
    found: list[Book] = sources.once(f"books {task}", lambda: _read(task, sources))
    return found


def _read(task: str, sources: Sources) -> list[Book]:
    rows = sources.records(task)
    if rows is None:
        return [_generated(task, item, at) for at, item in enumerate(generated.questions(task))]
    return [_book(task, row, sources.paths[task], number) for number, row in enumerate(rows)]


def _generated(task: str, item: Item, at: int) -> Book:
    if task in SUMMARIES:
        item = Item(id=item.id, question="", answers=(item.gold[0].text,), gold=item.gold)
    others = [other.answers[0] for other in generated.questions(task)[at % 3 :: 3] if other is not item]
    wrong = [others[(7 * at + step) % len(others)] for step in range(3)]
    options = [*wrong[: at % 4], item.answers[0], *wrong[at % 4 :]]
    return Book(item=item, text=None, options=tuple(options))


def _book(task: str, row: Record, path: str, number: int) -> Book:
    text = row.get("sources") or one_of(row, ("context", "document", "text", "passage", "story"), path)
    answers = strings(one_of(row, ("answer", "answers", "summary/short", "summary"), path))
    question = "" if task in SUMMARIES else str(one_of(row, ("question", "input"), path))
    options = strings(row.get("options") or [])
    if task == "infbench_mc" and (len(options) != len(LETTERS) or answers[0] not in options):
        raise DataError(f"{path}, record {row.get('_line')}: `options` must be four texts, one of them the answer.")
    item = Item(id=str(row.get("id", number)), question=question, answers=answers, extra=row)
    return Book(item=item, text="\n\n".join(strings(text)), options=options)


def build(task: str, sources: Sources, ask: Ask) -> Question:
    known, meter, wording = books(task, sources), sources.meter, sources.wording
    by_id = sources.once(f"books by id {task}", lambda: {id(book.item): book for book in known})
    book: Book = by_id[id(chosen([book.item for book in known], task, ask.seed, ask.index))]
    answer_tokens = ANSWER_TOKENS[task]
    limit = room(ask, answer_tokens)
    shown = _demos(task, book, known)
    head, question = wording.around(task, demos=_examples(task, shown, wording), **_values(book))
    cue, omitted = wording.fill(task, PREFIX), wording.fill(task, OMITTED_NOTICE)
    used = meter.piece(head) + meter.piece(question + cue)
    cap = ask.length - answer_tokens - SET_ASIDE.get(task, 200) if ask.mode == "reference" else ask.length
    start = float(rng_for(ask.seed, "helmet depth", task).random())
    depth = spread(ask.index, start)
    if book.text is None:
        first = 50_000 * (1 + ask.index % 3)
        blocks = Remembered(generated.filler(first + number).text + "\n\n" for number in count())
    else:
        blocks = Remembered(text_blocks(book.text))

    def asked(budget: int) -> Question:
        free = min(cap, budget - used)
        if book.text is None:
            gold = book.item.gold[0].text + "\n\n"
            kept = meter.take(blocks, free - meter.piece(gold))
            kept.insert(round(depth * len(kept)), gold)
            text = "".join(kept).rstrip()
        else:
            text = "".join(meter.take(blocks, free))
            if len(text) < len(book.text):
                text = "".join(meter.take(blocks, free - meter.piece(omitted))) + omitted
        return Question(
            context=head + text,
            question=question,
            prefix=cue,
            references=_references(task, book),
            depth=depth if book.text is None else None,
            meta={
                "mode": ask.mode,
                "oracle": _references(task, book)[0],
                "generated": book.text is None,
                "id": book.item.id,
                "question": book.item.question,
                "shots": len(shown),
                **({"expert_summary": book.answer, "key_points": _key_points(book)} if task in SUMMARIES else {}),
            },
        )

    return fill(asked, meter, limit, what=f"helmet {task}", length=ask.length)


def text_blocks(text: str) -> list[str]:
    """The text in pieces that end at a space, so that counting them apart counts nothing twice."""
    blocks, at = [], 0
    while at < len(text):
        end = text.rfind(" ", at + 1, at + BLOCK)
        end = end if end > at and at + BLOCK < len(text) else min(len(text), at + BLOCK)
        blocks.append(text[at:end])
        at = end
    return blocks


def _demos(task: str, book: Book, known: list[Book]) -> list[Book]:
    others = [other for other in known if other.item.id != book.item.id]
    infbench = task.startswith("infbench")
    order = (
        np.random.default_rng(INFBENCH_SEED).permutation(len(others))
        if infbench
        else demo_order(book.item.id, len(others))
    )
    return [others[at] for at in order[:SHOTS]]


def _examples(task: str, shown: list[Book], wording: Wording) -> str:
    if not shown:
        return wording.fill(task, NO_DEMOS)
    # ∞Bench's questions and answers come with space around them.
    trim = str.strip if task.startswith("infbench") else str
    listed = []
    for book in shown:
        values = {name: trim(value) for name, value in _values(book).items()}
        listed.append(wording.fill(task, DEMO, answer=trim(_references(task, book)[0]), **values))
    return wording.fill(task, DEMOS, demos="\n\n".join(listed))


def _values(book: Book) -> dict[str, str]:
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, book.options, strict=False))
    return {"question": book.item.question, "options": listed}


def _references(task: str, book: Book) -> tuple[str, ...]:
    if task == "infbench_mc":
        letter = LETTERS[book.options.index(book.answer)]
        return letter, f"{letter}. {book.answer}"
    return book.item.answers


def _key_points(book: Book) -> list[str]:
    """What a summary should say: as the record has it, or the sentences of a generated one."""
    if book.text is None:
        return [sentence for sentence in book.answer.split(". ") if sentence]
    return list(strings(book.item.extra.get("key_points") or book.item.extra.get("keypoints") or []))


def score_qa(output: str, asked: Question) -> float:
    return raw_or_parsed(rouge_l, output, asked.references, asked.prefix, asked.meta["mode"])


def score_choice(output: str, asked: Question) -> float:
    """The letter alone, or "B. its text" anywhere; HELMET puts no cue back where a chat template is used."""
    metric = exact_match_reference if asked.meta["mode"] == "reference" else exact_match
    letter, spelled = asked.references
    exact = max(best(metric, text, (letter, spelled)) for text in (output, parse_answer(output)))
    return float(spelled.lower() in output.lower() or bool(exact) or _said_letter(output, asked) == letter)


def _said_letter(output: str, asked: Question) -> str:
    """`fixed` also takes "B." and "(B)" with more behind it, which HELMET counts wrong."""
    if asked.meta["mode"] == "reference":
        return ""
    words = textwrap.shorten(parse_answer(output.lstrip()), 80).replace("(", " ").split()
    return words[0].rstrip(".):,") if words and len(words[0]) <= 2 else ""


def judged(output: str, asked: Question) -> None:
    """A judge has to say."""
