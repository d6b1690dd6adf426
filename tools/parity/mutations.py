"""Answers for comparing scores: correct ones, damaged in the ways models damage them."""

import random

from unspool.evals.suite import Question

_SAID = (
    "",
    " ",
    "\n",
    "Answer: ",
    "answer:",
    "The answer is ",
    "Sure! ",
    "label: ",
    "Corresponding value: ",
    "Ranking: ",
)
_AFTER = ("", ".", "\n", ", ", "\n\nQuestion: and then?\nAnswer: no", " [1][2].", "<|im_end|>", " the", "\n\n.", "?!")


def mutated(rng: random.Random, question: Question) -> str:
    """Return an output that may contain a reference; lists and rankings keep their form."""
    if "relevance" in question.meta:
        return _ranking(rng, list(question.meta["relevance"]))
    if "answers" in question.meta:
        return _list(rng, question.meta["answers"])
    references = list(question.references)
    text = rng.choice(references) if rng.random() < 0.8 else rng.choice(("", "B", "A.", "the", "17", "no idea"))
    if rng.random() < 0.3:
        text = " ".join(references)
    return rng.choice(_SAID) + _damaged(rng, text) + rng.choice(_AFTER)


def _damaged(rng: random.Random, text: str) -> str:
    words = text.split(" ")
    for _ in range(rng.choice((0, 0, 1, 2))):
        at = rng.randrange(len(words))
        kind = rng.randrange(9)
        if kind == 0:
            words[at] = words[at].upper()
        elif kind == 1:
            words.insert(at, rng.choice(("a", "The", "an", "of", "\n", "和", "的")))
        elif kind == 2:
            words[at] = f"“{words[at]}”,"
        elif kind == 3:
            words.pop(at)
        elif kind == 4:
            words[at] = words[at][: len(words[at]) // 2]
        elif kind == 5:
            words += words[: at + 1]
        elif kind == 6:
            rng.shuffle(words)
        elif kind == 7:
            words[at] += rng.choice((".", "'s", "-x", "{}", "：", "。"))
        else:
            words[at] = words[at].replace("a", "é")
        if not words:
            return ""
    return " ".join(words)


def _ranking(rng: random.Random, ids: list[str]) -> str:
    shown = rng.sample(ids, min(len(ids), rng.choice((0, 1, 5, 12, 40))))
    shown += [rng.choice([*ids, "99999"]) for _ in range(rng.choice((0, 0, 1, 3)))]
    join = rng.choice((" > ", ">", " >\n", ", ", " > ID"))
    return (
        rng.choice(("", " ", "ID", "[ID: ", "Ranking: ", "3 > 1\n"))
        + join.join(shown)
        + rng.choice(("", "]", " > x", "."))
    )


def _list(rng: random.Random, answers: list[list[str]]) -> str:
    marks, ends = ("", " [1]", "[2][3]", " [9]", " [0]", " |", " [1][2][3][4]"), (", ", ", ", ",", "\n", "\n\n", ". ")
    items = [_damaged(rng, rng.choice(rng.choice(answers))) for _ in range(rng.randrange(12))]
    if items and rng.random() < 0.3:
        items[0] = items[0].capitalize()
    listed = "".join(item + rng.choice(marks) + rng.choice(ends) for item in items)
    return (
        rng.choice(("", "\n", " ", "Answer: "))
        + listed
        + rng.choice(("", ".", ",", "\n\nQuestion: who?\n", "<|im_end|>"))
    )
