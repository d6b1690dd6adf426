"""Is an answer right? Pure functions from output and reference to 0 or 1.

A model that lists everything it has seen must not win, so a word has to come first and a number
has to stand on the first line, whole.
"""

import re

from unspool.base.lookup import lookup
from unspool.eval.prompt import Match


def score_answer(output: str, reference: str, match: Match) -> float:
    return float(lookup(SCORERS, match, kind="match")(output.strip().lower(), reference.lower()))


def _starts_with(output: str, reference: str) -> bool:
    """The answer is the first word: "river." counts for river, "riverbank" and "the river" do not."""
    return re.match(rf"{re.escape(reference)}(?![\w-])", output) is not None


def _contains(output: str, reference: str) -> bool:
    """The answer stands on the first line, not as a part of something longer."""
    first_line = output.split("\n", 1)[0]
    return re.search(rf"(?<![\w-]){re.escape(reference)}(?![\w-])", first_line) is not None


SCORERS = {"start": _starts_with, "contains": _contains}
