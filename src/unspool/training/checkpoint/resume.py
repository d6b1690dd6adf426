"""Resume from the newest complete checkpoint, and pass state to the next stage.

A resumed run has the weights, optimizer state, random generators and guard state of the checkpoint's step. Its logs end
with that step.
"""

import base64
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unspool.core.artifacts import write_atomic
from unspool.core.rng import rng_for
from unspool.models.tensor_files import TensorFile, write_tensor_files
from unspool.training.checkpoint.save import Checkpoint, checkpoints, newest_checkpoint
from unspool.training.optim.updater import Updater
from unspool.training.parallel.dtensor import full_tensor, local_rows, local_shard
from unspool.training.parallel.mesh import DistContext
from unspool.training.schedule import SpikeGuard

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
OPTIMIZER = "optimizer.safetensors"


def seed_all(seed: int, purpose: str) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    first, second, third = rng_for(seed, "generators", purpose).integers(2**32, size=3).tolist()
    random.seed(first)
    np.random.seed(second)
    torch.manual_seed(third)


def read_random_state() -> dict[str, Any]:
    """Return the state of every global random generator as JSON-compatible values."""
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
    # The machine may have fewer GPUs than before.
    if torch.cuda.is_available():
        for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(text), device)


def _has_used_cuda() -> bool:
    # Reading the state of an unused GPU would initialize it.
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def resume(
    work: Path,
    updater: Updater,
    guard: SpikeGuard,
    *,
    logs: Sequence[str],
    seed: int,
    stage: str,
    dist_context: DistContext | None = None,
) -> int:
    """Load the newest checkpoint and return its step; 0 without one. `logs` are file names in `work`.

    The number of ranks may differ from that of the saved run. The leader chooses the checkpoint and restores the logs.
    """
    found = _newest(work / CHECKPOINTS, dist_context)
    own_logs = logs if dist_context is None or dist_context.is_leader else ()
    if found is None:
        if own_logs and checkpoints(work / CHECKPOINTS):
            logger.warning(f"stage {stage}: every checkpoint is damaged; the stage starts over from step 1")
        seed_all(seed, stage)
        for name in own_logs:
            (work / name).unlink(missing_ok=True)
        return 0
    # Read directly into the shards, so that no rank needs more memory.
    updater.load_state_tensors(found.tensors(updater.state_tensors() if updater.is_sharded else None))
    set_random_state(found.facts["random"])
    guard.restore(found.facts["guard"])
    for name in own_logs:
        if (found.folder / name).is_file():
            write_atomic(work / name, (found.folder / name).read_text(encoding="utf-8"))
        elif "logs" in found.facts:  # checkpoints of older versions do not contain all logs
            (work / name).unlink(missing_ok=True)
    return found.step


def _newest(folder: Path, dist_context: DistContext | None) -> Checkpoint | None:
    if dist_context is None:
        return newest_checkpoint(folder)

    def choose() -> list[Any] | None:
        found = newest_checkpoint(folder)
        return None if found is None else [found.folder.name, found.facts]

    chosen = dist_context.from_leader(choose)
    return None if chosen is None else Checkpoint(folder / chosen[0], chosen[1])


def resume_facts(step: int, guard: SpikeGuard) -> dict[str, Any]:
    """Return the facts that `resume` needs besides tensors and files."""
    return {"step": step, "random": read_random_state(), "guard": guard.state}


# Stage state: the files that a finished stage leaves for the next stage


def save_stage_state(path: Path | None, updater: Updater, *, exported: torch.dtype) -> None:
    """Write the optimizer state, and the weights that an export in `exported` precision rounds.

    All ranks must call this; only the leader passes a `path`.
    """
    kept: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor, full: Tensor) -> None:
        if path is not None:
            # The gathered tensors of all ranks would fill this rank's device.
            kept[name] = full if full is tensor else full.cpu()

    for name, weight in updater.named_masters():
        weight = weight.detach()
        full = full_tensor(weight)
        if not torch.equal(full.to(exported).to(full.dtype), full):
            keep(f"{name}/weight", weight, full)
    for name, tensor in updater.optimizer_tensors().items():
        keep(name, tensor, full_tensor(tensor))
    if path is not None:
        write_tensor_files([TensorFile(path, kept)])


@torch.no_grad()
def load_stage_weights(model: Any, saved: Mapping[str, Tensor]) -> None:
    """Restore unrounded weights, before the updater is built. Embedding rows added since then do not change."""
    for name, parameter in model.named_parameters():
        weight = saved.get(f"{name}/weight")
        if weight is not None:
            shard, own = local_shard(parameter), weight[local_rows(parameter)]
            shard[: own.shape[0]] = own.to(shard.device, shard.dtype)
