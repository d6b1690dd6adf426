"""Task `passages`: all sentences of a section that contain a phrase, in order.

Olmo 3 gives such excerpts to a language model, which rewrites them in one of twelve forms. Without a model, the
sentences are quoted as they are, in one of our forms. A phrase is two or three words of one sentence with nothing but
spaces between them. Phrases are ranked by TF-IDF over the paragraphs of a section; one of the best is drawn.
"""

import math
import re
from collections import Counter

import numpy as np

from unspool.data.sources.aggregation.word_counts import FUNCTION_WORDS, SHORTEST_WORD

SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_RUN = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")  # words with one space between them
PHRASE_WORDS = (2, 3)
FEWEST_SENTENCES, MOST_SENTENCES = 2, 8
LONGEST_SENTENCE = 600  # characters
BEST_PHRASES = 10

# The heading with the phrase, and the mark before each sentence; {number} counts from 1.
FORMS = (
    ("Passages on “{phrase}”, in the order of the part above:", "{number}. "),
    ("Everything that this part says on “{phrase}”:", "- "),
    ("Index entry “{phrase}” ({count} passages):", "{number}) "),
    ("Q: Which sentences of this part mention “{phrase}”?\nA:", "> "),
    ("Excerpts for a reader interested in “{phrase}”:", "* "),
    ("“{phrase}” comes up {count} times in this part, namely:", "• "),
)


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a text, each with single spaces for all white space."""
    return SENTENCE_END.split(" ".join(text.split()))


def phrases_in(sentence: str) -> set[str]:
    """Return all phrases of a sentence, in lower case. Their first and last words are no function words."""
    found = set()
    for run in _RUN.findall(sentence.lower()):
        words = run.split(" ")
        for length in PHRASE_WORDS:
            for start in range(len(words) - length + 1):
                part = words[start : start + length]
                if _has_meaning(part[0]) and _has_meaning(part[-1]):
                    found.add(" ".join(part))
    return found


def _has_meaning(word: str) -> bool:
    return len(word) >= SHORTEST_WORD and word not in FUNCTION_WORDS


def best_phrases(section: str, paragraphs: list[str]) -> list[tuple[str, list[str]]]:
    """Return the phrases with the highest TF-IDF, best first, each with the sentences that contain it.

    Phrases in fewer than 2 or more than 8 sentences are left out, and those in a very long sentence.
    """
    in_sentences: dict[str, list[str]] = {}
    for sentence in sentences_of(section):
        for phrase in sorted(phrases_in(sentence)):
            in_sentences.setdefault(phrase, []).append(sentence)
    wanted = {
        phrase: found
        for phrase, found in in_sentences.items()
        if FEWEST_SENTENCES <= len(found) <= MOST_SENTENCES and max(map(len, found)) <= LONGEST_SENTENCE
    }
    if not wanted:
        return []
    in_paragraphs: Counter[str] = Counter()
    for paragraph in paragraphs:
        held = {phrase for sentence in sentences_of(paragraph) for phrase in phrases_in(sentence)}
        in_paragraphs.update(held & wanted.keys())

    def tf_idf(phrase: str) -> float:
        return len(wanted[phrase]) * math.log((1 + len(paragraphs)) / max(1, in_paragraphs[phrase]))

    best = sorted(wanted, key=lambda phrase: (-tf_idf(phrase), phrase))[:BEST_PHRASES]
    return [(phrase, wanted[phrase]) for phrase in best]


def write_passages(section: str, paragraphs: list[str], rng: np.random.Generator) -> str | None:
    """Return a request for the sentences with a phrase, and these sentences; None if no phrase occurs often enough."""
    phrases = best_phrases(section, paragraphs)
    if not phrases:
        return None
    phrase, found = phrases[int(rng.integers(len(phrases)))]
    heading, mark = FORMS[int(rng.integers(len(FORMS)))]
    lines = [heading.format(phrase=phrase, count=len(found))]
    lines += [mark.format(number=number) + sentence for number, sentence in enumerate(found, 1)]
    return "\n".join(lines)
