"""Predicted memory of one rank of many against the tensors that it holds, with torch's fake process group on a CPU."""

import gc
import importlib
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from factory import build_model, build_stage, random_row
from unspool.models.memory.policy import MemoryPolicy
from unspool.planning import footprint as planned
from unspool.planning.cost import HALF
from unspool.planning.footprint import StepSetup, footprint
from unspool.training.loader import build_step, model_shape
from unspool.training.optim.config import AdamWConfig
from unspool.training.optim.updater import build_updater
from unspool.training.parallel import fsdp
from unspool.training.parallel.apply import parallelize
from unspool.training.parallel.config import ParallelConfig, settle_layout
from unspool.training.parallel.mesh import build_mesh, rank_coords
from unspool.training.step import train_step

from .tracked import SMALL, TOKENS_AT_ONCE, shape_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOKENS = 1024
KEEP = MemoryPolicy(activation_checkpointing="keep-attention")
GOAL = 0.10


class Held(TorchDispatchMode):
    """Bytes of all known tensors as they are now: FSDP resizes the memory of gathered weights."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Any] = {}
        self.peak = 0
        for one in gc.get_objects():
            if type(one) in (Tensor, torch.nn.Parameter):
                self._add(one)

    def _add(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu":
            memory = tensor.untyped_storage()
            self.known.setdefault(memory._cdata, weakref.ref(memory))

    def _held(self) -> int:
        alive = {key: memory for key, ref in self.known.items() if (memory := ref()) is not None}
        self.known = {key: self.known[key] for key in alive}
        return sum(memory.nbytes() for memory in alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for leaf in tree_leaves(out):
            if type(leaf) is Tensor:
                self._add(leaf)
        self.peak = max(self.peak, self._held())
        return out


def in_bf16(**options: Any) -> Any:
    """The precision of a GPU."""
    return torch.distributed.fsdp.MixedPrecisionPolicy(**options | {"param_dtype": torch.bfloat16})


def held_bytes(world: int, policy: MemoryPolicy, parallel: dict[str, int]) -> tuple[int, Any]:
    """Peak bytes of the tensors of rank 0 in its second step, and the model's shape."""
    config = ParallelConfig(**parallel)
    mesh = build_mesh(config, world, "cpu")
    coords = rank_coords(mesh)
    model = build_model(**SMALL).train()
    shape = shape_of(model)
    parallelize(model, mesh, config, memory=policy)
    tokens = TOKENS * coords.data_ranks
    settings = {"context_length": TOKENS, "batch_tokens": tokens, "tokens": tokens, **vars(policy)}
    stage = build_stage(optimizer={"states": "8bit"}, **settings)
    updater = build_updater(stage, model)
    rows: Any = {"rows": [random_row((TOKENS,), 0)]}
    picks = [[("rows", 0)]] * coords.data_ranks
    batches = build_step(stage, rows, picks, coords=coords, shape=model_shape(model))
    train_step(model, updater, batches, lr=1e-3, mesh=mesh)  # the first makes what stays
    gc.collect()
    before = Held()._held() - sum(memory_of(model, updater))
    with Held() as held:
        train_step(model, updater, batches, lr=1e-3, mesh=mesh)
    return held.peak - before, shape


def memory_of(model: Any, updater: Any) -> list[int]:
    """Bytes of what this model holds between steps; other tests may hold tensors too."""
    found = {id(memory): memory.nbytes() for memory in (one.untyped_storage() for one in _between(model, updater))}
    return list(found.values())


def _between(model: Any, updater: Any) -> list[Tensor]:
    held = list(model.buffers())
    for param in updater._params:
        held.append(param.weight)
        for moment in (param.state.first, param.state.second):
            held += [moment] if isinstance(moment, Tensor) else [moment.codes, moment.scales]
    return held


@pytest.mark.parametrize(
    ("world", "policy", "parallel"),
    [
        (8, KEEP, {}),
        (8, MemoryPolicy(), {"ulysses": 4}),
        (8, KEEP, {"ring": 4}),
        (64, KEEP, {"ulysses": 8}),
    ],
    ids=str,
)
def test_a_simulated_rank_holds_what_is_planned(
    world: int, policy: MemoryPolicy, parallel: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    # A CPU's kernels take other room than a GPU's.
    monkeypatch.setattr(planned, "WORKSPACE", 0)
    monkeypatch.setattr(fsdp, "MixedPrecisionPolicy", in_bf16)
    small = (
        patch("unspool.models.loss.CPU_CHUNK", TOKENS_AT_ONCE),
        patch("unspool.training.parallel.ring.MAX_SCORES", 8192),
    )
    update = patch("unspool.training.optim.adamw.update_by_operators", lambda *_: None)
    with importlib.import_module("collectives").simulated_ranks(world), small[0], small[1], update:
        found, shape = held_bytes(world, policy, parallel)
    layout = settle_layout(ParallelConfig(**parallel), world)
    monkeypatch.setattr(planned, "LOGITS_BYTES", HALF * shape.vocabulary * TOKENS_AT_ONCE)
    setup = StepSetup(
        tokens=TOKENS // layout.sequence_ranks,
        policy=policy,
        optimizer=AdamWConfig(states="8bit"),
        compiled=False,
        layout=layout,
    )
    wanted = footprint(shape, setup)
    assert wanted.device == pytest.approx(found, rel=GOAL), wanted


def test_no_gradients_are_reduced_before_the_backward_pass() -> None:
    shape = shape_of(build_model(**SMALL))
    layout = settle_layout(ParallelConfig(), 8)
    by_moment = {one.moment: one.weights for one in planned.moments(shape, StepSetup(tokens=TOKENS, layout=layout))}
    last = by_moment["the backward pass of layer 4 of 4"]
    assert by_moment["the loss"] == last
    assert by_moment["the backward pass of layer 3 of 4"] == last + 4 * shape.layer_params
