"""PoSE: position skips in short rows, so that the model sees the distances of long rows.

Each stretch of length l that attends to itself is cut at random points into `chunks` parts. The first begins at 0; each
later one is shifted by a skip, drawn uniformly from the previous skip to target - l, as in the paper. Positions
increase strictly and stay below `target`. There are two differences from the paper: the text continues across a skip,
and cuts are uniform, while their code cuts in the first half. PoSE trains positions, not the use of distant text.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from unspool.core.rng import rng_for
from unspool.core.sizes import Size, format_size
from unspool.data.packing.row import Row, attended_lens
from unspool.data.strategies.base import Finish, PackingInputs, StrategyConfig

if TYPE_CHECKING:
    from unspool.data.packing.config import DatasetConfig


class PoSE(StrategyConfig):
    """PoSE: position skips in short rows, so that the model sees distances of long rows.

    Example:
        >>> import unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> texts = ["The sea was calm and the ship went on. " * 40] * 8
        >>> dataset = unspool.pack(texts, tokenizer, seq_len=256, strategy=unspool.PoSE(target="2K"))
        >>> bool(dataset[0].positions.max() > 256)
        True
    """

    name: ClassVar[str] = "pose"
    title: ClassVar[str] = "with position skips (PoSE)"
    sets_positions: ClassVar[bool] = True

    target: Size = Field(description="Context length whose positions the rows cover. Must be above `seq_len`.")
    chunks: int = Field(
        default=2,
        ge=2,
        le=64,
        description="Number of spans of consecutive positions per attended unit (row or document).",
    )

    def check(self, dataset: "DatasetConfig") -> None:
        if self.target <= dataset.seq_len:
            raise ValueError(
                f"pose.target must be above seq_len ({format_size(dataset.seq_len)}), the length to extend to"
            )

    def summary(self) -> str:
        return f"positions skipped up to {format_size(self.target)}"

    def finish(self, dataset: "DatasetConfig", inputs: PackingInputs) -> Finish:
        rng = rng_for(inputs.seed, "skips", inputs.name)

        def set_positions(rows: Sequence[Row]) -> Sequence[Row]:
            lens = [attended_lens(row.doc_lens, row.attention) for row in rows]
            positions = skip_positions(np.concatenate(lens), self, rng).reshape(len(rows), -1)
            return [replace(row, positions=each) for row, each in zip(rows, positions, strict=True)]

        return set_positions


def skip_positions(lens: np.ndarray, config: PoSE, rng: np.random.Generator) -> np.ndarray:
    """Return int32[lens.sum()]; one call for several rows gives the same as one call per row.

    Two cuts may coincide, which makes one skip of two.
    """
    draws = rng.random((len(lens), 2, config.chunks - 1))
    lens = lens.astype(np.int64)
    cuts = np.sort(1 + (draws[:, 0] * (lens - 1)[:, None]).astype(np.int64), axis=1)
    room = config.target - lens + 1
    moved = np.zeros((len(lens), config.chunks), dtype=np.int64)
    for number in range(1, config.chunks):
        earlier = moved[:, number - 1]
        moved[:, number] = earlier + (draws[:, 1, number - 1] * (room - earlier)).astype(np.int64)
    # Between two of these starts, all tokens have the same shift.
    starts = (np.cumsum(lens) - lens)[:, None]
    begins = np.concatenate([starts, starts + cuts], axis=1).ravel()
    sizes = np.diff(begins, append=lens.sum())
    places = np.repeat((moved - starts).astype(np.int32).ravel(), sizes)
    places += np.arange(len(places), dtype=np.int32)
    return places
