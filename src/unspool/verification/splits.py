"""Promise 2 over ranks: a step's loss and gradient do not depend on how many ranks share its work, nor how.

In: a `Case`, ranks that answer requests (rank_processes.py). Out: loss and gradient for each layout that so many ranks
allow: weights divided (FSDP), copied, rows shared by exchanging heads (Ulysses), by passing keys on (ring), by both.
Rows of several documents with masked tokens are compared with plain `transformers`, as all of promise 2 is; rows of one
document, which a ring needs, with what one rank makes of them.
Run in a rank: `answer`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from unspool.core.errors import ConfigError
from unspool.core.rng import rng_for
from unspool.models.fuse import keep_tables
from unspool.training.config import StageConfig
from unspool.training.loader import build_step, model_shape
from unspool.training.parallel.apply import parallelize
from unspool.training.parallel.config import ParallelConfig, Work, check_layout, settle_layout
from unspool.training.parallel.dtensor import full_tensor
from unspool.training.parallel.mesh import build_mesh, rank_coords
from unspool.training.step import train_step
from unspool.verification.case import Case, trained
from unspool.verification.families import FAMILIES, Subject
from unspool.verification.ground_truth import ROW, Outcome, apart
from unspool.verification.isolation import worst
from unspool.verification.results import Check, Measured, SkippedError
from unspool.verification.training_rows import NUM_ROWS, Step, build_steps

DOCUMENTS, ONE = "several", "whole"  # the step of promise 2, and the same with a single document in each row


class Answers(Protocol):
    """Ranks that compute a request together."""

    world_size: int

    def answers(self, request: dict[str, Any]) -> dict[str, tuple[float, dict[str, Tensor]]]: ...


@dataclass(frozen=True)
class Way:
    """A layout, and the rows it is tried on."""

    step: str
    replicate: int
    shard: int
    ring: int
    ulysses: int

    @property
    def name(self) -> str:
        axes = {name: getattr(self, name) for name in ("replicate", "shard", "ulysses", "ring")}
        spread = " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
        return f"{spread}{', full rows' if self.step == ONE else ''}"


def rank_check(ranks: Answers) -> Check:
    return Check(
        name="ranks",
        promise=2,
        what="one step on several ranks: FSDP, Ulysses, ring and what fits of them together, against one rank",
        measure=partial(across_ranks, ranks=ranks),
    )


def across_ranks(case: Case, ranks: Answers) -> list[Measured]:
    config = case.model.config
    ways = list(fitting_ways(ranks.world_size, config.num_attention_heads, config.num_key_value_heads, _length(case)))
    request = {
        "name": case.subject.name,
        "ref": case.subject.ref,
        "device": case.device.type,
        "seed": case.seed,
        "length": case.steps["unequal"].row_len,
        "ways": [asdict(way) for way in ways],
    }
    found = ranks.answers(request)
    if not found:
        raise SkippedError(f"no layout of {ranks.world_size} ranks fits its heads and kinds of layers")
    wanted = {DOCUMENTS: case.truths[DOCUMENTS], ONE: trained(case.model, one_document(case.steps[DOCUMENTS]))}
    return [
        replace(measured, quantity=f"{way.name} {measured.quantity}")
        for way in ways
        if way.name in found
        for measured in worst(case, [(DOCUMENTS, apart(_outcome(found[way.name]), wanted[way.step]))])
    ]


def fitting_ways(world_size: int, num_heads: int, num_kv_heads: int, length: int) -> Iterator[Way]:
    """All layouts of so many ranks that a model with these heads allows, on rows with and without document masks."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for step in (DOCUMENTS, ONE):
        for replicate, ring, ulysses in ((a, b, c) for a in sizes for b in sizes for c in sizes):
            try:
                layout = settle_layout(ParallelConfig(replicate=replicate, ring=ring, ulysses=ulysses), world_size)
                check_layout(layout, _work(num_heads, num_kv_heads, length, masks=step == DOCUMENTS))
            except ConfigError:
                continue
            # Copies of what is divided, of what is shared and of neither; copies of more than that say nothing new.
            if replicate == 1 or (ring == 1 and 1 in (layout.shard, ulysses)):
                yield Way(step, **asdict(layout))


def _work(num_heads: int, num_kv_heads: int, length: int, *, masks: bool) -> Work:
    return Work(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        context_length=length,
        batch_tokens=length * NUM_ROWS,
        micro_batch_tokens=length,
        document_masks=masks,
    )


def _length(case: Case) -> int:
    return case.steps[DOCUMENTS].row_len


def one_document(step: Step) -> Step:
    """The same tokens and masks, every row seeing all of itself."""
    return Step(ONE, tuple(replace(row, doc_lens=np.array([len(row.tokens)], dtype=np.int32)) for row in step.rows))


def _outcome(answer: tuple[float, dict[str, Tensor]]) -> Outcome:
    loss, grads = answer
    return Outcome({ROW: loss}, {ROW: grads})


# In every rank


def answer(request: dict[str, Any], *, world_size: int) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Loss and whole gradient by layout; what a layout refuses to compute, such as windows on a ring, is left out."""
    device = torch.device(request["device"])
    family = FAMILIES.get(request["name"])
    subject = Subject(name=request["name"], ref=request["ref"], placed=family.placed if family else None)
    found = {}
    for fields in request["ways"]:
        way = Way(**fields)
        model = subject.ours(device, bf16=False)
        steps = build_steps(request["length"], vocabulary=model.config.vocab_size, seed=request["seed"])
        step = one_document(steps[DOCUMENTS]) if way.step == ONE else steps[DOCUMENTS]
        try:
            found[way.name] = rank_outcome(model, step, way, world_size=world_size)
        except ConfigError:
            continue
    return found


def rank_outcome(model: Any, step: Step, way: Way, *, world_size: int) -> tuple[float, dict[str, Tensor]]:
    """As a stage trains on ranks, with the gradient gathered instead of applied."""
    config = ParallelConfig(replicate=way.replicate, ring=way.ring, ulysses=way.ulysses)
    device_type = next(model.parameters()).device.type
    mesh = build_mesh(config, world_size, device_type)
    shape = model_shape(model)
    if device_type == "cuda":
        keep_tables(model)
    model = parallelize(model, mesh, config).train()
    length = step.row_len
    stage = StageConfig(
        name="verify",
        context_length=length,
        mix={"rows": 1.0},
        tokens=length * NUM_ROWS,
        batch_tokens=length * NUM_ROWS,
        lr=1.0,
    )
    rows: Any = {"rows": step.rows}
    picks = [[("rows", index)] for index in range(NUM_ROWS)]
    work = build_step(stage, rows, picks, coords=rank_coords(mesh), shape=shape)
    gather = _Gather(model)
    loss = train_step(model, gather, work, lr=stage.lr, mesh=mesh).loss
    return loss, gather.grads


class _Gather:
    """Stands where the updater stands; all ranks take part in gathering."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.grads: dict[str, Tensor] = {}

    def begin(self, lr: float) -> None:
        self._model.zero_grad(set_to_none=True)

    def finish(self, *, is_good: bool, max_norm: float) -> float:
        for name, weight in self._model.named_parameters():
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self.grads[name] = full_tensor(grad).float().cpu()
        return 0.0


# Promise 2: loss and gradient of an optimizer step do not depend on how it is split, nor on the order of its rows.


def split(case: Case) -> list[Measured]:
    """Eight rows in micro-batches of one, four and eight; some rows ask for a tenth of their tokens only."""
    return _against_truth(case, [(count, range(NUM_ROWS)) for count in (1, 4, 8)])


def shuffled(case: Case) -> list[Measured]:
    """The same rows from the last to the first, and in an order drawn by the seed."""
    drawn = rng_for(case.seed, "verify", "order").permutation(NUM_ROWS).tolist()
    return _against_truth(case, [(1, range(NUM_ROWS)[::-1]), (2, drawn)])


def _against_truth(case: Case, ways: list[tuple[int, Sequence[int]]]) -> list[Measured]:
    """`ways`: rows in a micro-batch, and the order of all rows."""
    step, truth = case.steps["several"], case.truths["several"]
    found = [apart(trained(case.model, step, rows_at_once=count, order=order), truth) for count, order in ways]
    return worst(case, [("several", far) for far in found])
