"""PoSE: jumps in the positions of short rows, so that they show the distances of long ones.

In: the lengths of what attends to itself (labels.attended_lens), a `PoseConfig`. Out: `positions` of one row.
Each length l is cut at random points into `chunks` stretches. The first begins at 0; each later one is moved on by a
skip that is uniform from the one before to target - l, as in the paper (u₀ = 0, uᵢ uniform in uᵢ₋₁ … L_t - L_c).
Promise: positions rise strictly and stay below `target`; over many rows every distance below it occurs.
Differs from the paper: the text goes on across a jump, where there the later chunk is taken from further on in the
document (they found little difference), and cuts are uniform, where their code cuts in the first half.
Price: four bytes per token on disk. It shows positions, not the use of distant text.
Elsewhere: using them (train/batch.py).
"""

import numpy as np

from unspool.data.packing.config import PoseConfig


def skip_positions(lens: np.ndarray, config: PoseConfig, rng: np.random.Generator) -> np.ndarray:
    """int32[lens.sum()]; the lengths of several rows in one call give what they give one by one.

    Two cuts may fall together, which makes one jump of two.
    """
    draws = rng.random((len(lens), 2, config.chunks - 1))
    lens = lens.astype(np.int64)
    cuts = np.sort(1 + (draws[:, 0] * (lens - 1)[:, None]).astype(np.int64), axis=1)
    room = config.target - lens + 1
    moved = np.zeros((len(lens), config.chunks), dtype=np.int64)
    for number in range(1, config.chunks):
        earlier = moved[:, number - 1]
        moved[:, number] = earlier + (draws[:, 1, number - 1] * (room - earlier)).astype(np.int64)
    # Between two of these beginnings all tokens are moved alike.
    starts = (np.cumsum(lens) - lens)[:, None]
    begins = np.concatenate([starts, starts + cuts], axis=1).ravel()
    sizes = np.diff(begins, append=lens.sum())
    places = np.repeat((moved - starts).astype(np.int32).ravel(), sizes)
    places += np.arange(len(places), dtype=np.int32)
    return places
