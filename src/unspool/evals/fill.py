"""Fill a prompt up to its length, and never beyond.

Context, question, prefix, overhead and room for the answer never exceed the length. The number of trials is bounded at
any length, and a length that cannot hold the task raises a ConfigError.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from unspool.core.errors import ConfigError
from unspool.data.tokenize.encoder import Encoder, build_encoder, choose_route
from unspool.evals.prompts import encode
from unspool.evals.suite import Ask, Question

# Each trial corrects the error of the one before; two are nearly always enough.
MAX_TRIALS = 12
# Trials without a change after which the task has no more text.
MAX_IDLE = 3
# Neighboring budgets that are tried when whole pieces leave more than 1% unused.
MAX_NEIGHBORS = 10
_CACHED_PIECES = 1 << 18


class Meter:
    """Counts the tokens of texts, by the fastest encoder that agrees with the tokenizer."""

    def __init__(self, tokenizer: Any, sample: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._encoder: Encoder | None = None
        try:
            self._encoder = choose_route(build_encoder(tokenizer), [text for text in sample if text])
        except (ConfigError, AttributeError):
            # No EOS token, or a tokenizer written in Python, which counts slowly.
            self._encoder = None
        self.piece = lru_cache(_CACHED_PIECES)(self.count)  # for texts that repeat, such as passages
        # Tokens of an empty line between two texts.
        self.gap = max(1, self.count("one\n\none") - 2 * self.count("one"))

    def count(self, text: str) -> int:
        if self._encoder is None or self._encoder.route == "tokenizers":
            return len(encode(self._tokenizer, text))
        return len(self._encoder.encode_plain([text])[0])

    def whole(self, asked: Question) -> int:
        """Count a prompt's tokens, encoded as one text or with the context apart, whichever is more."""
        rest = asked.question + asked.prefix
        return max(self.count(asked.context + rest), self.count(asked.context) + self.count(rest))

    def clip(self, text: str, budget: int, *, keep: int = 0) -> str:
        """Cut a text to as many whole words as the budget allows; nothing if only the first `keep` words are left."""
        words = text.split(" ")
        low, high = 0, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.count(" ".join(words[:middle])) <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        return " ".join(words[:low]) if low > keep else ""

    def take(self, pieces: Iterable[str], budget: int, *, between: int = 0, keep: int = 0) -> list[str]:
        """Take pieces up to the budget, the last one cut; `between` tokens are counted for each join."""
        taken: list[str] = []
        for piece in pieces:
            size = self.piece(piece) + between
            if size > budget:
                return self._with_rest(taken, piece, budget - between, keep)
            taken.append(piece)
            budget -= size
        return taken

    def _with_rest(self, taken: list[str], piece: str, budget: int, keep: int) -> list[str]:
        """Add what fits of the next piece; where that is less than its head, halve the last piece taken."""
        rest = self.clip(piece, budget, keep=keep)
        if rest:
            return [*taken, rest]
        if keep and taken and budget > 0:
            last = taken[-1]
            half = self.clip(last, self.piece(last) // 2, keep=keep)
            rest = self.clip(piece, budget + self.piece(last) - self.count(half), keep=keep) if half else ""
            return [*taken[:-1], half, rest] if rest else taken
        return taken


class Remembered:
    """Texts that are generated on first use and can be iterated again."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._rest = iter(texts)
        self._known: list[str] = []

    def __iter__(self) -> Iterator[str]:
        yield from self._known
        for text in self._rest:
            self._known.append(text)
            yield text


def room(ask: Ask, answer_tokens: int) -> int:
    """Tokens left for context, question and prefix."""
    return ask.length - ask.overhead - answer_tokens


def fill(build: Callable[[int], Question], meter: Meter, limit: int, *, what: str, length: int) -> Question:
    """Build the longest question whose prompt stays within `limit` tokens.

    `build` makes a question from a budget of tokens, which its prompt may miss by a little.
    """
    close = max(3, length // 300)
    best: tuple[int, Question] | None = None
    # The greatest budget known to fit and the least known not to; more budget hardly ever gives a shorter prompt.
    budget, fits, exceeds = max(0, limit), -1, 2 * max(0, limit) + 2
    last, idle = -1, 0
    for _ in range(MAX_TRIALS):
        asked = build(budget)
        total = meter.whole(asked)
        if total <= limit and (best is None or total > best[0]):
            best = total, asked
        fits, exceeds = (budget, exceeds) if total <= limit else (fits, budget)
        idle = idle + 1 if total == last else 0
        # Close enough, or no budget between the two, or the task has no more text.
        if 0 <= limit - total <= close or exceeds - fits <= 1 or (idle == MAX_IDLE and total <= limit):
            break
        budget, last = budget + limit - total, total
        if not fits < budget < exceeds:
            budget = (fits + exceeds) // 2
    # Whole pieces may leave tokens unused that a neighboring budget would use.
    if best is not None and last >= 0 and limit - best[0] > length // 100 and idle < MAX_IDLE:
        for budget in [near for step in range(1, MAX_NEIGHBORS) for near in (fits + step, fits - step)]:
            asked = build(budget)
            total = meter.whole(asked)
            if best[0] < total <= limit:
                best = total, asked
    if best is None:
        shortest = build(0)
        total = meter.whole(shortest)
        best = (total, shortest) if total <= limit else None
    if best is None:
        raise ConfigError(
            f"{what}: length {length} is too short: with this tokenizer the shortest such prompt needs "
            f"{meter.whole(build(0)) + length - limit} tokens, its answer included. Use a greater length."
        )
    return best[1]


def spread(index: int, start: float) -> float:
    """A depth from 0 to 1; consecutive indices cover the range evenly (van der Corput sequence)."""
    place, step = 0.0, 0.5
    while index:
        index, bit = divmod(index, 2)
        place += bit * step
        step /= 2
    return (place + start) % 1.0
