"""ROUGE-L: how much of two texts is the same words in the same order.

In: an output, a reference. Out: F1, as rouge-score computes it with its stemmer.
Price: the longest common subsequence takes one step of long-integer arithmetic per word, so that two texts of
thousands of words take milliseconds.
"""

import re
from collections.abc import Sequence

from unspool.eval.metrics.porter import stem

_NO_WORD = re.compile(r"[^a-z0-9]+")


def rouge_words(text: str) -> list[str]:
    """Runs of ASCII letters and digits, in lower case, stemmed if longer than three."""
    return [stem(word) if len(word) > 3 else word for word in _NO_WORD.sub(" ", text.lower()).split()]


def common_length(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """Length of the longest common subsequence (Hyyrö's bit-parallel form)."""
    places: dict[str, int] = {}
    for at, word in enumerate(ours):
        places[word] = places.get(word, 0) | 1 << at
    everything = (1 << len(ours)) - 1
    row = everything
    for word in theirs:
        hits = row & places.get(word, 0)
        row = ((row + hits) | (row - hits)) & everything
    return len(ours) - row.bit_count()


def words_rouge_l(output: Sequence[str], reference: Sequence[str]) -> float:
    shared = common_length(output, reference) if output and reference else 0
    if not shared:
        return 0.0
    precision, recall = shared / len(output), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def rouge_l(output: str, reference: str) -> float:
    return words_rouge_l(rouge_words(output), rouge_words(reference))
