"""Steps of training as a stage takes them (rows, train_step, updater), on several ranks and on one."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from factory import RowList, build_model, build_stage, random_row
from unspool.core.errors import ConfigError
from unspool.training import loader as loader_module
from unspool.training import step as step_module
from unspool.training.batch import Batch, split_batch
from unspool.training.loader import build_step, model_shape
from unspool.training.optim import adamw as adamw_module
from unspool.training.optim import updater as optimizer_module
from unspool.training.optim.updater import build_updater
from unspool.training.parallel.apply import parallelize
from unspool.training.parallel.config import ParallelConfig
from unspool.training.parallel.dtensor import full_tensor
from unspool.training.parallel.mesh import SINGLE_RANK, rank_coords
from unspool.training.step import train_step

from .cases import mesh_of

STEPS = 2
# Rows differ much in cost and in how many labels count, so that a mean of ranks' means would be another number.
PACKED: dict[str, Any] = {
    "long": RowList(
        [random_row((20, 12), seed, mask=0.9 if seed % 2 else 0.0) for seed in range(4)]
        + [random_row((5, 5, 7, 15), 4, mask=0.5), random_row((32,), 5)]
    ),
    "short": RowList(random_row((16,), seed, mask=0.2) for seed in range(10, 14)),
}
FULL: dict[str, Any] = {"long": RowList(random_row((20, 12), seed, mask=0.6, attention="full") for seed in range(8))}
EXACT = {"weights": "exact", "threshold": 4, "extra": 0.7}
# Documents below 8 tokens have no windows, so ranks have unequal numbers of them.
LONGCE = {"weights": "longce", "short_context": 5, "stride": 3, "max_weight": 3.0}
SLOTS = {
    "packed": [*([("long", index)] for index in range(6)), *([("short", 2 * n), ("short", 2 * n + 1)] for n in (0, 1))],
    "full": [[("long", index)] for index in range(8)],
}


@dataclass(frozen=True)
class Steps:
    world: int
    parallel: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    rows: str = "packed"
    micro_batch_tokens: int = 32
    vocab: int = 300
    hidden: int = 32
    optimizer: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)


STEP_CASES = {
    "fsdp 2": Steps(2),
    "fsdp 2, uneven, tied": Steps(2, family="llama-tied", vocab=301, micro_batch_tokens=64),
    # Sizes that are whole blocks, so that moments are quantized.
    "fsdp 2, 8-bit states": Steps(2, vocab=512, hidden=64, optimizer={"states": "8bit"}),
    "fsdp 2, host memory": Steps(2, {"offload": True}),
    "replicate 2": Steps(2, {"replicate": 2}),
    "fsdp 2, exact": Steps(2, loss=EXACT),
    "ulysses 2, exact": Steps(2, {"ulysses": 2}, micro_batch_tokens=64, loss=EXACT),
    "ring 2, exact": Steps(2, {"ring": 2}, rows="full", loss=EXACT),
    "ulysses 2": Steps(2, {"ulysses": 2}, micro_batch_tokens=64),
    "ring 2": Steps(2, {"ring": 2}, rows="full"),
    "fsdp 2, longce": Steps(2, loss=LONGCE),
    "replicate 2, longce": Steps(2, {"replicate": 2}, loss=LONGCE, micro_batch_tokens=64),
    "fsdp 4, longce": Steps(4, loss=LONGCE),
    "fsdp 4": Steps(4),
    "ulysses 4": Steps(4, {"ulysses": 4}, family="llama-mha"),
    "ulysses 2, shard 2": Steps(4, {"ulysses": 2}),
    "replicate 2, shard 2": Steps(4, {"replicate": 2}),
}


@dataclass(frozen=True)
class Taken:
    losses: list[float]  # by step
    by_set: list[dict[str, float]]
    norms: list[float]
    gradients: dict[str, torch.Tensor]  # of the first step, as the first moment keeps them
    weights: dict[str, torch.Tensor]  # after both steps; none after the first alone


def take_steps(case: Steps, *, alone: bool, steps: int = STEPS) -> Taken:
    stage = build_stage(
        batch_tokens=256,
        tokens=256 * STEPS,
        micro_batch_tokens=case.micro_batch_tokens,
        mix={"long": 1.0},
        parallel=case.parallel,
        optimizer=case.optimizer,
        loss=case.loss,
    )
    model = build_model(case.family, vocab_size=case.vocab, hidden_size=case.hidden).train()
    mesh, coords = None, SINGLE_RANK
    shape = model_shape(model)
    if not alone:
        mesh = mesh_of(stage.parallel)
        coords = rank_coords(mesh)
        model = parallelize(model, mesh, stage.parallel)
    updater = build_updater(stage, model)
    rows = PACKED if case.rows == "packed" else FULL
    loss_weights = stage.loss.build(stage, stage.loss.measure(stage, rows))
    results, gradients = [], {}
    # Above rounding: where a gradient is next to 0, Adam would otherwise make much of its sign.
    with _patched(adamw_module, "EPS", 1e-4):
        for step in range(steps):
            work = build_step(stage, rows, SLOTS[case.rows], coords=coords, shape=shape, loss_weights=loss_weights)
            results.append(train_step(model, updater, work, lr=stage.lr, mesh=mesh))
            if step == 0:
                moments = updater.optimizer_tensors().items()
                gradients = {name: full_tensor(value).clone() for name, value in moments if name.endswith("/exp_avg")}
    return Taken(
        losses=[result.loss for result in results],
        by_set=[result.losses for result in results],
        norms=[result.grad_norm for result in results],
        gradients=gradients,
        weights={} if steps < STEPS else {name: full_tensor(one).clone() for name, one in updater.named_masters()},
    )


def off_by(found: Taken, wanted: Taken) -> dict[str, float]:
    """The largest differences: of losses and norms by their size, of gradients by the largest of a parameter, of
    weights by the learning rate, which is the size of an update."""
    assert found.weights.keys() == wanted.weights.keys()
    pairs = [
        (left[name], right[name]) for left, right in zip(found.by_set, wanted.by_set, strict=True) for name in right
    ]
    return {
        "loss": max(abs(left / right - 1) for left, right in zip(found.losses, wanted.losses, strict=True)),
        "loss of a set": max(abs(left / right - 1) for left, right in pairs),
        "norm": max(abs(left / right - 1) for left, right in zip(found.norms, wanted.norms, strict=True)),
        "gradient": max(
            float((found.gradients[name] - grad).abs().max() / grad.abs().max())
            for name, grad in wanted.gradients.items()
        ),
        "weight": max(
            (float((found.weights[name] - weight).abs().max()) / 1e-3 for name, weight in wanted.weights.items()),
            default=0.0,
        ),
    }


def same_bits(left: Taken, right: Taken) -> bool:
    """In the first step."""
    return (left.losses[0], left.by_set[0], left.norms[0]) == (
        right.losses[0],
        right.by_set[0],
        right.norms[0],
    ) and all(torch.equal(left.gradients[name], gradient) for name, gradient in right.gradients.items())


# Broken on purpose: what is left out, and what shows it


def _patched(module: Any, name: str, value: Any) -> AbstractContextManager[Any]:
    patch = pytest.MonkeyPatch()

    class Patch:
        def __enter__(self) -> None:
            patch.setattr(module, name, value)

        def __exit__(self, *error: object) -> None:
            patch.undo()

    return Patch()


def _same_rows(costs: list[float], num_ranks: int) -> torch.Tensor:
    return torch.arange(len(costs)).view(num_ranks, -1)[[0] * num_ranks]


def _first_part(batch: Batch, rank: int, degree: int, *, ring: int) -> Batch:
    return split_batch(batch, 0, degree, ring=ring)


BROKEN_STEPS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]], str]] = {
    "every rank divides by its own count": (
        "fsdp 2",
        lambda: _patched(step_module, "_sum_over_ranks", lambda values, mesh: values),
        "gradient",
    ),
    "every rank divides by its own sum of weights": (
        "fsdp 2, exact",
        lambda: _patched(step_module, "_sum_over_ranks", lambda values, mesh: values),
        "gradient",
    ),
    "the norm is that of one rank's parts": (
        "fsdp 4",
        lambda: _patched(optimizer_module.Updater, "_norm_over_shards", lambda self, norm: norm),
        "norm",
    ),
    "all ranks train on the same rows": (
        "fsdp 2",
        lambda: _patched(
            loader_module, "arrange", lambda costs, ranks: torch.arange(len(costs)).view(ranks, -1)[[0, 0]]
        ),
        "loss",
    ),
    "ranks that share a row compute the same part of it": (
        "ulysses 2",
        lambda: _patched(loader_module, "split_batch", _first_part),
        "gradient",
    ),
}


def run_broken(name: str) -> Taken:
    case, breaking, _ = BROKEN_STEPS[name]
    with breaking():
        return take_steps(STEP_CASES[case], alone=False, steps=1)


def refusals() -> dict[str, str]:
    """What `build_updater` says to a divided model."""
    found = {}
    for key, value in {"weights": "bf16", "step": "in-backward"}.items():
        config = ParallelConfig()
        model = parallelize(build_model(), mesh_of(config), config)
        try:
            build_updater(build_stage(optimizer={key: value}, batch_tokens=32), model)
        except ConfigError as error:
            found[key] = str(error)
    return found


def step_jobs(world: int) -> dict[str, Callable[[], Any]]:
    def twice(case: Steps) -> Any:
        first = take_steps(case, alone=False)
        return first, same_bits(first, take_steps(case, alone=False, steps=1))

    found: dict[str, Callable[[], Any]] = {
        f"steps: {name}": partial(twice, case) for name, case in STEP_CASES.items() if case.world == world
    }
    found |= {
        f"steps: {name}": partial(run_broken, name)
        for name, (case, _, _) in BROKEN_STEPS.items()
        if STEP_CASES[case].world == world
    }
    found["refusals"] = refusals
    return found
