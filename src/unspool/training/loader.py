"""The rows of each step as micro-batches, prepared while the step before is being computed.

In: a mix, its rows, the steps to come. Out: `StepBatches`, in order.
Promise: which rows a step holds is a function of its number alone, whatever the number of ranks; the device never waits
for a file. Ranks with rows of their own get micro-batches that cost alike (data/balance.py), and each builds only its
own; ranks that share a row get their parts of it (split.py).
Price: two steps of rows in memory (some bytes a token), pinned where a GPU copies them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unspool.data.mixture import Mix, ModelShape, arrange, row_cost
from unspool.data.packing.row import Row
from unspool.data.packing.store import RowSet
from unspool.training.batch import Batch, attended_by, build_batch
from unspool.training.config import StageConfig
from unspool.training.parallel.mesh import ALONE, Place
from unspool.training.parallel.split import split_batch

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
    slots_per_micro = (stage.micro_batch_tokens or stage.context_length) // stage.context_length
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
    slots = stage.batch_tokens // stage.context_length
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


# Which rows each step was trained on: one line of `ledger.jsonl` per step.


LEDGER = "ledger.jsonl"


def ledger_line(step: int, picks: Picks, *, skipped: str | None = None) -> str:
    rows: dict[str, list[int]] = {}
    for slot in picks:
        for name, index in slot:
            rows.setdefault(name, []).append(index)
    entry: dict[str, Any] = {"step": step, "rows": rows}
    return json.dumps(entry | ({"skipped": skipped} if skipped else {}), separators=(",", ":")) + "\n"


def read_ledger(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def find_gaps(entries: Iterable[Mapping[str, Any]], sizes: Mapping[str, int], *, steps: int) -> list[str]:
    """What is wrong with the ledger of a stage of `steps` steps over rows sets of these sizes; nothing if all is well.

    Every step once and in order; in every set, each row once before any of them returns.
    """
    entries = list(entries)
    numbers = [entry["step"] for entry in entries]
    problems = []
    if numbers != list(range(1, steps + 1)):
        wrong = next((at for at, number in enumerate(numbers, 1) if number != at), len(numbers) + 1)
        problems.append(f"steps are not 1 to {steps}, each once and in order: line {wrong}")
    for name, size in sizes.items():
        drawn = [index for entry in entries for index in entry["rows"].get(name, [])]
        for epoch, begin in enumerate(range(0, len(drawn), size)):
            of_epoch = drawn[begin : begin + size]
            # A whole epoch without a repeat has no gap either: there are as many rows as places.
            if len(set(of_epoch)) != len(of_epoch) or not set(of_epoch) <= set(range(size)):
                problems.append(f"rows {name}: a row comes twice in epoch {epoch + 1}, so another is missing")
    return problems
