"""The rows of each step as micro-batches, prepared while the step before is being computed.

In: a mix, its rows, the steps to come. Out: `StepBatches`, in order.
Promise: which rows a step holds is a function of its number alone; the device never waits for a file.
Price: two steps of rows in memory (some bytes a token), pinned where a GPU copies them.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from unspool.data.mix import Mix
from unspool.data.store import RowSet
from unspool.train.batch import Batch, build_batch
from unspool.train.config import StageConfig

Picks = Sequence[Sequence[tuple[str, int]]]  # by slot of one context: rows set and number of each row


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """All that one optimizer step trains on."""

    picks: Picks
    names: tuple[str, ...]  # rows set of every row, in the order of the batches
    batches: tuple[Batch, ...]  # one per micro-batch

    @property
    def num_valid(self) -> int:
        """Labels of the step that carry loss: what its loss is divided by."""
        return sum(sum(batch.num_valid) for batch in self.batches)


def build_step(stage: StageConfig, rows: dict[str, RowSet], picks: Picks) -> StepBatches:
    slots_per_micro = (stage.micro_batch or stage.context) // stage.context
    micro_picks = [
        [pick for slot in picks[start : start + slots_per_micro] for pick in slot]
        for start in range(0, len(picks), slots_per_micro)
    ]
    return StepBatches(
        picks=picks,
        names=tuple(name for micro in micro_picks for name, _ in micro),
        batches=tuple(
            build_batch([rows[name][index] for name, index in micro], attention=stage.attention)
            for micro in micro_picks
        ),
    )


def step_picks(stage: StageConfig, mix: Mix, step: int) -> Picks:
    """The rows of step 1, 2, …: a function of the seed and the step, so that resuming needs no state."""
    slots = stage.batch // stage.context
    return [mix.slot(index) for index in range((step - 1) * slots, step * slots)]


def load_steps(
    stage: StageConfig, mix: Mix, rows: dict[str, RowSet], *, first: int, pin: bool
) -> Iterator[tuple[int, StepBatches]]:
    """Steps `first` to the stage's last, each built in a thread while the one before is trained."""

    def build(step: int) -> StepBatches:
        built = build_step(stage, rows, step_picks(stage, mix, step))
        return built if not pin else pinned(built)

    with ThreadPoolExecutor(1, "unspool-rows") as pool:
        coming = pool.submit(build, first) if first <= stage.steps else None
        for step in range(first, stage.steps + 1):
            assert coming is not None
            ready = coming.result()
            coming = pool.submit(build, step + 1) if step < stage.steps else None
            yield step, ready


def pinned(step: StepBatches) -> StepBatches:
    return StepBatches(picks=step.picks, names=step.names, batches=tuple(batch.pinned() for batch in step.batches))
