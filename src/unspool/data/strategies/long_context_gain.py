"""LongFilter: choose documents whose tokens long context makes more predictable (Deng et al., arXiv 2510.25804).

The gain of a token is p · (short − long): its losses in nats with at most `short` and at most `long` tokens of context,
and p = exp(−long). The gain of a document is the mean over its tokens after the first. Tokens with at most `short`
tokens before them have the same context twice and gain 0, so a document of at most `short` tokens has gain 0. Longer
documents than `long` are read in parts of `long` tokens, each as if it were a document.

Short contexts are windows whose last tokens count, as in LongPPL: their lengths are between `short` − `short` / STRIDES
and `short`, which costs STRIDES forward passes over the tokens.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from unspool.core.formatting import format_share
from unspool.core.sizes import Size, format_size
from unspool.data.strategies.base import StrategyConfig

if TYPE_CHECKING:
    from unspool.data.packing.config import DatasetConfig

# −log p of every token of a text except the first, in nats.
Losses = Callable[[np.ndarray], np.ndarray]

STRIDES = 4
# A document is used at most this often when gains are weights.
MOST_USES = 4.0


class LongContextGain(StrategyConfig):
    """LongFilter: score documents by what long context adds to their prediction, and use those with high scores.

    Example:
        >>> import unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> texts = ["The ship went on. " * 40, "A whale."] * 4
        >>> score = unspool.LongContextGain(model="asset:tiny-base", long=128, short=32, keep=0.4)
        >>> dataset = unspool.pack(texts, tokenizer, seq_len=256, strategy=score)
        >>> counts = dataset.stats()["sources"]["data"]["score"]
        >>> counts["documents"], counts["documents_used"]
        (8, 2)
    """

    name: ClassVar[str] = "score"
    title: ClassVar[str] = "documents chosen by long-context gain (LongFilter)"
    path_keys: ClassVar[tuple[str, ...]] = ("model",)

    method: Literal["long_context_gain"] = Field(
        default="long_context_gain",
        description="How documents are scored. `long_context_gain` is the mean of p · (short loss − long loss) over a "
        "document's tokens. The losses are with short and long context, and p is the probability with long context.",
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="Folder or Hub id of the model that scores. A small one is enough; it needs the vocabulary of the "
        "recipe's model. Default: the recipe's model, before training.",
    )
    long: Size = Field(
        default=32 << 10, description="Long context, in tokens. At most the context length of the model that scores."
    )
    short: Size = Field(
        default=4 << 10, ge=8, description="Short context, in tokens. Documents of at most this length have gain 0."
    )
    keep: float = Field(
        default=0.5, gt=0, le=1, description="Share of each source's tokens that is used, in whole documents."
    )
    use: Literal["top", "weight"] = Field(
        default="top",
        description="`top` uses the documents with the highest gains, once. `weight` draws every document in "
        "proportion to its gain, at most 4 times.",
    )
    sources: tuple[str, ...] = Field(
        default=(), description="Sources to score; the others are used whole. Default: all of the dataset."
    )

    def check_lengths(self) -> None:
        """Raise ValueError if the long context is not well above the short one."""
        if self.long < 2 * self.short:
            raise ValueError(
                f"score.long {format_size(self.long)} is less than twice score.short {format_size(self.short)}"
            )

    def check(self, dataset: "DatasetConfig") -> None:
        self.check_lengths()
        unknown = [name for name in self.sources if name not in dataset.shares]
        if unknown:
            raise ValueError(
                f"score.sources names {unknown[0]!r}, which the dataset does not read; use some of "
                f"{', '.join(dataset.shares)}"
            )

    def summary(self) -> str:
        return f"{format_share(self.keep)} of tokens by long-context gain"

    def scored_sources(self, dataset: "DatasetConfig") -> list[str]:
        """Return the sources of a dataset that are scored."""
        return [name for name in dataset.shares if not self.sources or name in self.sources]

    def scoring(self) -> dict[str, object]:
        """Return the settings that gains depend on, besides the model."""
        return {"method": self.method, "long": self.long, "short": self.short}


def short_losses(losses: Losses, ids: np.ndarray, short: int) -> np.ndarray:
    """Return −log p of the tokens from position `short` on, each with at most `short` tokens of context."""
    stride = max(1, short // STRIDES)
    found = [np.zeros(0)]
    for start in range(short, len(ids), stride):
        stop = min(start + stride, len(ids))
        # The first token of a window is not predicted, so start one token earlier.
        found.append(losses(ids[stop - short - 1 : stop])[start - stop :])
    return np.concatenate(found)


def document_gain(losses: Losses, ids: np.ndarray, *, long: int, short: int) -> float:
    """Return a document's gain in nats per token; 0 without a call of `losses` if it has at most `short` tokens."""
    total = 0.0
    for begin in range(0, len(ids), long):
        part = ids[begin : begin + long]
        if len(part) > short:
            with_long = losses(part)[short - 1 :]
            total += float(np.sum(np.exp(-with_long) * (short_losses(losses, part, short) - with_long)))
    return total / max(1, len(ids) - 1)


def is_scored(lens: np.ndarray, short: int) -> np.ndarray:
    """Return which documents have tokens with more than `short` tokens before them."""
    return lens > short


def uses_by_gain(gains: np.ndarray, lens: np.ndarray, config: LongContextGain, rng: np.random.Generator) -> np.ndarray:
    """Return how often each document is used: int64.

    `top`: documents by falling gain, equal ones in order, up to the one that reaches `keep` of all tokens.
    """
    wanted = config.keep * float(lens.sum())
    if config.use == "top":
        order = np.lexsort((np.arange(len(gains)), -gains))
        before = np.cumsum(lens[order]) - lens[order]
        uses = np.zeros(len(gains), dtype=np.int64)
        uses[order[before < wanted]] = 1
        return uses
    weights = np.maximum(gains, 0.0)
    total = float((weights * lens).sum())
    expected = np.minimum(wanted * weights / total, MOST_USES) if total else weights
    drawn: np.ndarray = np.floor(expected + rng.random(len(gains))).astype(np.int64)
    return drawn


def describe_gains(
    gains: np.ndarray, lens: np.ndarray, uses: np.ndarray, short: int
) -> Mapping[str, float | int | None]:
    """Return counts of a source for the manifest of a dataset; mean gains are over tokens."""
    return {
        "documents": len(gains),
        "documents_used": int((uses > 0).sum()),
        "documents_up_to_short": int((~is_scored(lens, short)).sum()),
        "mean_gain": _mean(gains, lens),
        "mean_gain_used": _mean(gains, lens * uses),
    }


def _mean(gains: np.ndarray, tokens: np.ndarray) -> float | None:
    total = int(tokens.sum())
    return float((gains * tokens).sum()) / total if total else None
