"""How far the heads of one layer look, and where: attention probabilities, a tile of queries and keys at a time.

In: queries and keys of a layer as its attention takes them (rotated), its rules, and what a token may see.
Out: for each head the probability that goes far back, averaged over queries (`Far`); for some heads a map with the
largest probability of each square cell.
Promise: exact softmax over all that a query sees, whatever the tiles; grouped heads, windows, caps and sinks as in
model/attention_reference.py; nothing of S×S is ever held.
Price: the keys of all heads are multiplied once, those of heads that are drawn once more.
Elsewhere: getting queries and keys out of a model (attention_watch.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from unspool.models.attention.reference import AttentionInputs

# Tokens of a tile and how many scores may exist at a time: on a CPU what fits its caches, on a GPU what keeps it busy.
CPU_TILE, CPU_SCORES = (256, 1024), 1 << 20
CUDA_TILE, CUDA_SCORES = (2048, 4096), 1 << 28
# The group of first tokens in `Sight.groups`.
FIRST = -1
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Layer:
    query: Tensor  # [H, S, D]
    key: Tensor  # [KV, S, D]
    scale: float  # of the scores
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]: take part in the softmax and have nothing to say

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "Layer":
        return cls(
            query=inputs.query[0],
            key=inputs.key[0],
            scale=inputs.scale,
            window=inputs.window,
            softcap=inputs.softcap,
            sinks=inputs.sinks,
        )

    @property
    def groups(self) -> int:
        return len(self.query) // len(self.key)

    def heads(self, first: int, stop: int) -> "Layer":
        """Some KV heads with the query heads that share them."""
        of_queries = slice(first * self.groups, stop * self.groups)
        sinks = None if self.sinks is None else self.sinks[of_queries]
        return replace(self, query=self.query[of_queries], key=self.key[first:stop], sinks=sinks)

    def head(self, number: int) -> "Layer":
        """One query head with its keys."""
        at = number // self.groups
        sinks = None if self.sinks is None else self.sinks[number : number + 1]
        return replace(self, query=self.query[number : number + 1], key=self.key[at : at + 1], sinks=sinks)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What the tokens of a text see, and what of it counts as far."""

    starts: Tensor  # int64[S]: the first token that each one sees; never falls
    docs: Tensor  # int64[S]: its document, counted from 0
    groups: Tensor  # int64[S]: its document, or `FIRST` for tokens that heads rest on when they look for nothing
    beyond: int  # far is what is more tokens back than this

    def to(self, device: torch.device) -> "Sight":
        moved = {name: getattr(self, name).to(device) for name in ("starts", "docs", "groups")}
        return Sight(**moved, beyond=self.beyond)


@dataclass(frozen=True, kw_only=True)
class Far:
    """Means over all queries that have anything far back to look at; None where a layer's window leaves none."""

    far: list[float] | None  # of each head: probability on far tokens, without the first ones
    same: list[float] | None  # the part of it that is on the query's own document
    first: list[float] | None  # probability on the first tokens, where they are far
    log_sums: Tensor  # [H, S], which a map needs


def build_sight(doc_lens: Sequence[int], chunk_ids: Sequence[int], *, masked: bool, beyond: int, first: int) -> Sight:
    """Pieces in order, each of a document; `masked`: a piece sees only itself. `first` tokens count apart."""
    lens = torch.tensor(doc_lens)
    begins = torch.repeat_interleave(lens.cumsum(0) - lens, lens)
    docs = torch.repeat_interleave(torch.tensor(chunk_ids), lens)
    starts = begins if masked else torch.zeros_like(begins)
    into = torch.arange(int(lens.sum())) - starts
    return Sight(starts=starts, docs=docs, groups=docs.masked_fill(into < first, FIRST), beyond=beyond)


def lowest_keys(sight: Sight, window: int | None) -> Tensor:
    """The first key that each query sees."""
    if window is None:
        return sight.starts
    places = torch.arange(len(sight.starts), device=sight.starts.device)
    return torch.maximum(sight.starts, places - window + 1)


def measure(layer: Layer, sight: Sight, *, tile: tuple[int, int] | None = None) -> Far:
    """One pass over all tiles; sums are rescaled whenever a larger score is met."""
    length = layer.query.shape[1]
    low = lowest_keys(sight, layer.window)
    size = tile or _tile(layer.query)
    at_once = max(1, _most_scores(layer.query) // (size[0] * size[1] * layer.groups))
    parts = [
        torch.cat([_measure_queries(some, sight, low, queries, size[1]) for queries in _steps(0, length, size[0])], -1)
        for some in (
            layer.heads(first, min(first + at_once, len(layer.key))) for first in range(0, len(layer.key), at_once)
        )
    ]
    shares, log_sums = torch.cat([part[:3] for part in parts], dim=1), torch.cat([part[3] for part in parts])
    counted = _has_far(sight, low)
    if not bool(counted.any()):
        return Far(far=None, same=None, first=None, log_sums=log_sums)
    means = shares[:, :, counted].double().mean(-1).tolist()
    return Far(far=means[0], same=means[1], first=means[2], log_sums=log_sums)


def draw(layer: Layer, sight: Sight, log_sums: Tensor, cell: int, *, tile: tuple[int, int] | None = None) -> Tensor:
    """float32[C, C] on the CPU: the largest probability in cells of `cell` × `cell` of one head; queries go down."""
    length = layer.query.shape[1]
    assert len(layer.query) == 1 and log_sums.shape == (length,)
    low = lowest_keys(sight, layer.window)
    # Tiles end where cells end.
    num_queries, num_keys = (-(-size // cell) * cell for size in tile or _tile(layer.query))
    cells = -(-length // cell)
    found = torch.zeros(cells, cells, device=layer.query.device)
    for queries in _steps(0, length, num_queries):
        begin = int(low[queries.start]) // cell * cell
        for keys in _steps(begin, queries.stop, num_keys):
            scores = _scores(layer, queries, keys)
            hidden = _hidden(low, queries, keys)
            weights = (scores[0] - log_sums[queries, None]).exp_()
            if hidden is not None:
                weights.masked_fill_(hidden, 0)
            missing = (-weights.shape[1] % cell, -weights.shape[0] % cell)
            if any(missing):
                weights = F.pad(weights, (0, missing[0], 0, missing[1]))
            most = weights.view(weights.shape[0] // cell, cell, -1, cell).amax(dim=(1, 3))
            down, across = queries.start // cell, keys.start // cell
            found[down : down + most.shape[0], across : across + most.shape[1]] = most
    return found.cpu()


def _measure_queries(layer: Layer, sight: Sight, low: Tensor, queries: slice, num_keys: int) -> Tensor:
    """[4, H, Q]: probability far back, on the own document, on first tokens; and the log of the sum of all."""
    shape = (len(layer.query), queries.stop - queries.start)
    most = torch.full(shape, -torch.inf, device=layer.query.device)
    sums = torch.zeros(4, *shape, device=layer.query.device)
    for keys in _steps(int(low[queries.start]), queries.stop, num_keys):
        scores = _scores(layer, queries, keys)
        hidden = _hidden(low, queries, keys)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        new_most = torch.maximum(most, scores.amax(-1))
        # A query that has seen nothing yet has no scale.
        scale = new_most.clamp(min=torch.finfo(torch.float32).min)
        weights = scores.sub_(scale[..., None]).exp_()
        sums *= (most - scale).exp_()
        most = new_most
        sums[3] += weights.sum(-1)
        _add_far(sums, weights, sight, queries, keys)
    log_sums = most + sums[3].log()
    if layer.sinks is not None:
        log_sums = torch.logaddexp(log_sums, layer.sinks.float()[:, None])
    sums[:3] *= (most - log_sums).exp()
    sums[3] = log_sums
    return sums


def _add_far(sums: Tensor, weights: Tensor, sight: Sight, queries: slice, keys: slice) -> None:
    """Add what is far back to the first three of `sums`; `weights` may be changed."""
    if keys.start >= queries.stop - 1 - sight.beyond:
        return
    places = torch.arange(queries.start, queries.stop, device=weights.device)
    if keys.stop - 1 >= queries.start - sight.beyond:
        near = torch.arange(keys.start, keys.stop, device=weights.device) >= places[:, None] - sight.beyond
        weights.masked_fill_(near, 0)
    names, of_keys = torch.unique(sight.groups[keys], return_inverse=True)
    # Summed by group as a product, because the weights are large and the groups of a tile few.
    by_group = weights @ F.one_hot(of_keys, len(names)).to(weights.dtype)
    own = names == sight.docs[queries, None]
    sums[0] += by_group[..., names != FIRST].sum(-1)
    sums[1] += (by_group * own).sum(-1)
    sums[2] += by_group[..., names == FIRST].sum(-1)


def _has_far(sight: Sight, low: Tensor) -> Tensor:
    """bool[S]: queries with at least one token to look at that is far back and not one of the first."""
    counts = F.pad((sight.groups != FIRST).long().cumsum(0), (1, 0))
    ends = (torch.arange(len(low), device=low.device) - sight.beyond).clamp(min=0)
    return counts[torch.maximum(ends, low)] > counts[low]


def _scores(layer: Layer, queries: slice, keys: slice) -> Tensor:
    """float32[H, Q, K]; query heads stand beside the KV head they share, so that keys are not repeated."""
    num_heads, _, dim = layer.query.shape
    query = layer.query[:, queries].reshape(len(layer.key), -1, dim)
    key = layer.key[:, keys].transpose(1, 2)
    if query.is_cuda and query.dtype in _HALF:
        # Products of 16-bit numbers are exact in the sum's fp32; rounding the scores would cost percents.
        scores = torch.bmm(query, key, out_dtype=torch.float32)
    else:
        scores = torch.bmm(query.float(), key.float())
    scores *= layer.scale
    if layer.softcap is not None:
        scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    return scores.view(num_heads, -1, scores.shape[-1])


def _hidden(low: Tensor, queries: slice, keys: slice) -> Tensor | None:
    """bool[Q, K]: what a query does not see; None where all see all."""
    if keys.stop - 1 <= queries.start and keys.start >= int(low[queries.stop - 1]):
        return None
    columns = torch.arange(keys.start, keys.stop, device=low.device)
    rows = torch.arange(queries.start, queries.stop, device=low.device)[:, None]
    return (columns > rows) | (columns < low[queries, None])


def _steps(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, stop)) for at in range(start, stop, size))


def _tile(query: Tensor) -> tuple[int, int]:
    return CUDA_TILE if query.is_cuda else CPU_TILE


def _most_scores(query: Tensor) -> int:
    return CUDA_SCORES if query.is_cuda else CPU_SCORES
