"""Rows of each step as micro-batches, built in a thread while the previous step computes.

The rows of a step depend only on its number, not on the number of ranks. Data ranks get micro-batches of about equal
cost (data/mixture.py), and each builds only its own. Ranks that share a row get their parts of it. The rows of two
steps are in memory, pinned if a GPU copies them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from unspool.core.errors import ConfigError
from unspool.data.mixture import Mix, ModelShape, arrange, row_cost
from unspool.data.packing.row import Row
from unspool.data.packing.store import RowSet
from unspool.models.checks import no_embedding, num_embeddings
from unspool.training.batch import Batch, attended_by, build_batch, split_batch
from unspool.training.config import StageConfig
from unspool.training.losses.base import LossWeights
from unspool.training.parallel.mesh import SINGLE_RANK, RankCoords

Picks = Sequence[Sequence[tuple[str, int]]]  # per slot of one context length: dataset and index of each row


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """The rows of one optimizer step, and this rank's micro-batches."""

    picks: Picks  # rows of all ranks
    doc_lens: tuple[int, ...]  # lengths of spans that attend to themselves, of all ranks
    names: tuple[str, ...]  # dataset of every row of this rank, in the order of the batches
    batches: tuple[Batch, ...]  # one per micro-batch of this rank
    loss_weights: LossWeights | None = None  # None: all labels weigh the same

    @property
    def num_valid(self) -> int:
        """Number of labels in this rank's batches that carry loss."""
        return sum(sum(batch.num_valid) for batch in self.batches)

    def weighed(self, model: Any, mesh: DeviceMesh | None) -> "StepBatches":
        """Add weights that depend on the model; all ranks call this before the step's first backward pass."""
        if self.loss_weights is None:
            return self
        return replace(self, batches=self.loss_weights.of_step(model, self.batches, mesh))


def build_step(
    stage: StageConfig,
    rows: dict[str, RowSet],
    picks: Picks,
    *,
    coords: RankCoords = SINGLE_RANK,
    shape: ModelShape | None = None,
    loss_weights: LossWeights | None = None,
) -> StepBatches:
    """Build this rank's micro-batches of a step. `shape`, for the cost of rows, is required with several data ranks."""
    slots_per_micro = stage.tokens_per_pass // stage.context_length
    micros = [
        [(name, rows[name][index]) for slot in picks[start : start + slots_per_micro] for name, index in slot]
        for start in range(0, len(picks), slots_per_micro)
    ]
    if shape is not None and shape.num_embeddings:
        _check_tokens(stage, micros, shape.num_embeddings)
    attended = [[attended_by(row, stage.attention) for _, row in micro] for micro in micros]
    mine = micros
    if coords.data_ranks > 1:
        assert shape is not None, "rows are assigned to ranks by their cost"
        costs = [sum(row_cost(lens, shape) for lens in of_micro) for of_micro in attended]
        mine = [micros[number] for number in arrange(costs, coords.data_ranks)[coords.data_rank].tolist()]
    return StepBatches(
        picks=picks,
        doc_lens=tuple(length for of_micro in attended for lens in of_micro for length in lens.tolist()),
        names=tuple(name for micro in mine for name, _ in micro),
        batches=tuple(_build_own_batch([row for _, row in micro], stage, coords, loss_weights) for micro in mine),
        loss_weights=loss_weights,
    )


def _check_tokens(stage: StageConfig, micros: Sequence[Sequence[tuple[str, Row]]], size: int) -> None:
    # Every rank checks all rows of a step, so that all ranks raise the same error.
    for name, row in (one for micro in micros for one in micro):
        highest = int(row.tokens.max())
        if highest >= size:
            raise ConfigError(f"stage {stage.name}: dataset {name} contains token {highest}, but {no_embedding(size)}")


def _build_own_batch(
    rows: Sequence[Row], stage: StageConfig, coords: RankCoords, loss_weights: LossWeights | None
) -> Batch:
    weigh = None if loss_weights is None else loss_weights.of_row
    batch = build_batch(rows, attention=stage.attention, weigh=weigh)
    return split_batch(batch, coords.sequence_rank, coords.sequence_ranks, ring=coords.ring)


def step_picks(stage: StageConfig, mix: Mix, step: int) -> Picks:
    """Yield the rows of steps 1, 2, …: a function of seed and step, so that resuming needs no state."""
    slots = stage.batch_tokens // stage.context_length
    return [mix.slot(index) for index in range((step - 1) * slots, step * slots)]


def load_steps(
    stage: StageConfig,
    mix: Mix,
    rows: dict[str, RowSet],
    *,
    first: int,
    pin: bool,
    coords: RankCoords = SINGLE_RANK,
    shape: ModelShape | None = None,
    loss_weights: LossWeights | None = None,
) -> Iterator[tuple[int, StepBatches]]:
    """Yield the batches of steps `first` to the last, each built in a thread while the previous step is trained."""

    def build(step: int) -> StepBatches:
        picks = step_picks(stage, mix, step)
        built = build_step(stage, rows, picks, coords=coords, shape=shape, loss_weights=loss_weights)
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


def model_shape(model: Any) -> ModelShape:
    """Return the shape of a loaded model, for the cost of rows."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        num_layers=config.num_hidden_layers,
        attention_width=config.num_attention_heads * head_dim,
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        num_embeddings=num_embeddings(model),
    )


# The ledger: rows of each step, one line per step


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
    """Return the problems of a stage's ledger, given its number of steps and the sizes of its datasets.

    Every step must be listed once and in order. Each row of a dataset must appear once before any row is repeated.
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
            # A full epoch without a repeated row has no missing row.
            if len(set(of_epoch)) != len(of_epoch) or not set(of_epoch) <= set(range(size)):
                problems.append(f"dataset {name}: a row appears twice in epoch {epoch + 1}, so another is missing")
    return problems
