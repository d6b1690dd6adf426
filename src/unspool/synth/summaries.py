"""Recursive summaries: of the parts of a text, of groups of those summaries, and so on to one of the whole.

In: parts in order, what asks. Out: the summary with what it was made of, or the reply that could not be read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from unspool.synth.asks import Asks
from unspool.synth.prompts import read_summary
from unspool.synth.replies import Request

AskAll = Callable[[list[Request]], list[str]]


@dataclass(frozen=True, kw_only=True)
class Summary:
    text: str
    basis: str  # what the last request showed


def summarize(parts: list[str], group: int, ask: AskAll, *, asks: Asks, longest: int) -> Summary | str:
    """`longest` is the most tokens that a reply may have."""
    level = _read(ask(asks.summaries(parts, longest)))
    if isinstance(level, str):
        return level
    basis = parts[0]
    while len(level) > 1:
        groups = even_groups(level, group)
        basis = "\n\n".join(groups[0])
        level = _read(ask([asks.join(one, longest, is_whole=len(groups) == 1) for one in groups]))
        if isinstance(level, str):
            return level
    return Summary(text=level[0], basis=basis)


def even_groups(texts: list[str], most: int) -> list[list[str]]:
    """Consecutive texts in as few groups of at most `most` as possible, of about equal size."""
    count = -(-len(texts) // most)
    cuts = [round(number * len(texts) / count) for number in range(count + 1)]
    return [texts[start:stop] for start, stop in pairwise(cuts)]


def num_requests(parts: int, group: int) -> int:
    """How many requests a text of so many parts takes."""
    total = level = parts
    while level > 1:
        level = -(-level // group)
        total += level
    return total


def _read(replies: list[str]) -> list[str] | str:
    """The summaries; the first reply that is none."""
    found: list[str] = []
    for reply in replies:
        summary = read_summary(reply)
        if summary is None:
            return reply
        found.append(summary)
    return found
