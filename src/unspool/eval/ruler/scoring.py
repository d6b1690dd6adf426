"""Is the answer there? RULER's string match, and the same by whole words.

In: an output, the question with its references. Out: 0 to 1.
Promise: `reference` mode is RULER's own rule: any substring, upper and lower case alike, control characters read as
new lines. `fixed` mode asks for whole words besides: "no" is not found in "I do not know", 1234567 not in 12345678.
"""

import re

from unspool.eval.task import Asked

_CONTROL = re.compile(r"[\x00-\x1f]")


def match_all(output: str, asked: Asked) -> float:
    """The share of references that the output holds."""
    found = _found(output, asked)
    return sum(found) / len(found)


def match_any(output: str, asked: Asked) -> float:
    """1 if the output holds any of the references."""
    return float(max(_found(output, asked)))


def _found(output: str, asked: Asked) -> list[bool]:
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
