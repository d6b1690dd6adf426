"""What a rows set's options come to: how its rows are filled, and what they bring along.

In: a `DatasetConfig`. Out: a `Strategy`, whose `pack` fills rows; `finish_rows` does the rest, batch by batch.
This is the only place that knows all strategies; one of its own needs a file, a config class and a line in `BUILDERS`.
Elsewhere: which documents (order.py), writing and counting (rows.py).
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from unspool.core.progress import say
from unspool.core.rng import rng_for
from unspool.data.corpus.store import CorpusReader
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.pack import PACKERS, Packer
from unspool.data.packing.store import Row, attended_lens
from unspool.data.strategies.cip import interleave_rows
from unspool.data.strategies.nextlong import build_negatives
from unspool.data.strategies.pose import skip_positions
from unspool.data.strategies.retrieval import Embed
from unspool.data.strategies.utk.tangle import build_tangler


@dataclass(frozen=True, kw_only=True)
class Strategy:
    pack: Packer
    masked: bool = False  # rows have a loss mask
    pieced: bool = False  # rows have pieces of one document in several places
    arrays: bool = False  # documents must be arrays, not read when sliced
    counts_documents: bool = True  # the tally gets documents and their lengths, not only tokens
    added_tokens: Mapping[str, int] = field(default_factory=dict)  # new in the vocabulary
    cost: Mapping[str, Any] = field(default_factory=dict)  # for the manifest, complete when the last row is made


@dataclass(frozen=True, kw_only=True)
class PackingInputs:
    """What strategies may need besides their config."""

    readers: Mapping[str, CorpusReader]
    tokenizer: PreTrainedTokenizerFast
    pad: int
    seed: int
    name: str  # of the rows set
    embed: Embed | None = None  # vectors of texts, for retriever: embeddings

    @property
    def is_masked(self) -> bool:
        """Whether some source has loss masks."""
        return any(reader.is_masked for reader in self.readers.values())


def build_strategy(config: DatasetConfig, means: PackingInputs) -> Strategy:
    return BUILDERS[config.strategy](config, means)


def finish_rows(rows: Sequence[Row], config: DatasetConfig, rng: np.random.Generator) -> Sequence[Row]:
    """Packed rows, some at a time, as `config` asks for them: interleaved, with their attention and positions.

    `rng` serves all rows of a set in turn; how many come at a time makes no difference.
    """
    if config.cip is not None:
        rows = interleave_rows(rows, config.cip.pieces)
    if config.attention is None and config.pose is None:
        return rows
    attentions = [config.attention or row.attention for row in rows]
    positions: list[np.ndarray | None] = [None] * len(rows)
    if config.pose is not None:
        lens = [attended_lens(row.doc_lens, attention) for row, attention in zip(rows, attentions, strict=True)]
        places = skip_positions(np.concatenate(lens), config.pose, rng)
        positions = list(places.reshape(len(rows), -1))
    return [
        Row(row.tokens, row.doc_lens, row.loss_mask, row.source, attention, row.chunk_ids, place)
        for row, attention, place in zip(rows, attentions, positions, strict=True)
    ]


def _plain(config: DatasetConfig, means: PackingInputs) -> Strategy:
    return Strategy(
        pack=partial(PACKERS[config.packing], pad=means.pad), masked=means.is_masked or config.packing == "best_fit"
    )


def _utk(config: DatasetConfig, means: PackingInputs) -> Strategy:
    # A copy: the caller's tokenizer belongs to a model that may never see a tangled row.
    tangler = build_tangler(config, copy.deepcopy(means.tokenizer), rng_for(means.seed, "tangle", means.name))
    return Strategy(
        pack=tangler.pack, masked=True, pieced=True, arrays=True, counts_documents=False, added_tokens=tangler.knots
    )


def _cip(config: DatasetConfig, means: PackingInputs) -> Strategy:
    # Documents fill rows as ever, and only the order within a row changes (`finish_rows`).
    return Strategy(pack=PACKERS[config.packing], masked=means.is_masked, pieced=True)


def _nextlong(config: DatasetConfig, means: PackingInputs) -> Strategy:
    assert config.nextlong is not None
    began = time.perf_counter()
    negatives = build_negatives(config.nextlong, means.readers, keep_rest=config.packing == "concat", embed=means.embed)
    # Not in the manifest, which is the same for every run.
    say(f"rows {means.name}: index built in {time.perf_counter() - began:.1f} s")
    return Strategy(
        pack=negatives.pack, masked=means.is_masked, pieced=True, counts_documents=False, cost=negatives.cost
    )


BUILDERS: dict[str | None, Callable[[DatasetConfig, PackingInputs], Strategy]] = {
    None: _plain,
    "utk": _utk,
    "cip": _cip,
    "nextlong": _nextlong,
}
