"""Cut a text into paragraphs, and group consecutive paragraphs into sections of random length."""

import itertools
import re
from collections.abc import Iterator

import numpy as np

# Each pattern ends a paragraph; the first that gives enough paragraphs is used.
_PARAGRAPH_ENDS = (re.compile(r"\n[^\S\n]*\n\s*"), re.compile(r"\n\s*"), re.compile(r"(?<=[.!?])\s+"))
FEWEST_PARAGRAPHS = 4
# A section has at least this share of its document, and at most half of it, as in Olmo 3.
LEAST_SHARE, MOST_SHARE = 0.25, 0.5
CHARS_PER_TOKEN = 4


def split_paragraphs(text: str) -> list[str]:
    """Cut a text where a paragraph ends, else where a line or a sentence ends; the parts together are the text."""
    for pattern in _PARAGRAPH_ENDS:
        ends = [found.end() for found in pattern.finditer(text)]
        borders = sorted({0, *ends, len(text)})
        if len(borders) > FEWEST_PARAGRAPHS:
            return [text[start:stop] for start, stop in itertools.pairwise(borders)]
    return [text] if text else []


def group_sections(paragraphs: list[str], tokens: tuple[int, int], rng: np.random.Generator) -> Iterator[list[str]]:
    """Yield the paragraphs of each section, all in order.

    A section's length is drawn from the powers of two between the shortest and the longest length in characters. It
    ends before the paragraph that would exceed it.
    """
    length = sum(map(len, paragraphs))
    shortest = min(CHARS_PER_TOKEN * tokens[0], int(LEAST_SHARE * length))
    longest = min(CHARS_PER_TOKEN * tokens[1], int(MOST_SHARE * length))
    powers = np.arange(int(np.log2(max(1, shortest))), int(np.log2(max(1, longest))) + 1)
    section: list[str] = []
    held, room = 0, 0
    for paragraph in paragraphs:
        if section and held + len(paragraph) > room:
            yield section
            section, held = [], 0
        if not section:
            room = 1 << int(rng.choice(powers))
        section.append(paragraph)
        held += len(paragraph)
    if section:
        yield section
