"""How the tasks of RULER are worded: in words of our own, in its order and with its forms of answers.

In: what is hidden and asked. Out: the three parts of a prompt: what comes before the question, the question, the
words that the answer begins with.
Price: scores can differ from published ones by what wording does.
In `fixed` mode the last prefix that ends in a space loses it: most tokenizers join a space with the word after it, so
that a prompt which ends in one is continued badly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NOISE = "The lake is calm. The road is long. The bread is warm. Off we walk. Down the hill and home."


@dataclass(frozen=True)
class Parts:
    context: str
    question: str
    prefix: str

    @property
    def text(self) -> str:
        return self.context + self.question + self.prefix


def needle(key: str, value: str, kind: str) -> str:
    """`kind` is the plural: numbers, uuids."""
    return f"One special magic {kind.removesuffix('s')} for {key} is {value}."


def niah(haystack: str, keys: Sequence[str], kind: str, *, one: bool) -> Parts:
    """`one`: a single value is asked for, and the wording is in the singular."""
    query = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
    if one:
        kind = kind.removesuffix("s")
        some, which, them, are = "One", "is", "it", "is"
    else:
        some, which, them, are = "Several", "are all", "them", "are"
    return Parts(
        f"{some} special magic {kind} {are} hidden somewhere in the text below. Keep {them} in mind: a question about "
        f"{them} comes at the end.\n{haystack}\n",
        f"Which {which} the special magic {kind} for {query} that the text above gives?",
        f" The special magic {kind} for {query} that the text above gives {are}",
    )


def tracing(haystack: str, value: str, num_names: int, *, trailing_space: bool) -> Parts:
    end = " " if trailing_space else ""
    return Parts(
        "The text below gives values to variables, to some by way of others. Keep track of what each of them holds."
        "\n\n" + haystack + "\n",
        f"Question: Which variables hold the value {value} after all that the text above assigns?",
        f" Answer: After all that the text above assigns, {num_names} variables hold the value {value}, namely:{end}",
    )


def numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def common_words(listed: Sequence[str]) -> Parts:
    return Parts(
        "Here is a numbered list of words, in which some stand more often than others. "
        f"Remember those that stand there most often.\n{numbered(listed)}\n",
        "Question: Which 10 words stand most often in the list above?",
        " Answer: The 10 words that stand most often in the list are:",
    )


def coded_words(coded: Sequence[str]) -> Parts:
    return Parts(
        "The following text is written in code words. Count how often each of them occurs, and find the three that "
        f"occur most often. {' '.join(coded)}\n",
        "Question: Which three code words occur most often in the text above? Dots ('....') do not count. Give no "
        "explanation.",
        " Answer: In the text above, the three code words that occur most often are:",
    )


def documents(texts: Sequence[str], query: str) -> Parts:
    asked = "Answer the question from the documents, with nothing but the answer itself."
    numbered_texts = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(texts, 1))
    return Parts(
        f"{asked}\n\nThese are the documents.\n\n{numbered_texts}\n\n",
        f"{asked}\n\nQuestion: {query}",
        " Answer:",
    )
