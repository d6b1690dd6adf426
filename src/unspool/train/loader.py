"""The rows of each step as micro-batches, prepared while the step before is being computed.

In: a mix, its rows, the steps to come. Out: `StepBatches`, in order.
Promise: which rows a step holds is a function of its number alone, whatever the number of ranks; the device never waits
for a file. Ranks with rows of their own get micro-batches that cost alike (data/balance.py), and each builds only its
own; ranks that share a row get their parts of it (split.py).
Price: two steps of rows in memory (some bytes a token), pinned where a GPU copies them.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from unspool.data.balance import ModelShape, arrange, row_cost
from unspool.data.mix import Mix
from unspool.data.store import Row, RowSet
from unspool.train.batch import Batch, attended_by, build_batch
from unspool.train.config import StageConfig
from unspool.train.mesh import ALONE, Place
from unspool.train.split import split_batch

Picks = Sequence[Sequence[tuple[str, int]]]  # by slot of one context: rows set and number of each row


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """What one optimizer step trains on: its rows, and those of them that are this rank's."""

    picks: Picks  # of all ranks
    doc_lens: tuple[int, ...]  # of all documents that attend to themselves, of all ranks
    names: tuple[str, ...]  # rows set of every row of this rank, in the order of the batches
    batches: tuple[Batch, ...]  # one per micro-batch of this rank

    @property
    def num_valid(self) -> int:
        """Labels of this rank's batches that carry loss."""
        return sum(sum(batch.num_valid) for batch in self.batches)


def build_step(
    stage: StageConfig,
    rows: dict[str, RowSet],
    picks: Picks,
    *,
    place: Place = ALONE,
    shape: ModelShape | None = None,
) -> StepBatches:
    """`shape` is that of the model, by which costs are known; needed where ranks have rows of their own."""
    slots_per_micro = (stage.micro_batch or stage.context) // stage.context
    micros = [
        [(name, rows[name][index]) for slot in picks[start : start + slots_per_micro] for name, index in slot]
        for start in range(0, len(picks), slots_per_micro)
    ]
    attended = [[attended_by(row, stage.attention) for _, row in micro] for micro in micros]
    mine = micros
    if place.data_ranks > 1:
        assert shape is not None, "rows are given to ranks by what they cost"
        costs = [sum(row_cost(lens, shape) for lens in of_micro) for of_micro in attended]
        mine = [micros[number] for number in arrange(costs, place.data_ranks)[place.data_rank].tolist()]
    return StepBatches(
        picks=picks,
        doc_lens=tuple(length for of_micro in attended for lens in of_micro for length in lens.tolist()),
        names=tuple(name for micro in mine for name, _ in micro),
        batches=tuple(_own_part([row for _, row in micro], stage, place) for micro in mine),
    )


def _own_part(rows: Sequence[Row], stage: StageConfig, place: Place) -> Batch:
    batch = build_batch(rows, attention=stage.attention)
    return split_batch(batch, place.sequence_rank, place.sequence_ranks, ring=place.ring)


def step_picks(stage: StageConfig, mix: Mix, step: int) -> Picks:
    """The rows of step 1, 2, …: a function of the seed and the step, so that resuming needs no state."""
    slots = stage.batch // stage.context
    return [mix.slot(index) for index in range((step - 1) * slots, step * slots)]


def load_steps(
    stage: StageConfig,
    mix: Mix,
    rows: dict[str, RowSet],
    *,
    first: int,
    pin: bool,
    place: Place = ALONE,
    shape: ModelShape | None = None,
) -> Iterator[tuple[int, StepBatches]]:
    """Steps `first` to the stage's last, each built in a thread while the one before is trained."""

    def build(step: int) -> StepBatches:
        built = build_step(stage, rows, step_picks(stage, mix, step), place=place, shape=shape)
        return built if not pin else pinned(built)

    with ThreadPoolExecutor(1, "unspool-rows") as pool:
        coming = pool.submit(build, first) if first <= stage.steps else None
        for step in range(first, stage.steps + 1):
            assert coming is not None
            ready = coming.result()
            coming = pool.submit(build, step + 1) if step < stage.steps else None
            yield step, ready


def pinned(step: StepBatches) -> StepBatches:
    return replace(step, batches=tuple(batch.pinned() for batch in step.batches))
