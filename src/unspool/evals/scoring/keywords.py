"""LV-Eval's scores: words are compared only if the output contains the answer's keywords.

Stage 1 is the share of keywords in the output, as a multiset without blacklisted words. Below a threshold, the score is
0. Stage 2 is the F1 of words. `reference` follows LV-Eval's code: blacklisted words count in stage 2, and its ROUGE-L
counts each distinct word once. `fixed` follows LV-Eval's description: blacklisted words count in neither stage (unless
all words are blacklisted), and ROUGE-L counts every word.
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
    """How to split a language into words, and which words do not count."""

    language: Language
    blacklist: Collection[str] = ()
    cut: Callable[[str], Sequence[str]] = list  # splits Chinese; English is split at spaces

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
    """Score with the keyword gate. Without keywords, Chinese uses the answer, and English has no gate."""
    given, wanted = words.of(output), words.of(answer)
    required = words.of(keywords or (answer if words.language == "zh" else ""))
    # No answer could pass a gate that has only blacklisted keywords.
    gated = bool(required) and (mode == "reference" or bool(words.without_blacklisted(required)))
    if gated and keyword_recall(given, required, words) < THRESHOLD[words.language]:
        return 0.0
    if mode == "reference":
        return shared_f1(given, wanted)
    return shared_f1(*_filtered(given, wanted, words))


def plain_f1(output: str, answer: str, words: Words) -> float:
    """Score factrecall: F1 without the gate."""
    return shared_f1(words.of(output), words.of(answer))


def filtered_rouge_l(output: str, answer: str, words: Words, mode: Mode = "fixed") -> float:
    """Score DuReader: ROUGE-L without blacklisted words."""
    if mode == "reference":
        return _set_rouge_l(_spelled(output, words), _spelled(answer, words))
    given, wanted = words.of(output), words.of(answer)
    return words_rouge_l(*_filtered(given, wanted, words))


def _spelled(text: str, words: Words) -> list[str]:
    """Segment already segmented text again, like LV-Eval, which sometimes splits a word again.

    The package `rouge` counts spaces as one empty word, so two empty texts may be equal.
    """
    found = [normalize_zh(word) for word in words.cut(" ".join(words.cut(text)))]
    left = " ".join(words.without_blacklisted(found))
    return left.split() or [""] * bool(left)


def _filtered(given: Sequence[str], wanted: Sequence[str], words: Words) -> tuple[Sequence[str], Sequence[str]]:
    left = words.without_blacklisted(wanted)
    return (words.without_blacklisted(given), left) if left else (given, wanted)


def _set_rouge_l(given: Sequence[str], wanted: Sequence[str]) -> float:
    """ROUGE-L of the package `rouge`: over distinct words of the subsequence and of both texts."""
    if not given or not wanted:
        return 0.0
    shared = len(set(_common_subsequence(wanted, given)))
    precision, recall = shared / len(set(given)), shared / len(set(wanted))
    # The package adds 1e-8 to avoid division by zero.
    return 2 * precision * recall / (precision + recall + 1e-8)


def _common_subsequence(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """Return the longest common subsequence that `rouge` finds (ties step back in `theirs`)."""
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
