"""Checkpoints of a stage in progress: folders `step-000123/` with tensors, a few facts as JSON, and small files.

A checkpoint is complete or absent. A checkpoint that is damaged later is detected, and the previous one is used. Up to
three checkpoints are on disk at a time. With AdamW, each takes three times the fp32 weights.

`torch.distributed.checkpoint` plans the writing: every rank writes its own shards, which any number of ranks can read.
The leader publishes the folder when all ranks have written. torch's default format is not used, because its `.metadata`
is a pickle that could run code. Its safetensors format (`HuggingFaceStorageWriter`, sharded) stores the offsets of
shards in the file headers. `models/tensor_files.py` writes the files.
"""

import json
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from unspool.core.artifacts import changed_file, delete_removed, digest, list_files, remove
from unspool.models.tensor_files import TensorFile, write_tensor_files
from unspool.training.host_budget import HostRoom
from unspool.training.parallel.dtensor import as_shard_of, local_shard

logger = logging.getLogger(__name__)

STATE = "state.json"
# One more than needed, in case the newest is damaged.
KEEP = 2
# Bytes of tensors per file; several files are written in parallel.
FILE_BYTES = 2 << 30


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    facts: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.facts["step"])

    def tensors(self, into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Read all tensors by name. Tensors in `into` with the same name and shape are filled in place; others are new.

        New tensors are in host memory. Of sharded tensors, this rank gets its shard, regardless of how they were
        sharded when written.
        """
        _silence_warning()
        reader = HuggingFaceStorageReader(str(self.folder))
        found: dict[str, Tensor] = {}
        for name, entry in reader.read_metadata().state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                own = (into or {}).get(name)
                if own is None or own.shape != entry.size:
                    own = torch.empty(entry.size, dtype=entry.properties.dtype)
                found[name] = own
        load(found, storage_reader=reader, no_dist=True)
        return found


def write_checkpoint(
    folder: Path, tensors: dict[str, Tensor], facts: Mapping[str, Any], files: Mapping[str, bytes], group: Any = None
) -> None:
    """Publish `folder/step-000123` and remove old checkpoints.

    All ranks of `group` must call this and write their shards; the leader writes facts and files. It fails on all ranks
    if it fails on one.
    """
    _silence_warning()
    out_dir = folder / f"step-{facts['step']:06d}"
    partial = out_dir.with_name(out_dir.name + ".partial")
    is_leader = group is None or dist.get_rank(group) == 0
    try:
        _on_all_ranks(group, lambda: _make_empty(partial) if is_leader else None)
        _write_tensors(partial, tensors, group)
        checksums = _on_all_ranks(group, lambda: _checksums(partial, _own_files(partial, group)))
        _on_all_ranks(group, lambda: _publish(partial, out_dir, facts, files, checksums) if is_leader else None)
    except OSError:
        # If the disk is full, free the space of this checkpoint.
        if is_leader:
            remove(partial)
        raise
    if is_leader:
        _prune(folder, int(facts["step"]))


def checkpoints(folder: Path) -> list[Path]:
    """Return the published checkpoints, oldest first."""
    return sorted((path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()), key=_step)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint, and log a warning for each damaged one."""
    found = checkpoints(folder)
    for path in reversed(found):
        try:
            return Checkpoint(path, _read_facts(path))
        except _DamagedError as damage:
            rest = "; rolling back to the previous one" if path != found[0] else ""
            logger.warning(f"checkpoint {path.name} is damaged ({damage}){rest}")
    return None


class _DamagedError(Exception):
    """A damaged checkpoint; the message says what is wrong."""


def _on_all_ranks(group: Any, work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """Run `work` on all ranks and return the merged results. If it fails on one rank, all raise its error."""
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
    remove(partial)
    partial.mkdir(parents=True)


def _write_tensors(partial: Path, tensors: dict[str, Tensor], group: Any) -> None:
    world_size = 1 if group is None else dist.get_world_size(group)
    numbers = _file_numbers(tensors, FILE_BYTES * world_size)
    writer = _Writer(str(partial), fqn_to_index_mapping=numbers, save_distributed=True)
    try:
        save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        # torch raises a BaseException that wraps the actual error, such as a full disk.
        causes = [cause for cause, _ in error.failures.values()]
        raise next((cause for cause in causes if isinstance(cause, OSError)), causes[0]) from error


class _Writer(HuggingFaceStorageWriter):
    """Writer of the base class's files without the GIL, which the base class holds while training waits."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "torch.futures.Future[list[WriteResult]]":
        assert self.fqn_to_index_mapping is not None
        by_number: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            by_number.setdefault(self.fqn_to_index_mapping[item.index.fqn], []).append(item)
        count, rank = max(self.fqn_to_index_mapping.values()), plan.storage_data["shard_index"]
        files = [
            self._file(f"shard-{rank:05d}-model-{number:05d}-of-{count:05d}.safetensors", items, planner)
            for number, items in by_number.items()
        ]
        write_tensor_files(files, sync=True)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([WriteResult(index=item.index, size_in_bytes=0, storage_data=None) for item in plan.items])
        return done

    def _file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> TensorFile:
        offsets = {item.index.fqn: {SAVED_OFFSETS_KEY: _offsets(item)} for item in items}
        tensors: dict[str, Any] = {item.index.fqn: planner.resolve_data(item) for item in items}
        return TensorFile(Path(self.path) / name, tensors, {CUSTOM_METADATA_KEY: json.dumps(offsets), "format": "pt"})


def _offsets(item: WriteItem) -> list[int]:
    assert item.tensor_data is not None, "checkpoints hold tensors only"
    return list(item.tensor_data.chunk.offsets)


def _own_files(partial: Path, group: Any) -> list[Path]:
    """Return the files that this rank has written; the writer numbers files by rank, from 1."""
    own = "*" if group is None else f"shard-{dist.get_rank(group) + 1:05d}-*"
    return sorted(partial.glob(own))


def _checksums(partial: Path, files: Sequence[Path]) -> dict[str, Any]:
    for path in files:
        _sync(path)
    return list_files(partial, files)


def _publish(
    partial: Path, out_dir: Path, facts: Mapping[str, Any], files: Mapping[str, bytes], checksums: Mapping[str, Any]
) -> None:
    for name, content in files.items():
        (partial / name).write_bytes(content)
    state = {"facts": dict(facts), "files": {**checksums, **_checksums(partial, [partial / name for name in files])}}
    (partial / STATE).write_text(json.dumps(state | {"sha256": digest(state)}))
    _sync(partial / STATE)
    _sync(partial)
    remove(out_dir)
    partial.rename(out_dir)
    _sync(out_dir.parent)


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / STATE).read_text())
        checksum = state.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamagedError(f"{STATE} is missing or unreadable") from error
    if checksum != digest(state):
        raise _DamagedError(f"{STATE} has changed")
    changed = changed_file(path, state["files"])
    if changed is not None:
        raise _DamagedError(changed)
    facts: dict[str, Any] = state["facts"]
    return facts


def _file_numbers(tensors: Mapping[str, Tensor], file_bytes: int) -> dict[str, int]:
    """Return the file number of each tensor, from 1; of a sharded tensor, the file number of each shard."""
    numbers, size = {}, 0
    for name, tensor in tensors.items():
        size += tensor.numel() * tensor.element_size()
        numbers[name] = 1 + size // file_bytes
    return _without_gaps(numbers)


def _without_gaps(numbers: dict[str, int]) -> dict[str, int]:
    """Renumber files without gaps: a tensor larger than a file skips some numbers."""
    new = {number: index for index, number in enumerate(sorted(set(numbers.values())), 1)}
    return {name: new[number] for name, number in numbers.items()}


def _prune(folder: Path, step: int) -> None:
    """Keep the newest few checkpoints up to `step`. Later ones are damaged: training was rolled back."""
    found = checkpoints(folder)
    earlier = [path for path in found if _step(path) <= step]
    for path in {*found} - {*earlier[-KEEP:]}:
        remove(path)
    delete_removed(folder)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _silence_warning() -> None:
    """Silence torch's warning about saving without a process group: one process is intended here."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


# Writing while training continues


# Timeout of one exchange between ranks, while some may still be writing.
TIMEOUT = timedelta(hours=2)
# Shorter waits are not reported.
SHORT_S = 1.0


class Saver:
    """Copies and writes checkpoints in a thread. Each of `world_size` ranks creates one; its block ends with a wait.

    Call `wait_for_copy` before you change a tensor that was given to `save`. If host memory has no room for copies,
    files are written from the tensors themselves, and `wait_for_copy` waits for the writing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        stage: str,
        pin: bool,
        world_size: int = 1,
        room: Callable[[], HostRoom | None] = lambda: None,
    ) -> None:
        """`room` measures host memory on all ranks together; None: assume that there is enough."""
        self._folder, self._stage = folder, stage
        self._room = room
        self._copies_fit: bool | None = None  # not known before the first checkpoint
        # gloo, because the copies are in host memory.
        self._group: Any = dist.new_group(backend="gloo", timeout=TIMEOUT) if world_size > 1 else None
        self._pool = ThreadPoolExecutor(1, "unspool-checkpoint")
        self._pin = pin
        # The next checkpoint reuses the copies: pinning memory takes longer than copying into it.
        self._copies: dict[str, Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()
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
        """Start copying and writing, and return. Waits if the previous checkpoint is still being written."""
        began = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - began
        if waited > SHORT_S:
            logger.warning(
                f"stage {self._stage}: step {facts['step']} waited {waited:.0f} s for the checkpoint of step "
                f"{self._step}; increase checkpoint_every or use a faster disk to avoid this"
            )
        self._step = int(facts["step"])
        if self._copies_fit is None:
            self._copies_fit = self._check_room(tensors)
        self._copied.clear()
        stream: Any = None
        if self._pin:
            # The copy starts after all work queued so far; later work does not wait for it.
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
        self._writing = self._pool.submit(self._save, dict(tensors), stream, dict(facts), dict(files))

    def wait_for_copy(self) -> None:
        """Wait until the state of the last `save` may change. Raises errors of the thread."""
        self._copied.wait()
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises unexpected errors of the thread."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _save(self, tensors: dict[str, Tensor], stream: Any, facts: dict[str, Any], files: dict[str, bytes]) -> None:
        try:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                if not self._copies_fit:
                    self._write(tensors, facts, files)
                    return
                copies = self._copy(tensors)
        finally:
            self._copied.set()
        self._write(copies, facts, files)

    def _check_room(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether host memory has room for the copies."""
        room = self._room()
        sizes = [local_shard(tensor).nbytes for tensor in tensors.values()]
        # torch pins memory in powers of two.
        needed = sum(1 << (size - 1).bit_length() if self._pin and size else size for size in sizes)
        if room is None or needed <= room.bytes():
            return True
        logger.warning(
            f"stage {self._stage}: copying the state for background checkpoints takes {needed / (1 << 30):.1f} GiB of "
            f"host memory per rank, and {room}; checkpoints are written without a copy, and steps wait for them"
        )
        return False

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the state in host memory. torch 2.11's own stager fails at its second checkpoint."""
        for name, tensor in tensors.items():
            shard, copy = local_shard(tensor), self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (shard.shape, shard.dtype):
                self._copies[name] = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=self._pin)
            self._copies[name].copy_(shard, non_blocking=self._pin)
        if self._pin:
            torch.cuda.current_stream().synchronize()
        return {name: as_shard_of(self._copies[name], tensor) for name, tensor in tensors.items()}

    def _write(self, tensors: dict[str, Tensor], facts: dict[str, Any], files: dict[str, bytes]) -> None:
        try:
            write_checkpoint(self._folder, tensors, facts, files, self._group)
        except OSError as error:
            last = checkpoints(self._folder)
            newest = f"the newest is {last[-1].name}" if last else "there is none yet"
            logger.warning(
                f"stage {self._stage}: cannot write the checkpoint of step {facts['step']} "
                f"({error.strerror or error}); {newest}; training continues and will try the next one"
            )
