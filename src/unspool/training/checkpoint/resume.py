"""Going on from the newest checkpoint that is whole, or from the beginning.

Promise: everything that the steps to come depend on is as it was after the checkpoint's step: weights, moments,
random generators, what the guard remembers. Files that grow by a line per step end with that step.
"""

import base64
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from unspool.core.artifacts import write_atomic
from unspool.core.rng import rng_for
from unspool.training.checkpoint.save import Checkpoint, newest_checkpoint
from unspool.training.optim.base import Updater
from unspool.training.parallel.dtensor import own_part
from unspool.training.parallel.fsdp import whole
from unspool.training.parallel.mesh import Team
from unspool.training.parallel.sharded_load import own_rows
from unspool.training.spike_guard import Guard

# The state of every global random generator, as JSON can hold it.


def seed_all(seed: int, purpose: str) -> None:
    """The same start for every generator, whatever ran before in this process."""
    first, second, third = rng_for(seed, "generators", purpose).integers(2**32, size=3).tolist()
    random.seed(first)
    np.random.seed(second)
    torch.manual_seed(third)


def read_random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    assert isinstance(of_numpy, dict)
    return {
        "python": [version, list(words), gauss],
        "numpy": of_numpy | {"state": of_numpy["state"] | {"key": of_numpy["state"]["key"].tolist()}},
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()] if _has_used_cuda() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_tensor(state["torch"]))
    # Another number of GPUs: those that are there get theirs.
    if torch.cuda.is_available():
        for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(text), device)


def _has_used_cuda() -> bool:
    # Asking for its state would start a device that this run does not use.
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


CHECKPOINTS = "checkpoints"


def resume(
    work: Path,
    updater: Updater,
    guard: Guard,
    *,
    growing: Sequence[str],
    seed: int,
    stage: str,
    team: Team | None = None,
) -> int:
    """The steps that are done; 0 where there is nothing to go on from. `growing` are names of files in `work`.

    Several ranks go on together from what any number of them has written; the leader chooses, and minds the files.
    """
    found = _newest(work / CHECKPOINTS, team)
    minds_files = team is None or team.is_leader
    if found is None:
        seed_all(seed, stage)
        for name in growing if minds_files else ():
            (work / name).unlink(missing_ok=True)
        return 0
    if updater.is_divided:
        # Straight into the parts, so that no rank holds more than they take.
        state = updater.state_tensors()
        found.read_into(state)
        updater.load_state_tensors(state)
    else:
        updater.load_state_tensors(found.tensors())
    set_random_state(found.facts["random"])
    guard.restore(found.facts["guard"])
    for name in growing if minds_files else ():
        if (found.folder / name).is_file():
            write_atomic(work / name, (found.folder / name).read_text(encoding="utf-8"))
    return found.step


def _newest(folder: Path, team: Team | None) -> Checkpoint | None:
    if team is None:
        return newest_checkpoint(folder)

    def choose() -> list[Any] | None:
        found = newest_checkpoint(folder)
        return None if found is None else [found.folder.name, found.facts]

    chosen = team.from_leader(choose)
    return None if chosen is None else Checkpoint(folder / chosen[0], chosen[1])


def resumable(step: int, guard: Guard) -> dict[str, Any]:
    """The facts of a checkpoint: what `resume` needs besides tensors and files."""
    return {"step": step, "random": read_random_state(), "guard": guard.state}


# What a finished stage leaves for one that goes on from it: moments, and weights that its export has rounded.


OPTIMIZER = "optimizer.safetensors"


def save_handover(path: Path | None, updater: Updater, *, exported: torch.dtype) -> None:
    """Without a `path`, for a rank that only gives its parts of what another one writes."""
    kept: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        if path is not None:
            kept[name] = tensor.detach().cpu().contiguous()

    for name, weight in updater.named_masters():
        value = whole(weight.detach())
        if not torch.equal(value.to(exported).to(value.dtype), value):
            keep(f"{name}/weight", value)
    for name, moment in updater.moment_tensors().items():
        keep(name, whole(moment))
    if path is not None:
        save_file(kept, path)


@torch.no_grad()
def load_trained_weights(model: Any, saved: Mapping[str, Tensor]) -> None:
    """Before an updater takes the weights over; rows added to an embedding since then stay as they are."""
    for name, parameter in model.named_parameters():
        weight = saved.get(f"{name}/weight")
        if weight is not None:
            part, own = own_part(parameter), weight[own_rows(parameter)]
            part[: own.shape[0]] = own.to(part.device, part.dtype)
