"""LongCE: more weight for labels that long context makes predictable (Fang et al., arXiv 2410.23771).

A label's weight is min(p(long) / p(short), `max_weight`): its probability with all tokens that it sees, by that with
only the last ones. Both come from the model in training, without gradient, at the start of each step.

The short contexts are windows of `short_context` + `stride` tokens, `stride` apart, as in the authors' code. A window
gives the labels after its first `short_context` tokens. A label that sees fewer tokens than the first window holds has
the same context twice, so its weight is 1. Windows stay inside the tokens that attend to each other: a document, or a
row without document masks.

The authors divide the weighted sum by the number of labels. Here it is divided by the sum of weights, so that the
weights do not change the size of the step. The cost is one forward pass over the long context, to know this sum before
the first backward pass, and one over each window.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from unspool.core.sizes import Size, format_size
from unspool.training.losses.base import LossConfig, LossWeights

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from unspool.training.batch import Batch
    from unspool.training.config import StageConfig
    from unspool.training.parallel.config import ParallelConfig

SHORT_CONTEXT = 4096  # tokens, as in the paper
IDLE_TOKENS = 64  # of a pass whose result nobody uses
STRIDES = 4  # windows that begin within a short context, as in the authors' code


class LongCELoss(LossConfig):
    """LongCE: a label weighs as many times more as long context makes it more probable, up to a limit."""

    weights: Literal["longce"]
    short_context: Size | None = Field(
        None,
        ge=1,
        description="Fewest tokens in the short context of a label. Default: 4K, or an eighth of a `context_length` "
        "below 32K.",
    )
    stride: Size | None = Field(
        None,
        ge=1,
        description="Tokens between windows of short context. A window has `short_context` + `stride` tokens, so a "
        "larger stride costs less. Default: a quarter of `short_context`.",
    )
    max_weight: float = Field(5.0, gt=0, description="Largest weight of a label.")

    def sizes(self, context_length: int) -> tuple[int, int]:
        """Return the short context and the stride, in tokens."""
        short = self.short_context or max(1, min(SHORT_CONTEXT, context_length // 8))
        return short, self.stride or max(1, short // STRIDES)

    def problem(self, context_length: int, parallel: "ParallelConfig") -> str | None:
        short, stride = self.sizes(context_length)
        if short + stride >= context_length:
            return (
                f"loss.short_context {format_size(short)} and loss.stride {format_size(stride)} must be below "
                f"context_length ({format_size(context_length)}) together; otherwise all weights are 1"
            )
        if parallel.ulysses * parallel.ring > 1:
            return (
                "loss.weights longce computes whole rows on each rank, so it needs parallel.ulysses 1 and "
                "parallel.ring 1; use shard or replicate"
            )
        return None

    def build(self, stage: "StageConfig", measured: Any) -> "LongCEWeights":
        short, stride = self.sizes(stage.context_length)
        return LongCEWeights(short=short, stride=stride, max_weight=self.max_weight)

    def forward_only(self, length: float, context_length: int) -> tuple[float, float]:
        found = windows(round(length), *self.sizes(context_length))
        if not found:
            return 0.0, 0.0
        lens = [stop - start for start, stop in found]
        return length + sum(lens), length**2 + sum(size**2 for size in lens)


def windows(length: int, short: int, stride: int) -> list[tuple[int, int]]:
    """Return the windows [start, stop) of short context in `length` tokens, without the first, which is no shorter."""
    return [(start, min(start + short + stride, length)) for start in range(stride, length - short, stride)]


@dataclass(frozen=True, kw_only=True)
class ShortPass:
    """Windows of a batch that run together, each as a document of its own."""

    batch: "Batch"
    own: "Tensor"  # int64[n]: positions of the labels in `batch`
    labels: "Tensor"  # int64[n]: positions of the same labels in the batch that the windows are from


@dataclass(frozen=True, kw_only=True)
class LongCEWeights(LossWeights):
    short: int
    stride: int
    max_weight: float

    def of_step(self, model: Any, batches: "tuple[Batch, ...]", mesh: "DeviceMesh | None") -> "tuple[Batch, ...]":
        from unspool.training.metrics.validation import eval_mode
        from unspool.training.parallel.dtensor import compute_device
        from unspool.training.parallel.mesh import max_over_ranks
        from unspool.training.step import batch_loss

        device = compute_device(model)
        passes = [self.short_passes(batch) for batch in batches]
        count = sum(len(found) + 1 for found in passes if found)
        most = count if mesh is None else max_over_ranks(count, mesh)
        with eval_mode(model):
            weighed = []
            for batch, found in zip(batches, passes, strict=True):
                weights = batch.weights
                assert weights is not None
                if found:
                    weights = weights.to(device, copy=True)
                    _, long = batch_loss(model, batch.to(device))
                for one in found:
                    _, short = batch_loss(model, one.batch.to(device))
                    own, labels = one.own.to(device), one.labels.to(device)
                    weights[labels] = (short[own] - long[labels]).exp().clamp(max=self.max_weight)
                weighed.append(replace(batch, weights=weights))
            # Ranks that shard the weights gather them together, so all run equally many passes.
            for _ in range(most - count):
                idle = [(0, min(IDLE_TOKENS, len(batches[0].tokens)))]
                batch_loss(model, _pass_of(batches[0], idle, self.short).batch.to(device))
        return tuple(weighed)

    def short_passes(self, batch: "Batch") -> list[ShortPass]:
        """Return the windows of a batch in passes of at most as many tokens as the batch has."""
        found: list[list[tuple[int, int]]] = []
        begin, room = 0, 0
        for span in batch.doc_lens:
            for start, stop in windows(span, self.short, self.stride):
                if stop - start > room:
                    found.append([])
                    room = len(batch.tokens)
                found[-1].append((begin + start, begin + stop))
                room -= stop - start
            begin += span
        return [_pass_of(batch, group, self.short) for group in found]


def _pass_of(batch: "Batch", group: list[tuple[int, int]], short: int) -> ShortPass:
    import torch

    from unspool.data.packing.row import IGNORE

    places = torch.cat([torch.arange(start, stop) for start, stop in group])
    starts = torch.cat([torch.full((stop - start,), start) for start, stop in group])
    lens = tuple(stop - start for start, stop in group)
    # The label at i is the token at i + 1, whose short context begins at the window's start.
    within = places - starts + 1
    is_last = within == torch.cat([torch.full((size,), size) for size in lens])
    labels = batch.shift_labels[places].masked_fill((within < short) | is_last, IGNORE)
    positions = batch.position_ids[places] - batch.position_ids[starts]
    ends = torch.tensor(lens).cumsum(0) - 1
    own = (labels != IGNORE).nonzero()[:, 0]
    short_batch = replace(
        batch,
        tokens=batch.tokens[places],
        shift_labels=labels,
        position_ids=positions,
        doc_lens=lens,
        row_lens=(len(places),),
        num_valid=(len(own),),
        rope_spans=tuple(zip(lens, (positions[ends] + 1).tolist(), strict=True)),
        weights=None,
    )
    return ShortPass(batch=short_batch, own=own, labels=places[own])
