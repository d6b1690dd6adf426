"""Questions about long texts, and summaries of them: NarrativeQA, ∞Bench, Multi-LexSum.

A prompt is an instruction, two examples without their texts, the text and the question. A text that is too long is cut
at its end, and a notice says so. As in HELMET, the answer may be in the part that is cut. `fixed` cuts to the length.
`reference` leaves another 200 tokens free (Multi-LexSum 300) like HELMET, but counts with the model's tokenizer instead
of Llama 2's. Generated texts are as long as needed. The depth of the answer is spread evenly over indices.
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
from unspool.evals.suites import generated_world
from unspool.evals.suites.helmet.data import DEMO, Sources, choose, demo_form, template_form
from unspool.evals.suites.helmet.rag import cue_of, demo_order
from unspool.evals.suites.records import Item, Record, first_field, flatten
from unspool.evals.wording import PREFIX, Form, Text, Wording, literal

INSTRUCTIONS = {
    "narrativeqa": (
        "Below is a story, a novel or the script of a film, and then a question about it. Answer with a short phrase "
        "where one is enough.\n\n"
    ),
    "infbench_qa": (
        "Below is a story, and then a question about it. Answer with a short phrase where one is enough.\n\n"
    ),
    "infbench_mc": (
        "Below is a story, and then a question with four options, one of which is right. Answer with its letter (A, B, "
        "C or D) and nothing more.\n\n"
    ),
    "infbench_sum": (
        "Below is a book. Tell its plot and its characters in 1000 to 1200 words. Leave out themes, background, "
        "analysis and opinion.\n\n"
    ),
    "multi_lexsum": (
        "Below are the documents of a civil rights lawsuit. Sum the case up in one paragraph of 200 to 250 words: how "
        "it came about, who the parties were, how it ended.\n\n"
    ),
}
DEMOS, NO_DEMOS, OMITTED = "demos", "no_demos", "omitted"


def _form(task: str, asked: str, demo: str, demos: tuple[str, str], *needs: str) -> Form:
    prefix = "Answer:" if "question" in needs else "Summary:"
    with_demos, without_demos = demos
    return {
        **template_form(literal(INSTRUCTIONS[task]) + "{demos}{context}\n\n" + asked, prefix, *needs),
        **demo_form(demo, *needs, "answer"),
        DEMOS: Text(own=with_demos, needs=("demos",)),
        NO_DEMOS: Text(own=without_demos),
        OMITTED: Text(own=" ... [what follows is left out]"),
    }


_NARRATIVE = ("For example:\n\n{demos}\n\nNow, use the following story to answer the question:\n\n", "")
_STORY = ("For example:\n\n{demos}\n\nNow, read the following story:\n\n", "")
_CASES = (
    "Example summaries:\n\n{demos}\n\nNow, write a summary of the following legal documents.\nLegal documents:\n",
    "Legal documents:\n",
)
_QUESTION = "Question: {question}\n"
_OPTIONS = f"{_QUESTION}Options:\n{{options}}\n"
_ANSWER = "Answer: {answer}"
FORMS: dict[str, Form] = {
    "narrativeqa": _form("narrativeqa", _QUESTION, f"{_QUESTION}{_ANSWER}", _NARRATIVE, "question"),
    "infbench_qa": _form("infbench_qa", f"{_QUESTION}\n", f"[story text]\n{_QUESTION}{_ANSWER}", _STORY, "question"),
    "infbench_mc": _form(
        "infbench_mc", f"{_OPTIONS}\n", f"[story text]\n{_OPTIONS}{_ANSWER}", _STORY, "question", "options"
    ),
    "infbench_sum": _form("infbench_sum", "Now summarize the book.\n\n", "[story text]\nSummary: {answer}", _STORY),
    "multi_lexsum": _form("multi_lexsum", "Now please summarize the case.\n\n", "Summary: {answer}", _CASES),
}
SHOTS = 2
ANSWER_TOKENS = {"narrativeqa": 100, "infbench_qa": 10, "infbench_mc": 10, "infbench_sum": 1200, "multi_lexsum": 400}
SUMMARIES = ("infbench_sum", "multi_lexsum")
SET_ASIDE = {"multi_lexsum": 300}  # tokens for everything except text and answer; default 200
BLOCK = 2000  # characters per tokenized block
LETTERS = "ABCD"
INFBENCH_SEED = 42


@dataclass(frozen=True, kw_only=True)
class Book:
    item: Item
    text: str | None  # None: generate a text
    options: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        return self.item.answers[0]


def books(task: str, sources: Sources) -> list[Book]:
    found: list[Book] = sources.cached(f"books {task}", lambda: _load(task, sources))
    return found


def _load(task: str, sources: Sources) -> list[Book]:
    rows = sources.records(task)
    if rows is None:
        return [_generate_book(task, item, at) for at, item in enumerate(generated_world.questions(task))]
    return [_read_book(task, row, sources.paths[task], number) for number, row in enumerate(rows)]


def _generate_book(task: str, item: Item, at: int) -> Book:
    if task in SUMMARIES:
        item = Item(id=item.id, question="", answers=(item.gold[0].text,), gold=item.gold)
    others = [other.answers[0] for other in generated_world.questions(task)[at % 3 :: 3] if other is not item]
    wrong = [others[(7 * at + step) % len(others)] for step in range(3)]
    options = [*wrong[: at % 4], item.answers[0], *wrong[at % 4 :]]
    return Book(item=item, text=None, options=tuple(options))


def _read_book(task: str, row: Record, path: str, number: int) -> Book:
    text = row.get("sources") or first_field(row, ("context", "document", "text", "passage", "story"), path)
    answers = flatten(first_field(row, ("answer", "answers", "summary/short", "summary"), path))
    question = "" if task in SUMMARIES else str(first_field(row, ("question", "input"), path))
    options = flatten(row.get("options") or [])
    if task == "infbench_mc" and (len(options) != len(LETTERS) or answers[0] not in options):
        raise DataError(f"{path}, record {row.get('_line')}: `options` must be four texts, including the answer.")
    item = Item(id=str(row.get("id", number)), question=question, answers=answers, extra=row)
    return Book(item=item, text="\n\n".join(flatten(text)), options=options)


def build(task: str, sources: Sources, ask: Ask) -> Question:
    known, meter, wording = books(task, sources), sources.meter, sources.wording
    by_id = sources.cached(f"books by id {task}", lambda: {id(book.item): book for book in known})
    book: Book = by_id[id(choose([book.item for book in known], task, ask.seed, ask.index))]
    answer_tokens = ANSWER_TOKENS[task]
    limit = room(ask, answer_tokens)
    demos = _choose_demos(task, book, known)
    head, question = wording.around(task, demos=_write_demos(task, demos, wording), **_values(book))
    prefix, omitted = wording.fill(task, PREFIX), wording.fill(task, OMITTED)
    used = meter.piece(head) + meter.piece(question + prefix)
    cap = ask.length - answer_tokens - SET_ASIDE.get(task, 200) if ask.mode == "reference" else ask.length
    start = float(rng_for(ask.seed, "helmet depth", task).random())
    depth = spread(ask.index, start)
    if book.text is None:
        first = 50_000 * (1 + ask.index % 3)
        blocks = Remembered(generated_world.filler(first + number).text + "\n\n" for number in count())
    else:
        blocks = Remembered(text_blocks(book.text))

    def build_within(budget: int) -> Question:
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
            prefix=prefix,
            references=_references(task, book),
            depth=depth if book.text is None else None,
            meta={
                "mode": ask.mode,
                "oracle": _references(task, book)[0],
                "generated": book.text is None,
                "id": book.item.id,
                "question": book.item.question,
                "shots": len(demos),
                **({"expert_summary": book.answer, "key_points": _key_points(book)} if task in SUMMARIES else {}),
            },
        )

    return fill(build_within, meter, limit, what=f"helmet {task}", length=ask.length)


def text_blocks(text: str) -> list[str]:
    """Split a text into blocks that end at a space, so that their token counts add up."""
    blocks, at = [], 0
    while at < len(text):
        end = text.rfind(" ", at + 1, at + BLOCK)
        end = end if end > at and at + BLOCK < len(text) else min(len(text), at + BLOCK)
        blocks.append(text[at:end])
        at = end
    return blocks


def _choose_demos(task: str, book: Book, known: list[Book]) -> list[Book]:
    others = [other for other in known if other.item.id != book.item.id]
    if task.startswith("infbench"):
        order = np.random.default_rng(INFBENCH_SEED).permutation(len(others))
    else:
        order = demo_order(book.item.id, len(others))
    return [others[at] for at in order[:SHOTS]]


def _write_demos(task: str, demos: list[Book], wording: Wording) -> str:
    if not demos:
        return wording.fill(task, NO_DEMOS)
    # ∞Bench's questions and answers have spaces at both ends.
    trim = str.strip if task.startswith("infbench") else str
    listed = []
    for book in demos:
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
    """Return the key points of a summary, from the record or from the sentences of a generated text."""
    if book.text is None:
        return [sentence for sentence in book.answer.split(". ") if sentence]
    return list(flatten(book.item.extra.get("key_points") or book.item.extra.get("keypoints") or []))


def score_qa(output: str, question: Question) -> float:
    said = question.prefix + output if question.meta["mode"] == "reference" else output
    return raw_or_parsed(rouge_l, said, question.references, cue_of(question))


def score_choice(output: str, question: Question) -> float:
    """Accept the letter alone, or "B. option text" anywhere.

    HELMET uses a chat template, so no prefix is restored, except with HELMET's prompts and base models.
    """
    metric = exact_match_reference if question.meta["mode"] == "reference" else exact_match
    output = question.prefix + output if "cue" in question.meta else output
    letter, spelled = question.references
    exact = max(best(metric, text, (letter, spelled)) for text in (output, parse_answer(output)))
    return float(spelled.lower() in output.lower() or bool(exact) or _first_letter(output, question) == letter)


def _first_letter(output: str, question: Question) -> str:
    """Find a letter such as "B." or "(B)" before other text (`fixed` mode only; HELMET counts it as wrong)."""
    if question.meta["mode"] == "reference":
        return ""
    words = textwrap.shorten(parse_answer(output.lstrip()), 80).replace("(", " ").split()
    return words[0].rstrip(".):,") if words and len(words[0]) <= 2 else ""


def left_to_judge(output: str, question: Question) -> None:
    """Return None, because only a judge can score this."""
