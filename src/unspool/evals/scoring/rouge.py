"""ROUGE-L F1, equal to the package rouge-score with its stemmer.

This is a reimplementation: rouge-score gets its stems from NLTK, which is large, and other Porter stemmers give
different stems. The longest common subsequence is bit-parallel: texts of thousands of words need milliseconds.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

Condition = Callable[[str], bool]

# Rules of the Porter stemmer with NLTK's default extensions.
_IRREGULAR = {
    **dict.fromkeys(("sky", "skies"), "sky"),
    "dying": "die",
    "lying": "lie",
    "tying": "tie",
    "news": "news",
    "howe": "howe",
    **{word: stem for stem in ("inning", "outing", "canning") for word in (stem, stem + "s")},
    **{word: word for word in ("proceed", "exceed", "succeed")},
}
_STEP2 = (
    "ational:ate tional:tion enci:ence anci:ance izer:ize bli:ble alli:al entli:ent eli:e ousli:ous ization:ize "
    "ation:ate ator:ate alism:al iveness:ive fulness:ful ousness:ous aliti:al iviti:ive biliti:ble fulli:ful"
)
_STEP3 = "icate:ic ative: alize:al iciti:ic ical:ic ful: ness:"
_STEP4 = "al ance ence er ic able ible ant ement ment ent ion ou ism ate iti ous ive ize"


def _pairs(rules: str) -> list[tuple[str, str]]:
    return [(suffix, new) for suffix, _, new in (rule.partition(":") for rule in rules.split())]


_RULES2, _RULES3, _RULES4 = _pairs(_STEP2), _pairs(_STEP3), _pairs(_STEP4)


def _shape(word: str) -> str:
    """Write c for consonants and v for vowels; y is a vowel after a consonant."""
    shape = ""
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and shape[-1:] == "c")
        shape += "v" if vowel else "c"
    return shape


def _measure(stem: str) -> int:
    return _shape(stem).count("vc")


def _ends_cvc(stem: str) -> bool:
    shape = _shape(stem)
    return (shape[-3:] == "cvc" and stem[-1] not in "wxy") or shape == "vc"


def _replace(word: str, rules: list[tuple[str, str]], allowed: Condition) -> str:
    """Apply the first rule whose suffix matches, if its condition holds."""
    for suffix, new in rules:
        if word.endswith(suffix):
            stem = word[: -len(suffix)]
            return stem + new if allowed(stem) else word
    return word


def _step1a(word: str) -> str:
    if word.endswith("ies"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("sses"):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _step1b(word: str) -> str:
    if word.endswith("ied"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) else word
    for suffix in ("ed", "ing"):
        stem = word.removesuffix(suffix)
        if stem != word and "v" in _shape(stem):
            return _repair(stem)
    return word


def _repair(stem: str) -> str:
    """Restore a final e or remove a doubled consonant after -ed and -ing."""
    if stem.endswith(("at", "bl", "iz")):
        return stem + "e"
    if stem[-2:-1] == stem[-1] and _shape(stem)[-1] == "c":
        return stem if stem[-1] in "lsz" else stem[:-1]
    return stem + "e" if _measure(stem) == 1 and _ends_cvc(stem) else stem


def _step1c(word: str) -> str:
    return word[:-1] + "i" if word.endswith("y") and len(word) > 2 and _shape(word)[-2] == "c" else word


def _step2(word: str) -> str:
    while word.endswith("alli") and _measure(word[:-4]):
        word = word[:-2]
    changed = _replace(word, _RULES2, lambda stem: _measure(stem) > 0)
    known = any(word.endswith(suffix) for suffix, _ in _RULES2)
    return word[:-1] if not known and word.endswith("logi") and _measure(word[:-3]) else changed


def _step4(word: str) -> str:
    def allowed(stem: str) -> bool:
        return _measure(stem) > 1 and (word != stem + "ion" or stem[-1] in "st")

    return _replace(word, _RULES4, allowed)


def _step5(word: str) -> str:
    if word.endswith("e"):
        stem = word[:-1]
        if _measure(stem) > 1 or (_measure(stem) == 1 and not _ends_cvc(stem)):
            word = stem
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word


@lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) <= 2:
        return word
    word = _step2(_step1c(_step1b(_step1a(word))))
    return _step5(_step4(_replace(word, _RULES3, lambda stem: _measure(stem) > 0)))


_NOT_WORD = re.compile(r"[^a-z0-9]+")


def rouge_words(text: str) -> list[str]:
    """Return runs of ASCII letters and digits, lowercased, and stemmed if longer than three characters."""
    return [stem(word) if len(word) > 3 else word for word in _NOT_WORD.sub(" ", text.lower()).split()]


def common_length(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """Return the length of the longest common subsequence (Hyyrö's bit-parallel algorithm)."""
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
