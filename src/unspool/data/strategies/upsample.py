"""Long documents several times, or fewer of the short ones.

In: the lengths of one source's documents, an `UpsampleConfig`. Out: how often each is used, and an order of all uses.
A document of at least `above` tokens is used `times` times, the fraction by chance; any other is kept with
probability `keep`. Fu et al. keep a tenth of what is below 4K ({above: 4K, times: 1, keep: 0.1}); Untie the Knots is
compared with five copies of what is above 32K ({above: 32K, times: 5}).
Promise: a source keeps its share of tokens, because shares decide how much is drawn from it (order.py) and this only
what comes first. Copies of one document lie apart: by at least half the distance that even spacing would give, counted
in documents, up to the noise of a random order. Their neighbours differ from copy to copy.
Elsewhere: counting what was repeated and dropped (rows.py).
"""

import numpy as np

from unspool.data.packing.config import UpsampleConfig


def draw_uses(lens: np.ndarray, config: UpsampleConfig, rng: np.random.Generator) -> np.ndarray:
    """int64: how often each document is used; `lens` are of whole documents."""
    chance = rng.random(len(lens))
    often = int(config.times)
    return np.where(lens >= config.above, often + (chance < config.times - often), chance < config.keep).astype(
        np.int64
    )


def spread(uses: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """An order of all uses: indices into `uses`, each as often as it says, shuffled, copies far from each other.

    The j-th of u copies lies at (start + j + jitter) / u of the way round a circle, jitter below a half.
    """
    which = np.repeat(np.arange(len(uses)), uses)
    copy = np.arange(len(which)) - np.repeat(np.cumsum(uses) - uses, uses)
    start = rng.random(len(uses))[which]
    jitter = rng.random(len(which)) / 2
    return which[np.argsort((start + (copy + jitter) / uses[which]) % 1.0, kind="stable")]


def is_again(order: np.ndarray) -> np.ndarray:
    """Which entries of an order stood in it before."""
    again = np.ones(len(order), dtype=np.bool_)
    again[np.unique(order, return_index=True)[1]] = False
    return again
