"""Checkpoints of a stage in progress: tensors, and the few facts they belong to.

In: tensors by name (weights, moments, counters), facts as JSON can hold them (step, random states, guard), small files
(metrics, ledger). Out: `step-000123/`.
Promise: a checkpoint folder is complete or absent; one damaged later is noticed, and the one before it is used.
Price: for a moment three checkpoints on disk, each three times the fp32 weights under AdamW.
Elsewhere: when they are written (saver.py), what becomes of them on resuming (resume.py).

`torch.distributed.checkpoint` writes them: every rank its own parts, and any number of ranks, divided in any way, reads
what of them it needs. The leader publishes the folder when all have written. Not in its own format, whose `.metadata`
is a pickle: whoever can change a file could run code. In its safetensors format (`HuggingFaceStorageWriter`, sharded),
which keeps the offsets of shards in the files' own headers.
"""

import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from unspool.core.artifacts import digest, file_digest
from unspool.training.parallel.dtensor import as_part, own_part

logger = logging.getLogger(__name__)

STATE = "state.json"
# One more than needed, in case the newest is lost with the disk it was written to.
KEEP = 2
# Bytes of tensors in one file: a file is put together in memory before it is written.
FILE_BYTES = 2 << 30


@dataclass(frozen=True)
class Checkpoint:
    """One that was found whole."""

    folder: Path
    facts: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.facts["step"])

    def tensors(self) -> dict[str, Tensor]:
        """On the CPU."""
        _hush()
        reader = HuggingFaceStorageReader(str(self.folder))
        found = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        load(found, storage_reader=reader, no_dist=True)
        return found

    def read_into(self, tensors: dict[str, Tensor]) -> None:
        """Where they lie: of divided ones this rank's parts, whatever parts they were written in."""
        _hush()
        load(tensors, storage_reader=HuggingFaceStorageReader(str(self.folder)), no_dist=True)


def write_checkpoint(
    folder: Path, tensors: dict[str, Tensor], facts: Mapping[str, Any], files: Mapping[str, bytes], group: Any = None
) -> None:
    """Publish `folder/step-000123` and remove all but the newest few.

    `group`: the ranks that each write their parts, all of which call this; the first one's facts and files count.
    Fails on all of them where it does on one.
    """
    _hush()
    out_dir = folder / f"step-{facts['step']:06d}"
    partial = out_dir.with_name(out_dir.name + ".partial")
    is_leader = group is None or dist.get_rank(group) == 0
    try:
        _together(group, lambda: _make_empty(partial) if is_leader else None)
        _write_tensors(partial, tensors, group)
        sums = _together(group, lambda: _sums(partial, _own_files(partial, group)))
        _together(group, lambda: _publish(partial, out_dir, facts, files, sums) if is_leader else None)
    except OSError:
        # A full disk: give back what this one took.
        if is_leader:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if is_leader:
        _prune(folder, int(facts["step"]))


def checkpoints(folder: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted((path for path in folder.glob("step-*") if path.suffix != ".partial"), key=_step)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest that is whole; about each one that is not, a sentence."""
    for path in reversed(checkpoints(folder)):
        try:
            return Checkpoint(path, _read_facts(path))
        except _DamagedError as damage:
            logger.warning(f"checkpoint {path.name} cannot be used ({damage}); going back to the one before it")
    return None


class _DamagedError(Exception):
    """Says what is wrong with a checkpoint."""


def _together(group: Any, work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """What `work` gives on all ranks, put together; where it fails on one, all raise that."""
    if group is None:
        return work() or {}
    try:
        mine: dict[str, Any] | OSError = work() or {}
    except OSError as error:
        mine = error
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    for one in found:
        if isinstance(one, OSError):
            raise one
    return {name: value for one in found for name, value in one.items()}


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_tensors(partial: Path, tensors: dict[str, Tensor], group: Any) -> None:
    world_size = 1 if group is None else dist.get_world_size(group)
    numbers = _file_numbers(tensors, FILE_BYTES * world_size)
    writer = HuggingFaceStorageWriter(str(partial), fqn_to_index_mapping=numbers, save_distributed=True)
    try:
        save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        # It is a BaseException around the one that matters, such as a full disk.
        causes = [cause for cause, _ in error.failures.values()]
        raise next((cause for cause in causes if isinstance(cause, OSError)), causes[0]) from error


def _own_files(partial: Path, group: Any) -> list[Path]:
    """Those that this rank has written: the writer numbers them by rank, from 1."""
    own = "*" if group is None else f"shard-{dist.get_rank(group) + 1:05d}-*"
    return sorted(partial.glob(own))


def _sums(partial: Path, files: Sequence[Path]) -> dict[str, Any]:
    for path in files:
        _sync(path)
    return {path.name: {"bytes": path.stat().st_size, "sha256": file_digest(path)} for path in files}


def _publish(
    partial: Path, out_dir: Path, facts: Mapping[str, Any], files: Mapping[str, bytes], sums: Mapping[str, Any]
) -> None:
    for name, content in files.items():
        (partial / name).write_bytes(content)
    state = {"facts": dict(facts), "files": {**sums, **_sums(partial, [partial / name for name in files])}}
    (partial / STATE).write_text(json.dumps(state | {"sha256": digest(state)}))
    _sync(partial / STATE)
    _sync(partial)
    shutil.rmtree(out_dir, ignore_errors=True)
    partial.rename(out_dir)
    _sync(out_dir.parent)


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / STATE).read_text())
        said = state.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamagedError(f"{STATE} is missing or unreadable") from error
    if said != digest(state):
        raise _DamagedError(f"{STATE} has changed")
    for name, entry in state["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise _DamagedError(f"{name} is missing or has another size")
        if file_digest(file) != entry["sha256"]:
            raise _DamagedError(f"{name} has changed")
    facts: dict[str, Any] = state["facts"]
    return facts


def _file_numbers(tensors: Mapping[str, Tensor], file_bytes: int) -> dict[str, int]:
    """The file each tensor goes to, from 1; of a divided one, that of each of its parts."""
    numbers, size = {}, 0
    for name, tensor in tensors.items():
        size += tensor.numel() * tensor.element_size()
        numbers[name] = 1 + size // file_bytes
    return _without_gaps(numbers)


def _without_gaps(numbers: dict[str, int]) -> dict[str, int]:
    """A tensor larger than a file skips some numbers."""
    places = {number: place for place, number in enumerate(sorted(set(numbers.values())), 1)}
    return {name: places[number] for name, number in numbers.items()}


def _prune(folder: Path, step: int) -> None:
    """Keep the newest few up to `step`. A later one can only be one that was damaged and gone back from."""
    found = checkpoints(folder)
    earlier = [path for path in found if _step(path) <= step]
    for path in {*found} - {*earlier[-KEEP:]}:
        shutil.rmtree(path)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _hush() -> None:
    """One process is meant, not forgotten."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


# Writing checkpoints while training goes on.


# Of one exchange between ranks, while some may still be writing.
LIMIT = timedelta(hours=2)
# Below this nobody notices a wait.
SHORT_S = 1.0


class Saver:
    """Leaving its block waits for the checkpoint that is being written. `world_size` ranks build one each."""

    def __init__(self, folder: Path, *, stage: str, pin: bool, world_size: int = 1) -> None:
        self._folder, self._stage = folder, stage
        # By gloo: what is written lies in host memory.
        self._group: Any = dist.new_group(backend="gloo", timeout=LIMIT) if world_size > 1 else None
        self._pool = ThreadPoolExecutor(1, "unspool-checkpoint")
        self._pin = pin
        # Kept from one checkpoint to the next: pinning memory takes longer than copying into it.
        self._copies: dict[str, Tensor] = {}
        self._writing: Future[None] | None = None
        self._step = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)
        if self._group is not None and kind is None:
            dist.destroy_process_group(self._group)

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Copy the state and return; it is written meanwhile. Waits for an earlier one that is not done yet."""
        began = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - began
        if waited > SHORT_S:
            logger.warning(
                f"stage {self._stage}: step {facts['step']} waited {waited:.0f} s for the checkpoint of step "
                f"{self._step} to be written; a larger checkpoint_every or a faster disk avoids that"
            )
        self._step = int(facts["step"])
        self._writing = self._pool.submit(self._write, self._copy(tensors), dict(facts), dict(files))

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In host memory. By our own few lines, since torch 2.11's stager fails at its second checkpoint."""
        for name, tensor in tensors.items():
            part, copy = own_part(tensor), self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (part.shape, part.dtype):
                self._copies[name] = torch.empty(part.shape, dtype=part.dtype, pin_memory=self._pin)
            self._copies[name].copy_(part, non_blocking=self._pin)
        if self._pin:
            torch.cuda.synchronize()
        return {name: as_part(self._copies[name], tensor) for name, tensor in tensors.items()}

    def wait(self) -> None:
        """Until nothing is being written; raises what went wrong and was not foreseen."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, tensors: dict[str, Tensor], facts: dict[str, Any], files: dict[str, bytes]) -> None:
        try:
            write_checkpoint(self._folder, tensors, facts, files, self._group)
        except OSError as error:
            last = checkpoints(self._folder)
            there = f"{last[-1].name} is there" if last else "there is none yet"
            logger.warning(
                f"stage {self._stage}: the checkpoint of step {facts['step']} could not be written "
                f"({error.strerror or error}); {there}, and training goes on: the next one will be tried as usual"
            )
