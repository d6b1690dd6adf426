"""The ranks of a job: who this process is, how it reaches the others, and how it ends when one of them fails.

In: what torchrun, or srun and Ray through it, leaves in the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT). Out: `Ranks`, with the process group started and the device set.
Promise: without those variables, or with one rank, there is no process group and nothing here does anything. A rank
that raises, dies or hangs ends the job within a minute, and one sentence names it and its step (heartbeat.py).
Elsewhere: what the environment may say (seat.py).
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from unspool.core.errors import ConfigError, UnspoolError
from unspool.training.parallel.watchdog import FAILED, NO_STEP, Heartbeat, Limits, announce

# Which rank this process is, as its environment says, and which device and backend that gives.


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What the environment says."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int
    agent_keeps_store: bool

    @property
    def keeps_store(self) -> bool:
        return self.rank == 0 and not self.agent_keeps_store


def read_place(env: Mapping[str, str]) -> Seat:
    given = {
        name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name in env
    }
    if "WORLD_SIZE" not in given and "RANK" not in given:
        return Seat(rank=0, world_size=1, local_rank=0, local_world_size=1, host="", port=0, agent_keeps_store=False)
    needed = (
        ("RANK", "WORLD_SIZE")
        if given.get("WORLD_SIZE") == "1"
        else ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    missing = [name for name in needed if name not in given]
    if missing:
        raise ConfigError(
            f"{', '.join(given)} of the environment say that this is one of several ranks, but {', '.join(missing)} "
            "is not set; start it by torchrun or `unspool launch`, or unset them to train on one."
        )
    try:
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
        local_rank = int(given.get("LOCAL_RANK", rank))
        local_world_size = int(env.get("LOCAL_WORLD_SIZE", 1))
        port = int(given.get("MASTER_PORT", 0))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be whole numbers: {error}.") from None
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} is not among the {world_size} ranks of WORLD_SIZE; use 0 to {world_size - 1}.")
    return Seat(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        host=given.get("MASTER_ADDR", ""),
        port=port,
        agent_keeps_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def pick_backend(device_type: str, place: Seat, *, num_devices: int) -> tuple[torch.device, str]:
    """This rank's device, and what carries its messages."""
    if device_type == "cpu":
        return torch.device("cpu"), "gloo"
    if num_devices == 0:
        raise ConfigError("device: cuda is not available here; use auto or cpu.")
    shared = place.local_world_size > num_devices
    return torch.device(
        "cuda", place.local_rank % num_devices
    ), "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"


# A collective's own limit is the last resort: the beats know earlier, and know who it was.
COLLECTIVE = timedelta(minutes=30)
MEETING = timedelta(minutes=10)  # for all ranks to be there
SOONEST, LATEST = 0.02, 1.0  # seconds between two questions to the store, which hundreds of ranks may ask


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the others of its job."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    heartbeat: Heartbeat | None = field(default=None, repr=False, compare=False)
    store: Any = field(default=None, repr=False, compare=False)  # of the main thread
    turns: dict[str, int] = field(default_factory=dict, repr=False, compare=False)  # how often a name was used

    @property
    def is_leader(self) -> bool:
        """The one that writes what there is one of, and that talks."""
        return self.rank == 0

    def at(self, step: int, doing: str = "computing") -> None:
        """This rank is at `step`: said once or more in each, since what usually takes long is known by it."""
        if self.heartbeat is not None:
            self.heartbeat.mark(step, doing, counts=True)

    def outside(self, doing: str, step: int = NO_STEP) -> None:
        """From here to the next `at`, things may take as long as they like: loading, a checkpoint, an export."""
        if self.heartbeat is not None:
            self.heartbeat.mark(step, doing, counts=False)

    def barrier(self, name: str) -> None:
        """Wait for all ranks, for as long as they live."""
        if self.store is None:
            return
        key = self._turn(f"barrier/{name}")
        if self.store.add(key, 1) == self.world_size:
            self.store.set(f"{key}/all", "1")
        self._wait(f"{key}/all")

    def broadcast(self, name: str, value: Any = None) -> Any:
        """The leader's `value`, for all: anything that JSON can hold."""
        if self.store is None:
            return value
        key = self._turn(f"said/{name}")
        if self.is_leader:
            self.store.set(key, json.dumps(value))
        else:
            self._wait(key)
        return json.loads(self.store.get(key))

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank: a collective, which all must call."""
        if self.world_size == 1:
            return flag
        found = torch.tensor([int(flag)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def _turn(self, name: str) -> str:
        """A key of its own for each time: all ranks come by in the same order."""
        self.turns[name] = self.turns.get(name, 0) + 1
        return f"{name}/{self.turns[name]}"

    def _wait(self, key: str) -> None:
        # Not the store's own wait, which would end after its limit; a rank that fails ends this process.
        pause = SOONEST
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(LATEST, 1.5 * pause)


@contextmanager
def ranks(device_type: str, *, env: Mapping[str, str] = os.environ, limits: Limits | None = None) -> Iterator[Ranks]:
    """The ranks of this job, from the environment, for as long as the block lasts."""
    place = read_place(env)
    device, backend = pick_backend(device_type, place, num_devices=torch.cuda.device_count())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.world_size == 1:
        yield Ranks(rank=0, world_size=1, local_rank=place.local_rank, device=device)
        return
    store = _meet(place)
    heartbeat = Heartbeat(store.clone(), rank=place.rank, world_size=place.world_size, limits=limits or Limits())
    dist.init_process_group(
        backend,
        store=PrefixStore("groups", store.clone()),
        rank=place.rank,
        world_size=place.world_size,
        timeout=COLLECTIVE,
        device_id=device if "nccl" in backend else None,
    )
    mine = Ranks(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        device=device,
        heartbeat=heartbeat,
        store=store,
    )
    heartbeat.start()
    # Once all beat, no beat can be missing.
    mine.barrier("started")
    with _termination():
        try:
            yield mine
        except BaseException as error:
            _fail(heartbeat, place, error)
        mine.outside("leaving")
        mine.barrier("ended")
        heartbeat.stop()
        if place.keeps_store:
            heartbeat.outlive(failed=False)
        dist.destroy_process_group()


def _meet(place: Seat) -> Any:
    """The store that all ranks reach: torchrun's agent keeps it, or rank 0 does."""
    try:
        store = TCPStore(
            place.host, place.port, place.world_size, is_master=place.keeps_store, timeout=MEETING, multi_tenant=True
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise UnspoolError(
            f"rank {place.rank} of {place.world_size} found no other at {place.host}:{place.port} ({reason}); check "
            "that all ranks were started, and that this address can be reached from every machine."
        ) from None
    # torchrun may start ranks anew on the same store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"unspool/{attempt}", store)


def _fail(heartbeat: Heartbeat, place: Seat, error: BaseException) -> None:
    """End this rank by `error`, unless another one's failure is behind it; raises in any case."""
    rank = place.rank
    if threading.current_thread() is threading.main_thread():
        # torchrun sends it as soon as a rank is gone, and this one is about to say which.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if isinstance(error, SystemExit) and not isinstance(error, _TerminatedError):
        heartbeat.stop()  # asked to stop, as all are
        raise error
    try:
        if isinstance(error, _TerminatedError) or _lost_connection(error):
            verdict = heartbeat.suspect()
            if verdict is not None:
                raise SystemExit(FAILED) from None
        if isinstance(error, _TerminatedError):
            raise error  # from whoever stops the whole job
        told = str(error).strip() or type(error).__name__
        first = heartbeat.tell(f"rank {rank} failed {heartbeat.place}: {told.splitlines()[0]}")
    except RuntimeError:  # of the store
        announce(
            f"rank {rank} stood {heartbeat.place} when the ranks' meeting point was gone, and with it rank 0 or "
            "torchrun, which kept it"
        )
        raise error from None
    finally:
        heartbeat.stop()
        if place.keeps_store:
            heartbeat.outlive(failed=True)
    if not first:
        raise SystemExit(FAILED) from None
    announce(f"rank {rank} failed {heartbeat.place}; the job is stopped")
    raise error


def _lost_connection(error: BaseException) -> bool:
    """Whether a collective failed, as it does on all ranks when one is gone."""
    words = ("gloo", "nccl", "connection", "peer", "socket", "broken pipe", "timed out")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


class _TerminatedError(SystemExit):
    """SIGTERM outside of steps: from torchrun, since another rank has failed, or from whoever stops the job."""


@contextmanager
def _termination() -> Iterator[None]:
    """Let SIGTERM be told apart from a failure; inside of steps a stage listens itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        sys.stderr.flush()
        raise _TerminatedError(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
