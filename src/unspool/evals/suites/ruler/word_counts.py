"""Word counting: the most common words of a numbered list (cwe), of a coded text (fwe).

In: sources, `Ask`. Out: `Question`; the references are the words that occur most often.
Promise (`fixed`): order is drawn for every question; the example shares no word with the list; length is met closely.
`reference` follows RULER: lists are shuffled by a seed that never changes, so that common words stand at the same
places in every sample of a size; sizes change by ten words (cwe) or by 1/32 of the length (fwe).
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unspool.evals.suite import Ask, Question
from unspool.evals.suites.ruler.haystacks import Sources
from unspool.evals.suites.ruler.needles import SHORT
from unspool.evals.suites.ruler.question import NO_INDEX, Builder, Draft, Place, RandomBuilder, asked, fixed, reference
from unspool.evals.suites.ruler.task_texts import Parts, numbered, parts

CWE = Place(task="cwe", answer_tokens=120)
FWE = Place(task="fwe", answer_tokens=50)
NUM_COMMON = 10
_CWE_STEP = 10
# RULER guesses the tokens per word from a list of this many.
_CWE_TRIAL = 4096
_CODED_LEN = 6
# With fewer words than this the third and fourth most frequent would occur equally often.
_FEWEST_CODED = 120
_NOISE_WORD = "..."
_TOKENS_PER_CODED_WORD = 50  # of the length, for every word of the vocabulary
# zeta(2), to which the counts of Zipf's law with exponent 2 add up.
_ZETA = np.pi**2 / 6


def build_cwe(sources: Sources, ask: Ask) -> Question:
    if ask.mode == "reference":
        trial = min(_CWE_TRIAL, len(sources.words))
        return reference(
            sources, ask, CWE, lambda ask: _cwe_reference(sources, ask), step=_CWE_STEP, trial=trial, most_factor=2
        )
    fewest = NUM_COMMON + 1
    return fixed(sources, ask, CWE, lambda ask: _cwe_fixed(sources, ask), fewest=fewest, guess=ask.length // 20)


def repeats(length: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """The example's words, how often its common and other words stand there; the same of the list itself."""
    return ((20, 3, 1), (6, 1)) if length < SHORT else ((40, 10, 3), (30, 3))


def _cwe_fixed(sources: Sources, ask: Ask) -> Builder:
    rng = CWE.rng(ask)
    (num_shown, *shown_repeats), (often, seldom) = repeats(ask.length)
    joined = _joined(sources, ask)
    # A number, a full stop and two words with their hyphen are five tokens or more.
    most = len(sources.words) if joined == 1 else ask.length // (5 * seldom) + num_shown + NUM_COMMON
    pool = _words(sources.words, most, joined, rng)
    shown = pool[-num_shown:]
    seed = int(rng.integers(2**62))

    def build(size: int) -> Draft:
        order = np.random.Generator(np.random.PCG64(seed))
        example = _shuffled(shown, shown_repeats[0], shown_repeats[1], order)
        entries = _shuffled(pool[: min(size, most - num_shown)], often, seldom, order)
        return _cwe_draft(sources, example, shown, entries, pool[:NUM_COMMON])

    return build


def _joined(sources: Sources, ask: Ask) -> int:
    """1 where plain words are enough for the length, else 2: pairs of words. By length alone."""

    def needed() -> int:
        # A few words are kept aside, since some questions draw shorter ones.
        words = sources.words[: int(0.95 * len(sources.words))]
        return 1 if sources.count(numbered(words * repeats(ask.length)[1][1])) > CWE.room(ask).budget else 2

    return sources.remembered(("cwe joined", ask.length, ask.overhead), needed)


def _cwe_reference(sources: Sources, ask: Ask) -> RandomBuilder:
    (num_shown, *shown_repeats), (often, seldom) = repeats(ask.length)

    def listed(count: int, often: int, seldom: int, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        joined = 1 if count <= len(sources.words) else 2
        words = _words(sources.words, count, joined, rng)
        entries = words[:NUM_COMMON] * often + words[NUM_COMMON:] * seldom
        # The same permutation for every list of a length, as in RULER.
        random.Random(ask.seed).shuffle(entries)
        return entries, words[:NUM_COMMON]

    def build(size: int, rng: np.random.Generator) -> Draft:
        example, shown = listed(num_shown, shown_repeats[0], shown_repeats[1], rng)
        return _cwe_draft(sources, example, shown, *listed(size, often, seldom, rng))

    return build


def _cwe_draft(
    sources: Sources, example: Sequence[str], shown: Sequence[str], entries: Sequence[str], common: Sequence[str]
) -> Draft:
    first, asked = (parts(sources.wording, "cwe", numbered(words)) for words in (example, entries))
    worked = f"{first.text} {numbered(shown[:NUM_COMMON])}\n"
    whole = Parts(worked + asked.context, asked.question, asked.prefix)
    return Draft(parts=whole, references=tuple(common), meta={"example": worked})


def _shuffled(words: Sequence[str], often: int, seldom: int, rng: np.random.Generator) -> list[str]:
    entries = [*list(words[:NUM_COMMON]) * often, *list(words[NUM_COMMON:]) * seldom]
    return [entries[at] for at in rng.permutation(len(entries))]


def _words(words: Sequence[str], count: int, joined: int, rng: np.random.Generator) -> list[str]:
    """Different ones: plain, or when a list needs more than there are, two joined by a hyphen."""
    drawn = rng.choice(len(words) ** joined, size=count, replace=False).tolist()
    if joined == 1:
        return [words[at] for at in drawn]
    return [f"{words[at // len(words)]}-{words[at % len(words)]}" for at in drawn]


def build_fwe(sources: Sources, ask: Ask) -> Question:
    if ask.mode == "reference":
        return _fwe_reference(sources, ask)
    return fixed(sources, ask, FWE, lambda ask: _fwe_fixed(sources, ask), fewest=_FEWEST_CODED, guess=ask.length // 2)


def _fwe_fixed(sources: Sources, ask: Ask) -> Builder:
    rng = FWE.rng(ask)
    vocabulary = _vocabulary(FWE.room(ask).budget, rng)
    seed = int(rng.integers(2**62))

    def build(size: int) -> Draft:
        ranks = np.repeat(np.arange(len(vocabulary)), exact_counts(size, len(vocabulary)))
        shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(ranks).tolist()
        text = " ".join(vocabulary[rank] for rank in shuffled)
        return Draft(parts=parts(sources.wording, "fwe", text), references=tuple(vocabulary[1:4]))

    return build


def _fwe_reference(sources: Sources, ask: Ask) -> Question:
    room = FWE.room(ask)
    step = room.budget // 32

    def draft(size: int, rng: np.random.Generator) -> Draft:
        vocabulary = _vocabulary(room.budget, rng)
        entries = np.repeat(np.array(vocabulary), zipf_counts(size, len(vocabulary))).tolist()
        # The same permutation for every text of a length, as in RULER.
        random.Random(ask.seed).shuffle(entries)
        asked = parts(sources.wording, "fwe", " ".join(entries))
        return Draft(parts=asked, references=tuple(vocabulary[1:4]))

    least = sources.count(draft(_FEWEST_CODED, FWE.rng(ask, "least")).parts.text)
    if least > room.budget:
        raise room.too_short(least)

    def first_size() -> int:
        """RULER adds steps to one random text until it is too long, and takes the last step back."""
        size, trial = room.budget // _CODED_LEN, FWE.rng(replace(ask, index=NO_INDEX))
        while sources.count(draft(size, trial).parts.text) < room.budget:
            size += step
        return size - step

    size = sources.remembered(("fwe reference", ask.length, ask.seed, ask.overhead), first_size)
    while size >= _FEWEST_CODED:
        made = draft(size, FWE.rng(ask))  # the same words, fewer of them
        if sources.count(made.parts.text) <= room.budget:
            return asked(made, ask, size)
        size -= step
    raise room.too_short(least)


def zipf_counts(size: int, num_words: int) -> np.ndarray:
    """How often each rank occurs in about `size` words, rounded down."""
    counts: np.ndarray = (size * np.arange(1, num_words + 1) ** -2.0 / _ZETA).astype(np.int64)
    return counts


def exact_counts(total: int, num_words: int) -> np.ndarray:
    """The same counts for exactly `total` words: where several ranks gain a word at once, frequent ones gain first."""
    low, high = total, 4 * total  # rounding down loses words, so `size` is no less than their number
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if zipf_counts(middle, num_words).sum() >= total else (middle + 1, high)
    counts, before = zipf_counts(low, num_words), zipf_counts(low - 1, num_words)
    gained = np.flatnonzero(counts > before)
    counts[gained[len(gained) - int(counts.sum() - total) :]] -= 1
    return counts


def _vocabulary(budget: int, rng: np.random.Generator) -> list[str]:
    """Different coded words; the first is noise."""
    count = max(5, budget // _TOKENS_PER_CODED_WORD)
    words: dict[str, None] = {}
    while len(words) < count:
        letters = rng.integers(ord("a"), ord("z") + 1, size=(count - len(words)) * _CODED_LEN, dtype=np.uint8)
        text = letters.tobytes().decode("ascii")
        words.update(dict.fromkeys(text[at : at + _CODED_LEN] for at in range(0, len(text), _CODED_LEN)))
    return [_NOISE_WORD, *list(words)[1:]]
