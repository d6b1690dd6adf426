"""What several ranks compute in the tests, and what one rank makes of the same: losses, gradients, updated weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from factory import build_model, random_row
from unspool.data.packing.row import Row
from unspool.models.memory.policy import MemoryPolicy
from unspool.models.rotary import apply_head_bases
from unspool.training.batch import Batch, build_batch, split_batch
from unspool.training.parallel.apply import parallelize
from unspool.training.parallel.config import ParallelConfig
from unspool.training.parallel.dtensor import full_tensor
from unspool.training.parallel.mesh import build_mesh, rank_coords, sum_over_ranks
from unspool.training.step import batch_loss

STEPS = 2
# Documents of any lengths: none of them, and not their sum, divides by 2; they cross every border between ranks.
PACKED = ((3, 17, 1, 20), (29, 5, 7))
MORE = (*PACKED, (41,), (11, 11, 18, 1))
FULL = ((41,), (41,))
BASES = (1e4, 1e3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run; `world` ranks with `parallel` must do what one rank does."""

    world: int
    parallel: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    changes: dict[str, Any] = field(default_factory=dict)
    docs: Sequence[Sequence[int]] = PACKED
    mask: float | None = None
    bases: Sequence[float] | None = None
    memory: MemoryPolicy = MemoryPolicy()  # noqa: RUF009 (frozen)
    frozen: str | None = None  # part of the names of parameters that are not trained
    rows_per_batch: int = 1


@dataclass(frozen=True)
class Outcome:
    losses: list[float]  # by step
    norms: list[float]
    grads: dict[str, torch.Tensor]  # of the first step
    weights: dict[str, torch.Tensor]  # after both steps; none after the first alone


Count = Callable[[int, Any], float]


def global_count(valid: int, mesh: Any) -> float:
    return sum_over_ranks([valid], mesh)[0]


def one_rank(case: Case, *, steps: int = STEPS) -> Outcome:
    return _train(_build(case), _batches(case), steps=steps, count=float, total=float)


@cache
def mesh_of(config: ParallelConfig) -> DeviceMesh:
    """Ranks meet once for each layout."""
    return build_mesh(config, dist.get_world_size(), "cpu")


def this_rank(
    case: Case,
    *,
    split: Callable[..., Batch] = split_batch,
    count: Count = global_count,
    change: Callable[[Any], None] | None = None,
    steps: int = STEPS,
) -> Outcome:
    """`split`, `count` and `change` (of the finished model) are what broken variants do otherwise."""
    config = ParallelConfig.model_validate(case.parallel)
    mesh = mesh_of(config)
    coords = rank_coords(mesh)
    model = parallelize(_build(case), mesh, config, memory=case.memory)
    if change is not None:
        change(model)
    batches = _batches(case)
    mine = [
        split(batch, coords.sequence_rank, coords.sequence_ranks, ring=coords.ring)
        for batch in batches[coords.data_rank :: coords.data_ranks]
    ]
    return _train(
        model,
        mine,
        steps=steps,
        count=lambda valid: count(valid, mesh),
        total=lambda loss: sum_over_ranks([loss], mesh)[0],
    )


def _train(
    model: Any, batches: Sequence[Batch], *, steps: int, count: Callable[[int], float], total: Callable[[float], float]
) -> Outcome:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # An eps above rounding: where a gradient is next to 0, Adam would otherwise make much of its sign.
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3, fused=True)
    losses, norms, grads = [], [], {}
    for step in range(steps):
        num_valid = count(sum(sum(batch.num_valid) for batch in batches))
        sums = 0.0
        for batch in batches:
            loss, _ = batch_loss(model, batch)
            (loss / num_valid).backward()
            sums += float(loss.detach())
        losses.append(total(sums) / num_valid)
        if step == 0:
            grads = {
                name: full_tensor(parameter.grad).clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        norms.append(float(full_tensor(torch.nn.utils.clip_grad_norm_(trained, 1.0))))
        if steps < STEPS:  # no weights are asked for
            return Outcome(losses, norms, grads, {})
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    weights = {name: full_tensor(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    return Outcome(losses, norms, grads, weights)


def _build(case: Case) -> Any:
    model = build_model(case.family, **case.changes)
    if case.bases is not None:
        apply_head_bases(model, case.bases)
    for name, parameter in model.named_parameters():
        if case.frozen and case.frozen in name:
            parameter.requires_grad_(False)
    return model.train()


def _rows(case: Case) -> list[Row]:
    return [random_row(lens, seed, mask=case.mask) for seed, lens in enumerate(case.docs)]


def _batches(case: Case) -> list[Batch]:
    rows = _rows(case)
    some = [rows[start : start + case.rows_per_batch] for start in range(0, len(rows), case.rows_per_batch)]
    return [build_batch(each, attention="intra_document") for each in some]


# The largest error of any number, by the largest number of its kind: fp32 sums in another order.
LOSS, GRADIENT, WEIGHT = 1e-6, 1e-5, 1e-5


def errors(found: Outcome, wanted: Outcome) -> dict[str, float]:
    """How far off losses, norms, gradients and weights are, in units of what is allowed; the worst of each."""
    assert found.grads.keys() == wanted.grads.keys()
    assert found.weights.keys() == wanted.weights.keys()

    def worst(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
        return max(
            (float((left[name] - right[name]).abs().max() / right[name].abs().max()) for name in right), default=0
        )

    losses = zip(found.losses, wanted.losses, strict=True)
    norms = zip(found.norms, wanted.norms, strict=True)
    return {
        "losses": max(abs(left / right - 1) for left, right in losses) / LOSS,
        "norms": max(abs(left / right - 1) for left, right in norms) / GRADIENT,
        "gradients": worst(found.grads, wanted.grads) / GRADIENT,
        "weights": worst(found.weights, wanted.weights) / WEIGHT,
    }


def same_bits(left: Outcome, right: Outcome) -> bool:
    """In all that both have: the first of them may have trained for longer."""
    steps = min(len(left.losses), len(right.losses))
    return (
        left.losses[:steps] == right.losses[:steps]
        and left.norms[:steps] == right.norms[:steps]
        and all(torch.equal(left.grads[name], right.grads[name]) for name in left.grads)
    )
