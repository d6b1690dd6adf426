"""The rows that checks train on: random tokens, documents of very different lengths, masks that leave out much.

In: how many tokens, a seed. Out: `Step`s, each the rows of one optimizer step.
Promise: nothing but the arguments decides what is in them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from unspool.core.rng import rng_for
from unspool.data.packing.store import Row

# Which document of a packed row also has its gradient looked at alone: the third, which is neither first nor last.
WATCHED = 2
# Of the step that is split: as one micro-batch of eight, two of four, eight of one.
NUM_ROWS = 8


@dataclass(frozen=True)
class Step:
    """The rows of one optimizer step, all of one length."""

    name: str
    rows: tuple[Row, ...]

    @property
    def row_len(self) -> int:
        return len(self.rows[0].tokens)


def row_len(num_parameters: int, device: torch.device) -> int:
    """Tokens of a packed row: so many that all checks of one model take about a minute on a laptop's CPU."""
    if device.type == "cuda":
        # Small ones long enough for every kernel that attention chooses from; scores of the reference are held in full.
        return 12288 if num_parameters < 2 * 10**7 else 8192 if num_parameters < 10**9 else 1024
    return min(192, max(64, 10**10 // num_parameters // 32 * 32))


def build_steps(length: int, *, vocabulary: int, seed: int) -> dict[str, Step]:
    """`unequal` and `equal` documents in one row, and `several` rows."""
    quarter = length // 4
    # The third takes most of the row, so that on a GPU it is long enough for the kernel of long documents.
    first, third = length // 16, length * 13 // 16
    unequal = (first, 1, third, length - first - third - 1)
    made = [
        Step("unequal", (_row(unequal, vocabulary, seed, 0),)),
        Step("equal", (_row((quarter,) * 4, vocabulary, seed, 1),)),
        # Every second row asks for a tenth of its tokens, so that a mean of means is another number.
        Step(
            "several",
            tuple(
                _row(
                    (quarter // 2 + index % 4, quarter // 2 - index % 4),
                    vocabulary,
                    seed,
                    2 + index,
                    kept=0.1 + 0.9 * (index % 2),
                )
                for index in range(NUM_ROWS)
            ),
        ),
    ]
    return {step.name: step for step in made}


def build_row_sets(context: int, *, vocabulary: int, seed: int) -> dict[str, list[Row]]:
    """Two sets to be mixed, `long` rows of one context and `short` ones of half; few, so that all come again soon."""
    long, short = (context // 4 * 3, context // 4), (context // 2,)
    return {
        "long": [_row(long, vocabulary, seed, 100 + number, kept=0.7) for number in range(5)],
        "short": [_row(short, vocabulary, seed, 200 + number, kept=0.7) for number in range(3)],
    }


def only_document(row: Row, number: int) -> Row:
    """The same row, asking for one document's tokens only."""
    begin = int(row.doc_lens[:number].sum())
    mask = np.zeros(len(row.tokens), dtype=bool)
    # Its first token too: asked for by the token before it, if labels crossed documents.
    mask[begin : begin + int(row.doc_lens[number])] = True
    return replace(row, loss_mask=mask)


def with_tokens(row: Row, number: int, tokens: np.ndarray) -> Row:
    """The same row with another document in the place of one."""
    begin = int(row.doc_lens[:number].sum())
    changed = row.tokens.copy()
    changed[begin : begin + int(row.doc_lens[number])] = tokens
    return replace(row, tokens=changed)


def _row(doc_lens: Sequence[int], vocabulary: int, seed: int, number: int, *, kept: float = 1.0) -> Row:
    rng = rng_for(seed, "verify", number)
    length = sum(doc_lens)
    return Row(
        tokens=rng.integers(vocabulary, size=length).astype(np.uint32),
        doc_lens=np.array(doc_lens, dtype=np.int32),
        loss_mask=None if kept >= 1 else rng.random(length) < kept,
        source="random",
        attention="intra_document",
    )
