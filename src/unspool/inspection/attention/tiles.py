"""Long-range attention of the heads of one layer, computed tile by tile.

Takes queries and keys as the layer's attention does (after RoPE). The softmax is exact over all visible keys, for any
tile size, with grouped heads, windows, softcaps and sinks as in models/attention/reference.py. No S×S matrix is ever in
memory. Each head's scores are computed once, those of drawn heads twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from unspool.models.attention.reference import AttentionInputs

# Tokens per tile, and scores in memory at a time: chosen for a CPU's caches and a GPU's occupancy.
CPU_TILE, CPU_SCORES = (256, 1024), 1 << 20
CUDA_TILE, CUDA_SCORES = (2048, 4096), 1 << 28
# The group of the first tokens in `Visibility.groups`.
FIRST = -1
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Layer:
    query: Tensor  # [H, S, D]
    key: Tensor  # [KV, S, D]
    scale: float  # of the scores
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]: extra logits in the softmax, without a value

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
        """Select some KV heads with the query heads that share them."""
        of_queries = slice(first * self.groups, stop * self.groups)
        sinks = None if self.sinks is None else self.sinks[of_queries]
        return replace(self, query=self.query[of_queries], key=self.key[first:stop], sinks=sinks)

    def head(self, number: int) -> "Layer":
        """Select one query head with its keys."""
        at = number // self.groups
        sinks = None if self.sinks is None else self.sinks[number : number + 1]
        return replace(self, query=self.query[number : number + 1], key=self.key[at : at + 1], sinks=sinks)


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """The tokens that each token can attend to, and which of them are far."""

    starts: Tensor  # int64[S]: first visible token of each token; never decreases
    docs: Tensor  # int64[S]: document of each token, from 0
    groups: Tensor  # int64[S]: document, or `FIRST` for the first tokens, which act as attention sinks
    beyond: int  # tokens farther back than this are far

    def to(self, device: torch.device) -> "Visibility":
        moved = {name: getattr(self, name).to(device) for name in ("starts", "docs", "groups")}
        return Visibility(**moved, beyond=self.beyond)


@dataclass(frozen=True, kw_only=True)
class LongRange:
    """Means over all queries with a visible far token; None if the layer's window allows none."""

    far: list[float] | None  # per head: probability on far tokens, except the first tokens
    same: list[float] | None  # the part of `far` within the query's own document
    first: list[float] | None  # probability on the first tokens, if they are far
    log_sums: Tensor  # [H, S], needed to draw maps


def build_visibility(
    doc_lens: Sequence[int], chunk_ids: Sequence[int], *, masked: bool, beyond: int, first: int
) -> Visibility:
    """Build the visibility of consecutive pieces; if `masked`, a piece sees only itself. `first` tokens are a group."""
    lens = torch.tensor(doc_lens)
    begins = torch.repeat_interleave(lens.cumsum(0) - lens, lens)
    docs = torch.repeat_interleave(torch.tensor(chunk_ids), lens)
    starts = begins if masked else torch.zeros_like(begins)
    into = torch.arange(int(lens.sum())) - starts
    return Visibility(starts=starts, docs=docs, groups=docs.masked_fill(into < first, FIRST), beyond=beyond)


def lowest_keys(visible: Visibility, window: int | None) -> Tensor:
    """Return the first visible key of each query."""
    if window is None:
        return visible.starts
    places = torch.arange(len(visible.starts), device=visible.starts.device)
    return torch.maximum(visible.starts, places - window + 1)


def measure(layer: Layer, visible: Visibility, *, tile: tuple[int, int] | None = None) -> LongRange:
    """Measure all heads in one pass over tiles; sums are rescaled when a larger score appears."""
    length = layer.query.shape[1]
    low = lowest_keys(visible, layer.window)
    size = tile or _tile(layer.query)
    at_once = max(1, _max_scores(layer.query) // (size[0] * size[1] * layer.groups))
    parts = [
        torch.cat(
            [_measure_queries(some, visible, low, queries, size[1]) for queries in _steps(0, length, size[0])], -1
        )
        for some in (
            layer.heads(first, min(first + at_once, len(layer.key))) for first in range(0, len(layer.key), at_once)
        )
    ]
    shares, log_sums = torch.cat([part[:3] for part in parts], dim=1), torch.cat([part[3] for part in parts])
    counted = _has_far(visible, low)
    if not bool(counted.any()):
        return LongRange(far=None, same=None, first=None, log_sums=log_sums)
    means = shares[:, :, counted].double().mean(-1).tolist()
    return LongRange(far=means[0], same=means[1], first=means[2], log_sums=log_sums)


def draw(
    layer: Layer, visible: Visibility, log_sums: Tensor, cell: int, *, tile: tuple[int, int] | None = None
) -> Tensor:
    """Return one head's largest probability per cell of `cell` × `cell`: float32[C, C] on the CPU, rows are queries."""
    length = layer.query.shape[1]
    assert len(layer.query) == 1 and log_sums.shape == (length,)
    low = lowest_keys(visible, layer.window)
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


def _measure_queries(layer: Layer, visible: Visibility, low: Tensor, queries: slice, num_keys: int) -> Tensor:
    """Return [4, H, Q]: probability on far tokens, on those of the same document, on first tokens; log-sum-exp."""
    shape = (len(layer.query), queries.stop - queries.start)
    most = torch.full(shape, -torch.inf, device=layer.query.device)
    sums = torch.zeros(4, *shape, device=layer.query.device)
    for keys in _steps(int(low[queries.start]), queries.stop, num_keys):
        scores = _scores(layer, queries, keys)
        hidden = _hidden(low, queries, keys)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        new_most = torch.maximum(most, scores.amax(-1))
        # A query that has seen no visible key yet has no scale.
        scale = new_most.clamp(min=torch.finfo(torch.float32).min)
        weights = scores.sub_(scale[..., None]).exp_()
        sums *= (most - scale).exp_()
        most = new_most
        sums[3] += weights.sum(-1)
        _add_far(sums, weights, visible, queries, keys)
    log_sums = most + sums[3].log()
    if layer.sinks is not None:
        log_sums = torch.logaddexp(log_sums, layer.sinks.float()[:, None])
    sums[:3] *= (most - log_sums).exp()
    sums[3] = log_sums
    return sums


def _add_far(sums: Tensor, weights: Tensor, visible: Visibility, queries: slice, keys: slice) -> None:
    """Add far weights to the first three of `sums`; modify `weights` in place."""
    if keys.start >= queries.stop - 1 - visible.beyond:
        return
    places = torch.arange(queries.start, queries.stop, device=weights.device)
    if keys.stop - 1 >= queries.start - visible.beyond:
        near = torch.arange(keys.start, keys.stop, device=weights.device) >= places[:, None] - visible.beyond
        weights.masked_fill_(near, 0)
    names, of_keys = torch.unique(visible.groups[keys], return_inverse=True)
    # Sum by group with a matrix product, because a tile has many weights and few groups.
    by_group = weights @ F.one_hot(of_keys, len(names)).to(weights.dtype)
    own = names == visible.docs[queries, None]
    sums[0] += by_group[..., names != FIRST].sum(-1)
    sums[1] += (by_group * own).sum(-1)
    sums[2] += by_group[..., names == FIRST].sum(-1)


def _has_far(visible: Visibility, low: Tensor) -> Tensor:
    """Return bool[S]: queries with at least one visible far token besides the first tokens."""
    counts = F.pad((visible.groups != FIRST).long().cumsum(0), (1, 0))
    ends = (torch.arange(len(low), device=low.device) - visible.beyond).clamp(min=0)
    return counts[torch.maximum(ends, low)] > counts[low]


def _scores(layer: Layer, queries: slice, keys: slice) -> Tensor:
    """Compute float32[H, Q, K]; query heads are grouped by their KV head, so that keys are not repeated."""
    num_heads, _, dim = layer.query.shape
    query = layer.query[:, queries].reshape(len(layer.key), -1, dim)
    key = layer.key[:, keys].transpose(1, 2)
    if query.is_cuda and query.dtype in _HALF:
        # Products of 16-bit numbers are exact in fp32 sums; rounding the scores would cause errors of percents.
        scores = torch.bmm(query, key, out_dtype=torch.float32)
    else:
        scores = torch.bmm(query.float(), key.float())
    scores *= layer.scale
    if layer.softcap is not None:
        scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    return scores.view(num_heads, -1, scores.shape[-1])


def _hidden(low: Tensor, queries: slice, keys: slice) -> Tensor | None:
    """Return bool[Q, K]: keys that a query cannot see; None if all queries see all keys."""
    if keys.stop - 1 <= queries.start and keys.start >= int(low[queries.stop - 1]):
        return None
    columns = torch.arange(keys.start, keys.stop, device=low.device)
    rows = torch.arange(queries.start, queries.stop, device=low.device)[:, None]
    return (columns > rows) | (columns < low[queries, None])


def _steps(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, stop)) for at in range(start, stop, size))


def _tile(query: Tensor) -> tuple[int, int]:
    return CUDA_TILE if query.is_cuda else CPU_TILE


def _max_scores(query: Tensor) -> int:
    return CUDA_SCORES if query.is_cuda else CPU_SCORES
