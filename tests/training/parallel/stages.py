"""Whole small stages on several ranks: cut off, taken up by other numbers of them, looked at while they train."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed import PrefixStore

from factory import CPU, build_stage, random_row, save_folder, save_rows
from unspool.training import loop as loop_module
from unspool.training import stage as stage_module
from unspool.training.checkpoint import save as checkpoint_module
from unspool.training.checkpoint.resume import OPTIMIZER
from unspool.training.checkpoint.save import write_checkpoint
from unspool.training.loader import LEDGER, find_gaps, read_ledger
from unspool.training.parallel.ranks import Ranks
from unspool.training.stage import StageInputs, run_stage

from ..stage_runs import WritingAtOnce

SIZES = {"long": 9, "short": 8}
SETTINGS: dict[str, Any] = {
    "mix": {"long": 0.6, "short": 0.4},
    "tokens": 6 * 128,
    "batch_tokens": 128,
    "checkpoint_every": 2,
    "rope": {"method": "abf", "base": 5e5},
    "validation": {"dataset": "held", "samples": 2, "every": 3},
}
ULYSSES, SHARD = {"ulysses": 2}, {}
# Looked at before anything else has been computed.
SAMPLES: dict[str, Any] = {
    "samples": {"prompts": ["the river", "old mill"], "tokens": 4, "every": 2},
    "validation": None,
    "tokens": 2 * 128,
}
NEXT: dict[str, Any] = {"tokens": 2 * 128, "validation": None, "lr": 1e-4}
CUT_AT = 4  # the step that is not reached: the last checkpoint is that of step 2


def make_materials(folder: Path) -> StageInputs:
    rows = {
        "long": [random_row((20, 12), seed, mask=0.5) for seed in range(SIZES["long"])],
        "short": [random_row((16,), seed) for seed in range(10, 10 + SIZES["short"])],
        "held": [random_row((32,), seed) for seed in range(30, 34)],
    }
    saved = {name: save_rows(folder / "rows" / name, made) for name, made in rows.items()}
    held = saved.pop("held")
    return StageInputs(model=str(save_folder(folder / "model")), datasets=saved, validation=held)


def train(materials: StageInputs, out: Path, parallel: dict[str, Any], *, whole: bool = False, **changes: Any) -> None:
    """On however many ranks this process is one of; `whole`: loaded whole, as one rank does."""
    stage = build_stage(**SETTINGS | changes, parallel=parallel)
    patch = pytest.MonkeyPatch()
    if whole:
        patch.setattr(stage_module, "load_sharded", lambda *args, **kwargs: None)
    elif dist.is_initialized():
        patch.setattr(stage_module, "load_model", None)
    try:
        run_stage(stage, materials, out, seed=0, device=CPU, ranks=_ranks())
    finally:
        patch.undo()


def cut_off(materials: StageInputs, out: Path, parallel: dict[str, Any], **changes: Any) -> None:
    """Leaves what a job does whose ranks die in the middle, without dying."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise _CutError

    true_step, calls = loop_module.train_step, iter(range(1, 100))
    patch = pytest.MonkeyPatch()
    patch.setattr(loop_module, "Saver", WritingAtOnce)
    patch.setattr(
        loop_module, "train_step", lambda *args, **kw: (fail if next(calls) == CUT_AT else true_step)(*args, **kw)
    )
    try:
        train(materials, out, parallel, **changes)
    except _CutError:
        return
    finally:
        patch.undo()
    raise AssertionError("it was not cut off")


def asked_to_stop(materials: StageInputs, out: Path, parallel: dict[str, Any]) -> int:
    """A signal that reaches one rank only, in its third step; the exit code of all."""
    true_step, calls = loop_module.train_step, iter(range(1, 100))

    def signalled(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return true_step(*args, **kwargs)

    patch = pytest.MonkeyPatch()
    patch.setattr(loop_module, "train_step", signalled)
    try:
        train(materials, out, parallel)
    except SystemExit as stopped:
        return int(str(stopped.code))
    finally:
        patch.undo()
    raise AssertionError("it was not stopped")


def full_disk(folder: Path) -> dict[str, Any]:
    """A disk that is full for rank 1: what all ranks make of it, and what is left."""
    group = dist.new_group(backend="gloo")
    tensors = {"weight": torch.arange(4.0)}
    write_checkpoint(folder, tensors, {"step": 1}, {}, group)
    true_sums = checkpoint_module._checksums

    def full(partial: Path, files: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return true_sums(partial, files)

    checkpoint_module._checksums = full
    try:
        write_checkpoint(folder, tensors, {"step": 2}, {}, group)
        mine = "written"
    except OSError as error:
        mine = str(error.strerror)
    finally:
        checkpoint_module._checksums = true_sums
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    return {"said": said, "left": sorted(path.name for path in folder.iterdir())}


class _CutError(Exception):
    pass


def _ranks() -> Ranks | None:
    if not dist.is_initialized():
        return None
    rank, store = dist.get_rank(), PrefixStore("tests", dist.distributed_c10d._get_default_store())
    return Ranks(rank=rank, world_size=dist.get_world_size(), local_rank=rank, device=CPU, store=store)


def copied(start: Path, out: Path) -> Path:
    """The half-done work of `start` as that of `out`, once for all ranks."""
    if dist.get_rank() == 0 if dist.is_initialized() else True:
        shutil.copytree(start.with_name(start.name + ".work"), out.with_name(out.name + ".work"))
    if dist.is_initialized():
        dist.barrier()
    return out


def goes_on(materials: StageInputs, folder: Path) -> StageInputs:
    """From what one rank has trained, with weights handed on that are not those of the model."""
    start = folder / "whole-1" / "one"
    path = folder / "handed-on.safetensors"
    if not path.is_file():
        handed_on = load_file(start / OPTIMIZER)
        own = weights(start)
        handed_on |= {f"{name}/weight": own[name] * 1.01 for name in own if "q_proj" in name or "embed" in name}
        save_file(handed_on, path)
    return StageInputs(model=str(start / "model"), datasets=materials.datasets, moments=path)


def stage_jobs(world: int, folder: Path, materials: StageInputs) -> dict[str, Callable[[], Any]]:
    """What is made in `folder` by 4 ranks, then by 2; what 2 begin, 1 ends."""

    def resumed(start: str, out: str, parallel: dict[str, Any]) -> None:
        train(materials, copied(folder / start / "one", folder / out / "one"), parallel)

    if world == 4:
        return {
            "whole 4": partial(train, materials, folder / "whole-4" / "one", SHARD),
            "cut 4": partial(cut_off, materials, folder / "cut-4" / "one", SHARD),
            "4 on 4": partial(resumed, "cut-4", "4-on-4", SHARD),
            "4 on ulysses 2, shard 2": partial(resumed, "cut-4", "4-on-mixed", ULYSSES),
        }
    return {
        "4 on 2": partial(resumed, "cut-4", "4-on-2", SHARD),
        "whole ulysses": partial(train, materials, folder / "whole-ulysses" / "one", ULYSSES),
        "cut ulysses": partial(cut_off, materials, folder / "cut-ulysses" / "one", ULYSSES),
        "ulysses on ulysses": partial(resumed, "cut-ulysses", "ulysses-on-ulysses", ULYSSES),
        "ulysses on shard": partial(resumed, "cut-ulysses", "ulysses-on-shard", SHARD),
        "loaded whole": partial(train, materials, folder / "loaded-whole" / "one", ULYSSES, whole=True),
        "samples": partial(train, materials, folder / "samples-2" / "one", SHARD, **SAMPLES),
        "stopped": partial(asked_to_stop, materials, folder / "stopped" / "one", SHARD),
        "stopped, taken up": partial(train, materials, folder / "stopped" / "one", SHARD),
        "goes on": partial(train, goes_on(materials, folder), folder / "next-2" / "one", SHARD, **NEXT),
        "full disk": partial(full_disk, folder / "full-disk"),
    }


# What a stage has left behind


def lines(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def gaps(out: Path) -> list[str]:
    return find_gaps(read_ledger(out / LEDGER), SIZES, steps=6)
