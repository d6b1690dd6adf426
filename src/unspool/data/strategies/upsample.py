"""Length upsampling: use long documents several times, or fewer of the short ones.

A document of at least `above` tokens is used `times` times, the fraction by chance; any other is kept with probability
`keep`. Fu et al. keep a tenth of what is below 4K ({above: 4K, times: 1, keep: 0.1}); Untie the Knots is compared with
five copies of what is above 32K ({above: 32K, times: 5}). A source keeps its share of tokens, and copies of a document
lie at least half as far apart as even spacing would put them.
"""

from typing import ClassVar

import numpy as np
from pydantic import Field

from unspool.core.sizes import Size, format_size
from unspool.data.strategies.base import StrategyConfig


class Upsample(StrategyConfig):
    """Long documents several times, or fewer of the short ones; each source keeps its share.

    Example:
        >>> import unspool
        >>> unspool.Upsample(above="4K", times=5).above
        4096
    """

    name: ClassVar[str] = "upsample"
    title: ClassVar[str] = "long documents upsampled"

    above: Size = Field(description="Length in tokens from which a document counts as long.")
    times: float = Field(
        default=5.0,
        ge=1,
        description="How often each long document is used. The fraction is the chance of one more use.",
    )
    keep: float = Field(default=1.0, ge=0, le=1, description="Share of the shorter documents that is used.")

    def summary(self) -> str:
        return f"documents from {format_size(self.above)} upsampled"


def draw_uses(lens: np.ndarray, config: Upsample, rng: np.random.Generator) -> np.ndarray:
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
