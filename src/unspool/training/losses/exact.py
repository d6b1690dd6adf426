"""EXACT: more weight for labels with a long effective context (arXiv 2605.10544).

With document masks, most labels see only a short prefix of their own document, however long the row is. A label's
*effective context* is the number of tokens that it sees. In a row whose documents attend to each other, such as a
tangled one (UtK), this is the part of the row before it.

Effective contexts from `threshold` on form the tail, in bins of doubling length. The share `extra` of the loss's weight
goes to the tail, equally to each bin that occurs, so that a label's weight is inverse to the frequency of its bin. The
rest goes to all labels alike. So a label in bin b, which holds the share p(b) of all labels, weighs
1 − extra + extra / (number of bins · p(b)), and one below the threshold 1 − extra. The mean over the mix is 1.

The paper's code is not public. That the mean is 1, and the defaults of `threshold` and `extra`, are choices made here.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from unspool.core.errors import ConfigError
from unspool.core.progress import progress_bar
from unspool.core.sizes import Size, format_size
from unspool.data.packing.row import IGNORE, Row, attended_lens, labels, position_ids
from unspool.training.losses.base import LossConfig, LossWeights

if TYPE_CHECKING:
    from unspool.data.packing.store import RowSet
    from unspool.training.config import StageConfig
    from unspool.training.parallel.config import ParallelConfig

logger = logging.getLogger(__name__)

# Above this, few labels decide whole steps.
LARGE_WEIGHT = 100.0


class ExactLoss(LossConfig):
    """EXACT: a share of the weight goes to labels with long effective context, equally to each bin of lengths."""

    weights: Literal["exact"]
    threshold: Size | None = Field(
        None,
        ge=2,
        description="Smallest effective context that gets extra weight, in tokens. Default: an eighth of "
        "`context_length`.",
    )
    extra: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Share of the weight that goes to labels from `threshold` on. The rest goes to all labels alike.",
    )

    def problem(self, context_length: int, parallel: "ParallelConfig") -> str | None:
        if self.threshold and self.threshold >= context_length:
            return (
                f"loss.threshold {format_size(self.threshold)} must be below context_length "
                f"({format_size(context_length)}); no label sees so many tokens"
            )
        return None

    def measure(self, stage: "StageConfig", rows: "Mapping[str, RowSet]") -> dict[str, Any]:
        """Return the edges of the bins, and each bin's share of all labels of the mix."""
        edges = tail_edges(self.threshold or max(2, stage.context_length // 8), stage.context_length)
        found = np.zeros(len(edges) + 1)
        shares = {name: share / sum(stage.mix.values()) for name, share in stage.mix.items()}
        with progress_bar(f"contexts of {stage.name}", sum(len(rows[name]) for name in shares)) as advance:
            for name, share in shares.items():
                counts = np.zeros(len(edges) + 1, dtype=np.int64)
                for index in range(len(rows[name])):
                    row = rows[name][index]
                    counts += count_contexts(row, attended_lens(row.doc_lens, _attention(row, stage)), edges)
                    advance(1)
                # A dataset gives its share of tokens, and of these some carry loss.
                found += share * counts / (len(rows[name]) * rows[name].row_len)
        if not found[1:].any():
            raise ConfigError(
                f"stage {stage.name}: loss.threshold {format_size(edges[0])}: no label of its datasets has so much "
                "effective context; lower it, or use longer documents."
            )
        return {"edges": edges, "shares": (found / found.sum()).tolist()}

    def build(self, stage: "StageConfig", measured: Any) -> "ExactWeights":
        found = self.bin_weights(measured["shares"])
        if found.max() > LARGE_WEIGHT:
            logger.warning(
                f"stage {stage.name}: loss: the largest weight is {found.max():.0f}, because a bin of contexts is "
                "rare; steps with such labels depend on few tokens; lower loss.extra or loss.threshold"
            )
        contexts = np.arange(stage.context_length + 1)
        return ExactWeights(found[np.searchsorted(measured["edges"], contexts, side="right")].astype(np.float32))

    def bin_weights(self, shares: Sequence[float]) -> np.ndarray:
        """Return the weight of a label in each bin, given the bins' shares of all labels. The first is not the tail."""
        share = np.array(shares)
        tail = np.flatnonzero(share[1:]) + 1
        found = np.full(len(share), 1 - self.extra)
        found[tail] += self.extra / (len(tail) * share[tail])
        return found

    def describe(self, measured: Any) -> str:
        edges, shares = measured["edges"], measured["shares"]
        names = [f"below {format_size(edges[0])}", *(f"from {format_size(edge)}" for edge in edges)]
        parts = zip(names, shares, self.bin_weights(shares), strict=False)
        return "loss weights by effective context: " + ", ".join(
            f"{name} {weight:.3g} ({share:.2%} of labels)" for name, share, weight in parts
        )


class ExactWeights(LossWeights):
    """The weight of every effective context from 0 on, fp32."""

    def __init__(self, by_context: np.ndarray) -> None:
        self._by_context = by_context

    def of_row(self, row: Row, spans: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._by_context[position_ids(spans) + 1]
        return found


def tail_edges(threshold: int, context_length: int) -> list[int]:
    """Return the lower edges of the tail's bins: `threshold`, twice that, … below `context_length`."""
    edges = [threshold]
    while edges[-1] * 2 < context_length:
        edges.append(edges[-1] * 2)
    return edges


def count_contexts(row: Row, spans: np.ndarray, edges: Sequence[int]) -> np.ndarray:
    """Count a row's labels by effective context: below the first edge, and from each edge to the next."""
    if row.loss_mask is not None:
        valid = labels(row.tokens, row.doc_lens, row.loss_mask) != IGNORE
        contexts = position_ids(spans)[valid] + 1
        return np.bincount(np.searchsorted(edges, contexts, side="right"), minlength=len(edges) + 1)
    # A span of n tokens has the contexts 1 to n, without those at the last token of a document.
    ends = np.cumsum(row.doc_lens, dtype=np.int64)
    span_ends = np.cumsum(spans, dtype=np.int64)
    starts = (span_ends - spans)[np.searchsorted(span_ends, ends)]
    below = [int((np.minimum(spans, edge - 1)).sum() - (ends - starts < edge).sum()) for edge in edges]
    return np.diff([0, *below, int(spans.sum()) - len(ends)])


def _attention(row: Row, stage: "StageConfig") -> str:
    return "full" if stage.attention == "full" else row.attention
