"""The labels of tangled pieces: six random letters and digits, tokenised.

In: a way to draw fresh labels, how many differ, a generator. Out: numbers of labels, whose tokens `LabelPool` keeps.
Promise: of any `half` labels taken in a row no two are the same one; how many are taken at a time changes nothing.
Price: tokenising a label takes longer than writing the piece it names, so a pool is tokenised as it is needed, and
from then on its labels come again, each time in another order.
"""

from collections.abc import Callable, Sequence

import numpy as np

from unspool.data.tokens import Encoder

LABEL_CHARS = 6
_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789", dtype=np.uint8)
_AT_ONCE = 1024

DrawLabels = Callable[[int, np.random.Generator], Sequence[np.ndarray]]


def label_drawer(encoder: Encoder) -> DrawLabels:
    """What draws the asked number of labels, tokenised."""

    def draw(count: int, rng: np.random.Generator) -> list[np.ndarray]:
        drawn = _ALPHABET[rng.integers(len(_ALPHABET), size=(count, LABEL_CHARS))]
        return encoder.encode_plain([label.tobytes().decode() for label in drawn])

    return draw


class LabelPool:
    """An endless stream of labels, given by their numbers; `tokens` and `starts` hold what the numbers mean."""

    def __init__(self, draw: DrawLabels, half: int, rng: np.random.Generator) -> None:
        self._draw, self._rng = draw, rng
        self._half = -(-half // _AT_ONCE) * _AT_ONCE
        self._next = np.zeros(0, dtype=np.int64)
        self._passes = 0  # over half of the pool
        self.tokens = np.zeros(0, dtype=np.uint32)
        self.starts = np.zeros(1, dtype=np.int64)  # label i is tokens[starts[i] : starts[i + 1]]

    def take(self, count: int) -> np.ndarray:
        """The next labels."""
        while len(self._next) < count:
            self._next = np.concatenate([self._next, self._more()])
        taken, self._next = np.split(self._next, [count])
        return taken

    def __len__(self) -> int:
        """How many labels are known so far."""
        return len(self.starts) - 1

    def lens(self, labels: np.ndarray) -> np.ndarray:
        lens: np.ndarray = self.starts[labels + 1] - self.starts[labels]
        return lens

    def _more(self) -> np.ndarray:
        known = len(self)
        if known < 2 * self._half:
            fresh = self._draw(_AT_ONCE, self._rng)
            self.tokens = np.concatenate([self.tokens, *fresh])
            ends = self.starts[-1] + np.cumsum([len(label) for label in fresh])
            self.starts = np.concatenate([self.starts, ends])
            return np.arange(known, known + _AT_ONCE)
        # The two halves take turns, so that a label is not seen again before as many others.
        begin = self._half * (self._passes % 2)
        self._passes += 1
        return begin + self._rng.permutation(self._half)
