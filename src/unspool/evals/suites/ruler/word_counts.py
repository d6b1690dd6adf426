"""RULER's word counting: the most common words of a numbered list (cwe) and of a text of code words (fwe).

`fixed`: every question has its own word order, and the example shares no words with the list.
`reference` reproduces RULER's random draws. Lists are shuffled with a constant seed, so common words are at the same
positions in every sample of a size. Sizes change by ten words (cwe) or by 1/32 of the length (fwe).
"""

import string
from collections.abc import Sequence

import numpy as np

from unspool.evals.suite import Ask, Question
from unspool.evals.suites.ruler import fitting, published
from unspool.evals.suites.ruler.fitting import Builder, Draft, PromptText, TaskSpec, fill_prompt
from unspool.evals.suites.ruler.haystacks import Sources
from unspool.evals.suites.ruler.published import Draws, Run, Script
from unspool.evals.wording import PREFIX, TEMPLATE, Form, Text

CWE = TaskSpec(task="cwe", answer_tokens=120)
FWE = TaskSpec(task="fwe", answer_tokens=50)
FORMS: dict[str, Form] = {
    "cwe": {
        TEMPLATE: Text(
            own="Here is a numbered list of words, in which some stand more often than others. Remember those that "
            "stand there most often.\n{context}\nQuestion: Which 10 words stand most often in the list above?",
            needs=("context",),
        ),
        PREFIX: Text(own=" Answer: The 10 words that stand most often in the list are:"),
    },
    "fwe": {
        TEMPLATE: Text(
            own="The following text is written in code words. Count how often each of them occurs, and find the three "
            "that occur most often. {context}\nQuestion: Which three code words occur most often in the text above? "
            "Dots ('....') do not count. Give no explanation.",
            needs=("context",),
        ),
        PREFIX: Text(own=" Answer: In the text above, the three code words that occur most often are:"),
    },
}
NUM_COMMON = 10
_CWE_STEP = 10
# RULER estimates tokens per word from a list of this many words.
_CWE_TRIAL = 4096
_CODED_LEN = 6
# With fewer words, the third and fourth most frequent words would be equally frequent.
_FEWEST_CODED = 120
_NOISE_WORD = "..."
_FEWEST_VOCABULARY = 5  # dots, three answers and one more word
_TOKENS_PER_CODED_WORD = 50  # tokens of the length per word of the vocabulary
# zeta(2): the sum that normalizes Zipf's law with exponent 2.
_ZETA = np.pi**2 / 6


def build_cwe(sources: Sources, ask: Ask) -> Question:
    if ask.mode == "reference":
        return published.build(sources, ask, CWE, _cwe_reference)
    return fitting.build_fixed(sources, ask, CWE, _cwe_fixed, fewest=NUM_COMMON + 1, guess=ask.length // 20)


def repeats(length: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Return (words, repeats of common words, repeats of others) of the example, and the two repeats of the list."""
    return ((20, 3, 1), (6, 1)) if length < fitting.SHORT else ((40, 10, 3), (30, 3))


def _cwe_fixed(sources: Sources, ask: Ask) -> Builder:
    rng = CWE.rng(ask)
    (num_shown, *shown_repeats), (often, seldom) = repeats(ask.length)
    words_per_entry = _words_per_entry(sources, ask)
    # A number, a period and two hyphenated words have at least five tokens.
    most = len(sources.words) if words_per_entry == 1 else ask.length // (5 * seldom) + num_shown + NUM_COMMON
    pool = _draw_entries(sources.words, most, words_per_entry, rng)
    shown = pool[-num_shown:]
    seed = int(rng.integers(2**62))

    def build(size: int) -> Draft:
        order = np.random.Generator(np.random.PCG64(seed))
        example = _shuffle(shown, shown_repeats[0], shown_repeats[1], order)
        entries = _shuffle(pool[: min(size, most - num_shown)], often, seldom, order)
        return _cwe_draft(sources, example, shown, entries, pool[:NUM_COMMON])

    return build


def _words_per_entry(sources: Sources, ask: Ask) -> int:
    """Return 1 if the word list is enough for the length, else 2 (pairs of words)."""

    def needed() -> int:
        # Keep a reserve, because some questions draw shorter words.
        words = sources.words[: int(0.95 * len(sources.words))]
        return 1 if sources.count(_number(words * repeats(ask.length)[1][1])) > CWE.budget(ask).tokens else 2

    return sources.cached(("cwe joined", ask.length, ask.overhead), needed)


def _cwe_reference(sources: Sources, ask: Ask, draws: Draws) -> Script:
    (num_shown, *shown_repeats), (often, seldom) = repeats(ask.length)
    words = draws.shuffled(sources.listed_words)

    def listed(count: int, often: int, seldom: int) -> tuple[list[str], list[str]]:
        drawn = draws.random.sample(words if count <= len(words) else sources.more_words, count)
        return draws.shuffled(drawn[:NUM_COMMON] * often + drawn[NUM_COMMON:] * seldom), drawn[:NUM_COMMON]

    def generate(index: int, size: int) -> Draft:
        example, shown = listed(num_shown, shown_repeats[0], shown_repeats[1])
        return _cwe_draft(sources, example, shown, *listed(size, often, seldom))

    return Script(generate=generate, step=_CWE_STEP, trial=_CWE_TRIAL, most=lambda limit, unit: int(limit // unit) * 2)


def _cwe_draft(
    sources: Sources, example: Sequence[str], shown: Sequence[str], entries: Sequence[str], common: Sequence[str]
) -> Draft:
    first, prompt = (fill_prompt(sources.wording, "cwe", _number(words)) for words in (example, entries))
    worked = f"{first.text} {_number(shown[:NUM_COMMON])}\n"
    whole = PromptText(worked + prompt.context, prompt.question, prompt.prefix)
    return Draft(prompt=whole, references=tuple(common), meta={"example": worked})


def _number(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _shuffle(words: Sequence[str], often: int, seldom: int, rng: np.random.Generator) -> list[str]:
    entries = [*list(words[:NUM_COMMON]) * often, *list(words[NUM_COMMON:]) * seldom]
    return [entries[at] for at in rng.permutation(len(entries))]


def _draw_entries(words: Sequence[str], count: int, words_per_entry: int, rng: np.random.Generator) -> list[str]:
    """Draw distinct entries: single words, or two words joined by a hyphen."""
    drawn = rng.choice(len(words) ** words_per_entry, size=count, replace=False).tolist()
    if words_per_entry == 1:
        return [words[at] for at in drawn]
    return [f"{words[at // len(words)]}-{words[at % len(words)]}" for at in drawn]


def build_fwe(sources: Sources, ask: Ask) -> Question:
    if ask.mode == "reference":
        return _fwe_reference(sources, ask)
    return fitting.build_fixed(sources, ask, FWE, _fwe_fixed, fewest=_FEWEST_CODED, guess=ask.length // 2)


def _fwe_fixed(sources: Sources, ask: Ask) -> Builder:
    rng = FWE.rng(ask)
    vocabulary = _draw_vocabulary(FWE.budget(ask).tokens, rng)
    seed = int(rng.integers(2**62))

    def build(size: int) -> Draft:
        ranks = np.repeat(np.arange(len(vocabulary)), exact_counts(size, len(vocabulary)))
        shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(ranks).tolist()
        text = " ".join(vocabulary[rank] for rank in shuffled)
        return Draft(prompt=fill_prompt(sources.wording, "fwe", text), references=tuple(vocabulary[1:4]))

    return build


def _fwe_reference(sources: Sources, ask: Ask) -> Question:
    """RULER searches the size of `fwe` differently: one text grows step by step until it is too long."""
    budget = FWE.budget(ask)
    step, num_words = budget.tokens // 32, budget.tokens // _TOKENS_PER_CODED_WORD
    if num_words < _FEWEST_VOCABULARY:
        raise budget.too_short(_FEWEST_VOCABULARY * _TOKENS_PER_CODED_WORD)

    def draw_vocabulary(draws: Draws) -> list[str]:
        words: set[str] = set()
        while len(words) < num_words:
            words.add(draws.letters(string.ascii_lowercase, _CODED_LEN))
        return [_NOISE_WORD, *draws.shuffled(sorted(words))[1:]]

    def write(draws: Draws, words: list[str], size: int) -> tuple[Draft, int]:
        entries = np.repeat(np.array(words), zipf_counts(size, len(words))).tolist()
        prompt = fill_prompt(sources.wording, "fwe", " ".join(draws.shuffled(entries)))
        return Draft(prompt=prompt, references=tuple(words[1:4])), sources.count(prompt.text)

    def start() -> Run:
        draws = Draws(ask.seed)
        words, most = draw_vocabulary(draws), budget.tokens // _CODED_LEN
        while write(draws, words, most)[1] < budget.tokens:
            most += step

        def sample(index: int) -> tuple[Draft, int]:
            words, size = draw_vocabulary(draws), most - step
            draft, used = write(draws, words, size)
            while used > budget.tokens and size > step:
                size -= step
                draft, used = write(draws, words, size)
            if used > budget.tokens:
                raise budget.too_short(used)
            return draft, size

        return Run(draws, sample)

    return published.build_from_run(sources, ask, FWE, start)


def zipf_counts(size: int, num_words: int) -> np.ndarray:
    """Return how often each rank occurs in about `size` words, rounded down."""
    counts: np.ndarray = (size * (np.arange(1, num_words + 1) ** -2.0) / _ZETA).astype(np.int64)
    return counts


def exact_counts(total: int, num_words: int) -> np.ndarray:
    """Return such counts for exactly `total` words. On ties, frequent ranks gain a word first."""
    low, high = total, 4 * total  # rounding down loses words, so `size` is at least `total`
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if zipf_counts(middle, num_words).sum() >= total else (middle + 1, high)
    counts, before = zipf_counts(low, num_words), zipf_counts(low - 1, num_words)
    gained = np.flatnonzero(counts > before)
    counts[gained[len(gained) - int(counts.sum() - total) :]] -= 1
    return counts


def _draw_vocabulary(budget: int, rng: np.random.Generator) -> list[str]:
    """Draw distinct code words. The first is replaced by dots, which do not count."""
    count = max(_FEWEST_VOCABULARY, budget // _TOKENS_PER_CODED_WORD)
    words: dict[str, None] = {}
    while len(words) < count:
        letters = rng.integers(ord("a"), ord("z") + 1, size=(count - len(words)) * _CODED_LEN, dtype=np.uint8)
        text = letters.tobytes().decode("ascii")
        words.update(dict.fromkeys(text[at : at + _CODED_LEN] for at in range(0, len(text), _CODED_LEN)))
    return [_NOISE_WORD, *list(words)[1:]]
