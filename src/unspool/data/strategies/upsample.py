"""Length upsampling: repeat long documents, or drop some short ones.

A document of at least `above` tokens is used `times` times (a fraction is a probability); any other is kept with
probability `keep`. Fu et al. keep a tenth of documents below 4K ({above: 4K, times: 1, keep: 0.1}); Untie the Knots
compares with five copies of documents above 32K ({above: 32K, times: 5}). A source keeps its share of tokens, and the
distance between copies of a document is at least half of even spacing.
"""

from typing import ClassVar

import numpy as np
from pydantic import Field

from unspool.core.sizes import Size, format_size
from unspool.data.strategies.base import StrategyConfig


class Upsample(StrategyConfig):
    """Length upsampling: repeat long documents, or drop some short ones; each source keeps its share.

    Example:
        >>> import unspool
        >>> unspool.Upsample(above="4K", times=5).above
        4096
    """

    name: ClassVar[str] = "upsample"
    title: ClassVar[str] = "long documents upsampled"

    above: Size = Field(description="Minimum length of a long document, in tokens.")
    times: float = Field(
        default=5.0,
        ge=1,
        description="How often each long document is used. The fraction is the chance of one more use.",
    )
    keep: float = Field(default=1.0, ge=0, le=1, description="Share of the shorter documents that is used.")

    def summary(self) -> str:
        return f"documents from {format_size(self.above)} upsampled"


def draw_uses(lens: np.ndarray, config: Upsample, rng: np.random.Generator) -> np.ndarray:
    """Draw how often each document is used: int64; `lens` are of whole documents."""
    chance = rng.random(len(lens))
    often = int(config.times)
    return np.where(lens >= config.above, often + (chance < config.times - often), chance < config.keep).astype(
        np.int64
    )


def spread(uses: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shuffle all uses with copies far apart: return indices into `uses`, each as often as `uses` says.

    The j-th of u copies is at (start + j + jitter) / u of a circle, with jitter below a half.
    """
    which = np.repeat(np.arange(len(uses)), uses)
    copy = np.arange(len(which)) - np.repeat(np.cumsum(uses) - uses, uses)
    start = rng.random(len(uses))[which]
    jitter = rng.random(len(which)) / 2
    return which[np.argsort((start + (copy + jitter) / uses[which]) % 1.0, kind="stable")]


def is_again(order: np.ndarray) -> np.ndarray:
    """Return which entries of an order are repeats."""
    again = np.ones(len(order), dtype=np.bool_)
    again[np.unique(order, return_index=True)[1]] = False
    return again
