"""Task `word_counts`: how often the most frequent words of a section occur in it.

A word is a run of letters; case does not matter. Words of fewer than four letters and common function words are never
asked for.
"""

import re
from collections import Counter

import numpy as np

WORD = re.compile(r"[^\W\d_]+")
SHORTEST_WORD = 4
MOST_FREQUENT = 10
FEWEST_OCCURRENCES = 3


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FUNCTION_WORDS = frozenset(
    _words(
        "about above across after again against almost along already also although always among another because been "
        "before being below between both cannot come could does doing done down during each either else enough even "
        "ever every from further give given have having hence here hers herself himself however indeed into itself "
        "just like many might more moreover most much must myself neither never next none nothing often once only "
        "onto other others ours over perhaps quite rather same shall should since some such than that their theirs "
        "them themselves then there therefore these they this those though through thus till together toward towards "
        "under until unto upon very well were what whatever when where whereas whether which while whom whose will "
        "with within without would your yours yourself"
    )
)

HEADINGS = (
    "Review of the part above",
    "Frequencies in the preceding part",
    "What recurs in this part",
    "Notes on recurring terms",
    "Quick review of this part",
)
QUESTIONS = (
    "In this part, how many mentions of “{word}” are there?",
    "“{word}” was written how often in this part?",
    "What is the number of mentions of “{word}” in this part?",
    "How frequently does this part mention “{word}”?",
    "Give the total of mentions of “{word}” for this part.",
    "For “{word}”, how many mentions did you find here?",
)
ANSWERS = ("{count}", "{count}.", "There are {count}.", "The total is {count}.", "{count} in all.")
LABELS = (("Question: ", "Answer: "), ("Q: ", "A: "), ("", ""), ("– ", "→ "))

_ONES = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = _words("zero ten twenty thirty forty fifty sixty seventy eighty ninety")


def frequent_words(section: str) -> list[tuple[str, int]]:
    """Return the most frequent words with their counts; equally frequent ones in order of their first occurrence."""
    counts = Counter(WORD.findall(section.lower()))
    asked = [(word, count) for word, count in counts.items() if _may_ask(word) and count >= FEWEST_OCCURRENCES]
    return sorted(asked, key=lambda found: -found[1])[:MOST_FREQUENT]


def _may_ask(word: str) -> bool:
    return len(word) >= SHORTEST_WORD and word not in FUNCTION_WORDS


def write_word_counts(section: str, questions: int, rng: np.random.Generator) -> str | None:
    """Return questions about a section with their answers; None if no word is frequent enough."""
    words = frequent_words(section)
    if not words:
        return None
    drawn = rng.permutation(len(words))[:questions].tolist()
    labels = LABELS[int(rng.integers(len(LABELS)))]
    lines = [HEADINGS[int(rng.integers(len(HEADINGS)))]]
    for at in drawn:
        word, count = words[at]
        number = spell(count) if rng.random() < 0.5 else str(count)
        answer = ANSWERS[int(rng.integers(len(ANSWERS)))].format(count=number)
        question = QUESTIONS[int(rng.integers(len(QUESTIONS)))].format(word=word)
        lines.append(f"{labels[0]}{question}\n{labels[1]}{answer[0].upper()}{answer[1:]}")
    return "\n\n".join(lines)


def spell(number: int) -> str:
    """Write a whole number below a million in English words."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    most, rest = divmod(number, size)
    return f"{spell(most)} {name}" + (f" {spell(rest)}" if rest else "")
