"""LV-Eval's scores: words are compared only if the answer's keywords are there.

In: an output, the answer, keywords, a `Words` (how to split, which words do not count). Out: 0 to 1.
Stage 1: keywords found, as a multiset and without blacklisted ones, divided by all keywords; below the threshold the
score is 0. Stage 2: F1 over words. `reference` follows LV-Eval's code: blacklisted words count in stage 2, and
its ROUGE-L counts each different word once. `fixed` does what its description says: blacklisted words count in neither
stage, and ROUGE-L counts every word. Where nothing but blacklisted words would be left, all are kept.
Elsewhere: default blacklists and how to give LV-Eval's own (lveval/words.py), splitting Chinese (same).
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from unspool.evals.scoring.answers import normalize, normalize_zh, shared_f1
from unspool.evals.scoring.rouge import words_rouge_l
from unspool.evals.suite import Mode

Language = Literal["en", "zh"]
THRESHOLD: dict[Language, float] = {"en": 0.2, "zh": 0.4}


@dataclass(frozen=True, kw_only=True)
class Words:
    language: Language
    blacklist: Collection[str] = ()
    cut: Callable[[str], Sequence[str]] = list  # of Chinese; English splits at spaces

    def of(self, text: str) -> list[str]:
        if self.language == "en":
            return normalize(text).split()
        return [word for word in map(normalize_zh, self.cut(text)) if word]

    def without_blacklisted(self, words: Sequence[str]) -> list[str]:
        return [word for word in words if word not in self.blacklist]


def keyword_recall(output: Sequence[str], keywords: Sequence[str], words: Words) -> float:
    found = words.without_blacklisted(list((Counter(output) & Counter(keywords)).elements()))
    return len(found) / len(keywords)


def gated_f1(output: str, answer: str, keywords: str | None, words: Words, mode: Mode = "fixed") -> float:
    """Without keywords Chinese takes the answer for them, and English has no gate."""
    given, wanted = words.of(output), words.of(answer)
    asked = keywords or (answer if words.language == "zh" else "")
    required = words.of(asked)
    # Keywords that are all blacklisted could not be met by any answer.
    gated = bool(required) and (mode == "reference" or bool(words.without_blacklisted(required)))
    if gated and keyword_recall(given, required, words) < THRESHOLD[words.language]:
        return 0.0
    if mode == "reference":
        return shared_f1(given, wanted)
    return shared_f1(*_filtered(given, wanted, words))


def plain_f1(output: str, answer: str, words: Words) -> float:
    """For factrecall."""
    return shared_f1(words.of(output), words.of(answer))


def filtered_rouge_l(output: str, answer: str, words: Words, mode: Mode = "fixed") -> float:
    """For DuReader: ROUGE-L without blacklisted words."""
    if mode == "reference":
        # LV-Eval splits what it has split before, which now and then splits a word again.
        given, wanted = (words.of(" ".join(words.cut(text))) for text in (output, answer))
        return _set_rouge_l(words.without_blacklisted(given), words.without_blacklisted(wanted))
    given, wanted = words.of(output), words.of(answer)
    return words_rouge_l(*_filtered(given, wanted, words))


def _filtered(given: Sequence[str], wanted: Sequence[str], words: Words) -> tuple[Sequence[str], Sequence[str]]:
    left = words.without_blacklisted(wanted)
    return (words.without_blacklisted(given), left) if left else (given, wanted)


def _set_rouge_l(given: Sequence[str], wanted: Sequence[str]) -> float:
    """The package `rouge` counts the different words of the subsequence and of both texts, not all of them."""
    if not given or not wanted:
        return 0.0
    shared = len(set(_common_subsequence(wanted, given)))
    precision, recall = shared / len(set(given)), shared / len(set(wanted))
    # Its guard against dividing by zero, which moves the result by a hundred-millionth.
    return 2 * precision * recall / (precision + recall + 1e-8)


def _common_subsequence(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """A longest one; of several the one `rouge` finds: it goes back along `theirs` where both ways are equal."""
    lengths = [[0] * (len(theirs) + 1)]
    for mine in ours:
        above, row = lengths[-1], [0]
        for at, yours in enumerate(theirs):
            row.append(above[at] + 1 if mine == yours else max(above[at + 1], row[at]))
        lengths.append(row)
    found: list[str] = []
    i, j = len(ours), len(theirs)
    while i and j:
        if ours[i - 1] == theirs[j - 1]:
            found.append(ours[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found
