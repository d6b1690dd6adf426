"""Fill a prompt up to its length, never beyond.

Context, question, prefix, chat template and answer tokens never exceed the length. The number of trials is bounded at
any length. If the task does not fit a length, a ConfigError is raised.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from unspool.core.errors import ConfigError
from unspool.data.tokenize.encoder import Encoder, build_encoder, choose_route
from unspool.evals.prompts import encode
from unspool.evals.suite import Ask, Question

# Each trial corrects the error of the previous one. Two are nearly always enough.
MAX_TRIALS = 12
# After this many trials without a change, the task has no more text.
MAX_IDLE = 3
# Neighboring budgets to try if whole pieces leave more than 1% unused.
MAX_NEIGHBORS = 10
_CACHED_PIECES = 1 << 18
BLOCK = 1000  # characters per tokenized block of a text that is cut in the middle


class Meter:
    """Counts tokens with the fastest encoder that agrees with the tokenizer."""

    def __init__(self, tokenizer: Any, sample: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._encoder: Encoder | None = None
        try:
            self._encoder = choose_route(build_encoder(tokenizer), [text for text in sample if text])
        except (ConfigError, AttributeError):
            # No EOS token, or a slow Python tokenizer.
            self._encoder = None
        self.piece = lru_cache(_CACHED_PIECES)(self.count)  # passages and other texts repeat
        # Tokens of an empty line between two texts.
        self.gap = max(1, self.count("one\n\none") - 2 * self.count("one"))

    def count(self, text: str) -> int:
        if self._encoder is None or self._encoder.route == "tokenizers":
            return len(encode(self._tokenizer, text))
        return len(self._encoder.encode_plain([text])[0])

    def whole(self, asked: Question) -> int:
        """Token count of a prompt: the maximum of encoding it as one text and with a separate context."""
        rest = asked.question + asked.prefix
        return max(self.count(asked.context + rest), self.count(asked.context) + self.count(rest))

    def clip(self, text: str, budget: int, *, keep: int = 0) -> str:
        """Cut a text to as many whole words as fit. Returns "" if only the first `keep` words fit."""
        words = text.split(" ")
        low, high = 0, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.count(" ".join(words[:middle])) <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        return " ".join(words[:low]) if low > keep else ""

    def take(self, pieces: Iterable[str], budget: int, *, between: int = 0, keep: int = 0) -> list[str]:
        """Take pieces up to the budget and cut the last one. Each join counts `between` tokens."""
        taken: list[str] = []
        for piece in pieces:
            size = self.piece(piece) + between
            if size > budget:
                return self._with_rest(taken, piece, budget - between, keep)
            taken.append(piece)
            budget -= size
        return taken

    def cut_middle(self, text: str, budget: int) -> str:
        """Return a text that fits about `budget` tokens, cut in the middle if it is longer.

        The text is not cut at spaces, because Chinese has none.
        """
        blocks = [text[at : at + BLOCK] for at in range(0, len(text), BLOCK)]
        sizes = [self.piece(block) for block in blocks]
        if sum(sizes) <= budget:
            return text
        head, tail = _take_chars(blocks, sizes, budget // 2), _take_chars(blocks[::-1], sizes[::-1], budget // 2)
        return text[:head] + text[len(text) - tail :]

    def _with_rest(self, taken: list[str], piece: str, budget: int, keep: int) -> list[str]:
        """Add the part of the next piece that fits. If not even its head fits, halve the last piece taken."""
        rest = self.clip(piece, budget, keep=keep)
        if rest:
            return [*taken, rest]
        if keep and taken and budget > 0:
            last = taken[-1]
            half = self.clip(last, self.piece(last) // 2, keep=keep)
            rest = self.clip(piece, budget + self.piece(last) - self.count(half), keep=keep) if half else ""
            return [*taken[:-1], half, rest] if rest else taken
        return taken


def _take_chars(blocks: list[str], sizes: list[int], budget: int) -> int:
    """Return how many characters of the first blocks fit. The last block counts in proportion to its tokens."""
    chars = 0
    for block, size in zip(blocks, sizes, strict=True):
        if size > budget:
            return chars + max(0, budget) * len(block) // size
        chars, budget = chars + len(block), budget - size
    return chars


class Remembered:
    """Iterable of texts that are generated once and remembered."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._rest = iter(texts)
        self._known: list[str] = []

    def __iter__(self) -> Iterator[str]:
        yield from self._known
        for text in self._rest:
            self._known.append(text)
            yield text


def room(ask: Ask, answer_tokens: int) -> int:
    """Tokens available for context, question and prefix."""
    return ask.length - ask.overhead - answer_tokens


def fill(build: Callable[[int], Question], meter: Meter, limit: int, *, what: str, length: int) -> Question:
    """Build the longest question whose prompt stays within `limit` tokens.

    `build` makes a question from a token budget. Its prompt may miss the budget slightly.
    """
    close = max(3, length // 300)
    best: tuple[int, Question] | None = None
    # Largest budget that fits and smallest that does not. A larger budget almost never gives a shorter prompt.
    budget, fits, exceeds = max(0, limit), -1, 2 * max(0, limit) + 2
    last, idle = -1, 0
    for _ in range(MAX_TRIALS):
        asked = build(budget)
        total = meter.whole(asked)
        if total <= limit and (best is None or total > best[0]):
            best = total, asked
        fits, exceeds = (budget, exceeds) if total <= limit else (fits, budget)
        idle = idle + 1 if total == last else 0
        # Stop if close enough, if no budget is between the two, or if the task has no more text.
        if 0 <= limit - total <= close or exceeds - fits <= 1 or (idle == MAX_IDLE and total <= limit):
            break
        budget, last = budget + limit - total, total
        if not fits < budget < exceeds:
            budget = (fits + exceeds) // 2
    # Whole pieces may leave tokens unused. A neighboring budget may use them.
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
            f"{what}: length {length} is too short: with this tokenizer, the shortest prompt needs "
            f"{meter.whole(build(0)) + length - limit} tokens, including its answer. Use a larger length."
        )
    return best[1]


def spread(index: int, start: float) -> float:
    """A depth in [0, 1]. Consecutive indices cover the range evenly (van der Corput sequence)."""
    place, step = 0.0, 0.5
    while index:
        index, bit = divmod(index, 2)
        place += bit * step
        step /= 2
    return (place + start) % 1.0
