"""Whether a generated pair or summary may be trained on; a reason for every one that may not.

Promise: pure functions of texts. `None` is yes; a reason is one of `REASONS`.
Price: support is measured by words, so an answer in quite other words than its text is refused, and a false statement
in the text's own words passes; the optional judge is for those.
Elsewhere: near-copies (near.py), evaluations (clean.py).
"""

import re
from functools import lru_cache

from unspool.evals.scoring.rouge import stem
from unspool.synthesis.config import ChecksConfig
from unspool.synthesis.generator_prompts import Pair

# Every reason for which something that was asked for is not kept, in words for people.
REASONS = {
    "cut_short": "the reply reached its longest length before its end",
    "unparsable": "the reply did not have the form asked for",
    "too_long": "the answer is longer than allowed",
    "repeats": "it says the same words over and over",
    "echoes": "the answer only says the question again",
    "refers": "it speaks of a snippet or passage that its reader does not see as such",
    "unsupported": "too few of its words, or a number of it not at all, stand in the text",
    "judged_unsupported": "the judge says that the text does not support it",
    "judge_unparsable": "the judge's reply did not have the form asked for",
    "near_copy": "almost the same as one kept before",
    "contaminated": "it shares a run of words with an evaluation",
    "contaminated_document": "its document shares a run of words with an evaluation",
    "does_not_fit": "its parts exceed the length",
    "unreadable": "the chat template cannot write it out",
    "surplus": "its kind has its tokens already",
}
# Greedy and weak models run in circles. Of runs of RUN words, at most this share may have stood before in an answer:
# names and set phrases come back, sentences do not.
RUN, MOST_REPEATED = 5, 0.2
# So few content words may all be the question's: "Red." answers "Was it red or blue?".
FEW_WORDS = 2
SUMMARY_FACTOR = 3  # as many more words a summary may have than an answer
_SEEN = r"snippet|passage|excerpt|extract|paragraph|section|fragment|chunk|segment"
_POINTING = r"above|below|given|provided|following|here|shown|quoted|preceding|presented|supplied"
_REFERS = re.compile(
    rf"\b(?:the|this|that|given|provided|following|above|our|your)\s+(?:\w+\s+)?(?:{_SEEN})s?\b"
    rf"|\b(?:{_SEEN}|text|part|document|story)s?\s+(?:{_POINTING})\b"
    rf"|\b(?:{_POINTING})\s+(?:text|part|document|story)\b"
    r"|\b(?:in|from|of)\s+(?:this|the)\s+part\s+of\s+the\s+(?:text|document|book|story)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_FUNCTION_WORDS = """
a about above after again against all also am an and any are as at be because been before being below between
both but by can could did do does doing done down during each either else ever every few for from further had
has have having he her here hers herself him himself his how however i if in into is it its itself just may me
might more most much must my myself neither no nor not now of off on once one only or other others our ours out
over own per said same say says she should since so some such than that the their theirs them themselves then
there these they this those though through thus to too under until up upon us very was we were what when where
whether which while who whom whose why will with within without would yet you your yours yourself
"""


def pair_reason(pair: Pair, part: str, checks: ChecksConfig) -> str | None:
    if len(words(pair.answer)) > checks.answer_words:
        return "too_long"
    if repeats(pair.question) or repeats(pair.answer):
        return "repeats"
    if echoes(pair):
        return "echoes"
    if refers(pair.question) or refers(pair.answer):
        return "refers"
    return None if supports(part, pair.answer, checks.support) else "unsupported"


def summary_reason(summary: str, document: str, checks: ChecksConfig) -> str | None:
    if len(words(summary)) > SUMMARY_FACTOR * checks.answer_words:
        return "too_long"
    if repeats(summary):
        return "repeats"
    if refers(summary):
        return "refers"
    return None if supports(document, summary, checks.support) else "unsupported"


def repeats(text: str) -> bool:
    """Whether a text runs in circles."""
    said = words(text)
    runs = [tuple(said[at : at + RUN]) for at in range(len(said) - RUN + 1)]
    return bool(runs) and 1 - len(set(runs)) / len(runs) > MOST_REPEATED


def echoes(pair: Pair) -> bool:
    """Whether an answer has no word of its own."""
    answered = content_stems(pair.answer)
    return len(answered) > FEW_WORDS and answered <= content_stems(pair.question)


def refers(text: str) -> bool:
    """Whether a text speaks of the part that its writer was shown."""
    return _REFERS.search(text) is not None


def supports(text: str, answer: str, least: float) -> bool:
    """Whether enough content words of an answer, and all of its numbers, stand in a text."""
    known_numbers = set(_NUMBER.findall(text))
    if any(number not in known_numbers for number in _NUMBER.findall(answer)):
        return False
    return support(text, answer) >= least


def support(text: str, answer: str) -> float:
    """The share of an answer's content words that a text holds, by their stems; 1 where it has none."""
    wanted = content_stems(answer)
    return len(wanted & content_stems(text)) / len(wanted) if wanted else 1.0


def content_stems(text: str) -> set[str]:
    return {_stem(word) for word in {*words(text)} - _function_words()}


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


@lru_cache(maxsize=1)
def _function_words() -> frozenset[str]:
    return frozenset(_FUNCTION_WORDS.split())


@lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    return stem(word)
