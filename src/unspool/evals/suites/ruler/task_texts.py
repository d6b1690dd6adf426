"""How the tasks of RULER are worded: in words of our own, in its order and with its forms of answers, or in a user's.

In: what is hidden and asked. Out: the three parts of a prompt: what comes before the question, the question, the
words that the answer begins with. Placeholders have RULER's names, so that its texts can be put into a file.
Price: scores can differ from published ones by what wording does.
In `fixed` mode a prefix that ends in a space loses it: most tokenizers join a space with the word after it, so
that a prompt which ends in one is continued badly.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unspool.evals.suite import Question
from unspool.evals.wording import PREFIX, TEMPLATE, Form, Text, Wording

NOISE = "The lake is calm. The road is long. The bread is warm. Off we walk. Down the hill and home."
_NEEDLE = "One special magic {type} for {key} is {value}."
_ONE = (
    "One special magic {type_needle_v} is hidden somewhere in the text below. Keep it in mind: a question about it "
    "comes at the end.\n{context}\n"
    "Which is the special magic {type_needle_v} for {query} that the text above gives?",
    " The special magic {type_needle_v} for {query} that the text above gives is",
)
_SEVERAL = (
    "Several special magic {type_needle_v} are hidden somewhere in the text below. Keep them in mind: a question "
    "about them comes at the end.\n{context}\n"
    "Which are all the special magic {type_needle_v} for {query} that the text above gives?",
    " The special magic {type_needle_v} for {query} that the text above gives are",
)
_ASKED = "Answer the question from the documents, with nothing but the answer itself."


def _needles(texts: tuple[str, str], *, noise: bool = False) -> Form:
    template, prefix = texts
    return {
        TEMPLATE: Text(own=template, needs=("context", "query"), may=("type_needle_v",)),
        PREFIX: Text(own=prefix, may=("query", "type_needle_v")),
        "needle": Text(own=_NEEDLE, needs=("key", "value"), may=("type_needle_v", "type")),
        **({"noise": Text(own=NOISE)} if noise else {}),
    }


_QA: Form = {
    TEMPLATE: Text(
        own=f"{_ASKED}\n\nThese are the documents.\n\n{{context}}\n\n{_ASKED}\n\nQuestion: {{query}}",
        needs=("context", "query"),
    ),
    PREFIX: Text(own=" Answer:", may=("query",)),
    "document": Text(own="Document {i}:\n{document}", needs=("document",), may=("i",)),
}
FORMS: dict[str, Form] = {
    "niah_single_1": _needles(_ONE, noise=True),
    **{name: _needles(_ONE) for name in ("niah_single_2", "niah_single_3")},
    **{f"niah_multikey_{number}": _needles(_ONE) for number in (1, 2, 3)},
    **{name: _needles(_SEVERAL) for name in ("niah_multivalue", "niah_multiquery")},
    "vt": {
        TEMPLATE: Text(
            own="The text below gives values to variables, to some by way of others. Keep track of what each of them "
            "holds.\n\n{context}\nQuestion: Which variables hold the value {query} after all that the text above "
            "assigns?",
            needs=("context", "query"),
            may=("num_v",),
        ),
        PREFIX: Text(
            own=" Answer: After all that the text above assigns, {num_v} variables hold the value {query}, namely: ",
            may=("query", "num_v"),
        ),
        "noise": Text(own=NOISE),
    },
    "cwe": {
        TEMPLATE: Text(
            own="Here is a numbered list of words, in which some stand more often than others. Remember those that "
            "stand there most often.\n{context}\nQuestion: Which 10 words stand most often in the list above?",
            needs=("context",),
        ),
        PREFIX: Text(own=" Answer: The 10 words that stand most often in the list are:"),
    },
    "fwe": {
        TEMPLATE: Text(
            own="The following text is written in code words. Count how often each of them occurs, and find the three "
            "that occur most often. {context}\nQuestion: Which three code words occur most often in the text above? "
            "Dots ('....') do not count. Give no explanation.",
            needs=("context",),
        ),
        PREFIX: Text(own=" Answer: In the text above, the three code words that occur most often are:"),
    },
    "qa_1": _QA,
    "qa_2": _QA,
}
OWN = Wording(forms=FORMS)


@dataclass(frozen=True)
class Parts:
    context: str
    question: str
    prefix: str

    @property
    def text(self) -> str:
        return self.context + self.question + self.prefix


def parts(wording: Wording, task: str, context: str, *, trailing_space: bool = False, **values: str) -> Parts:
    """The prompt of a task; line ends after the context belong to it."""
    before, after = wording.around(task, **values)
    question = after.lstrip("\n")
    ends = after[: len(after) - len(question)]
    prefix = wording.fill(task, PREFIX, **values)
    return Parts(before + context + ends, question, prefix if trailing_space else prefix.rstrip(" "))


def needle(wording: Wording, task: str, kind: str) -> Callable[[str, str], str]:
    """Writes a fact of key and value; `kind` is the plural: numbers, uuids."""
    text, one = wording.text(task, "needle"), kind.removesuffix("s")
    return lambda key, value: text.format(key=key, value=value, type_needle_v=kind, type=one)


def niah(wording: Wording, task: str, haystack: str, keys: Sequence[str], kind: str, *, one: bool) -> Parts:
    """`one`: a single value is asked for, and its kind is in the singular."""
    query = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
    return parts(wording, task, haystack, query=query, type_needle_v=kind.removesuffix("s") if one else kind)


def numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def documents(wording: Wording, task: str, texts: Sequence[str], query: str) -> Parts:
    form = wording.text(task, "document")
    listed = "\n\n".join(form.format(i=str(number), document=text) for number, text in enumerate(texts, 1))
    return parts(wording, task, listed, query=query)


# Is the answer there? RULER's string match, and the same by whole words.


_CONTROL = re.compile(r"[\x00-\x1f]")


def match_all(output: str, asked: Question) -> float:
    """The share of references that the output holds."""
    found = _found(output, asked)
    return sum(found) / len(found)


def match_any(output: str, asked: Question) -> float:
    """1 if the output holds any of the references."""
    return float(max(_found(output, asked)))


def _found(output: str, asked: Question) -> list[bool]:
    text = _CONTROL.sub("\n", output.strip()).strip().lower()
    references = [reference.lower() for reference in asked.references]
    if asked.meta["mode"] == "reference":
        return [reference in text for reference in references]
    return [_as_words(reference, text) for reference in references]


def _as_words(reference: str, text: str) -> bool:
    """Only neighbours in Latin letters and digits make a longer word: elsewhere words need no spaces between them."""
    at = text.find(reference)
    while at >= 0:
        end = at + len(reference)
        joined_before = at > 0 and _in_word(text[at - 1]) and _in_word(reference[0])
        joined_after = end < len(text) and _in_word(text[end]) and _in_word(reference[-1])
        if not joined_before and not joined_after:
            return True
        at = text.find(reference, at + 1)
    return False


def _in_word(char: str) -> bool:
    return char.isascii() and char.isalnum()
