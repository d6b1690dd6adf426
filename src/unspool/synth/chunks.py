"""Where documents are cut: into parts of about equal size, and to a stretch around one of them.

In: a text, sizes in characters. Out: spans (start, stop) of it.
Promise: spans lie in order, do not overlap and leave out nothing but the space between them; cuts fall at the end of a
paragraph or sentence where there is one near by, else between words, else anywhere.
Price: sizes are met to about a tenth; what counts in tokens is measured when an example is made.
"""

import re
from itertools import pairwise

import numpy as np

Span = tuple[int, int]
# A cut may be moved back by this share of a part's size to reach a better place.
SLACK = 0.3
_BREAKS = (re.compile(r"\n\s*\n"), re.compile(r"[.!?…][\"'”’)]*\s+"), re.compile(r"\s+"))


def tile(text: str, size: int) -> list[Span]:
    """The text in parts of about `size` characters; a short rest is spread over all of them."""
    count = max(1, round(len(text) / size))
    wanted = len(text) / count
    cuts = [0]
    for number in range(1, count):
        cuts.append(max(cuts[-1], cut_before(text, round(number * wanted), slack=int(SLACK * wanted))))
    cuts.append(len(text))
    spans = [_trim(text, start, stop) for start, stop in pairwise(cuts)]
    return [span for span in spans if span[1] > span[0]]


def cut_before(text: str, at: int, *, slack: int) -> int:
    """The best place to cut, at most `slack` characters before `at`."""
    if at >= len(text):
        return len(text)
    low = max(0, at - slack)
    for pattern in _BREAKS:
        ends = [found.end() for found in pattern.finditer(text, low, at)]
        if ends:
            return ends[-1]
    return at


def around(text: str, inner: Span, room: int, rng: np.random.Generator) -> Span:
    """A stretch of at most `room` characters that holds `inner`, which lies anywhere in it, by chance."""
    if len(text) <= room:
        return _trim(text, 0, len(text))
    start, stop = inner
    room = max(room, stop - start)
    first, last = max(0, stop - room), min(start, len(text) - room)
    begin = int(rng.integers(first, last + 1)) if last > first else max(0, min(first, start))
    end = min(len(text), begin + room)
    # To whole words, but never into the inner span.
    if begin > 0:
        space = text.find(" ", begin, start)
        begin = space + 1 if space >= 0 else begin
    end = max(stop, cut_before(text, end, slack=end - stop)) if end < len(text) else end
    return _trim(text, min(begin, start), end)


def _trim(text: str, start: int, stop: int) -> Span:
    """Without the space at both ends."""
    part = text[start:stop]
    left = len(part) - len(part.lstrip())
    return (start + left, max(start + left, start + len(part.rstrip())))
