"""The ranks of a job: this process's rank, the rendezvous with the others, and the exit when one fails.

`init_ranks` reads the environment variables that torchrun sets (also under srun and Ray): RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT. Without them, or with one rank, there is no process group. A rank that raises, dies or hangs
ends the job within a minute, and one message names the rank and its step (watchdog.py).
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from unspool.core.errors import ConfigError, UnspoolError, explain
from unspool.training.parallel.config import REFUSAL
from unspool.training.parallel.watchdog import NO_STEP, Limits, Watchdog, announce, exit_code


@dataclass(frozen=True, kw_only=True)
class RankEnv:
    """This process's rank, as described by the environment."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int
    agent_hosts_store: bool

    @property
    def hosts_store(self) -> bool:
        return self.rank == 0 and not self.agent_hosts_store


def read_rank_env(env: Mapping[str, str]) -> RankEnv:
    given = {
        name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name in env
    }
    if "WORLD_SIZE" not in given and "RANK" not in given:
        return RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1, host="", port=0, agent_hosts_store=False)
    needed = (
        ("RANK", "WORLD_SIZE")
        if given.get("WORLD_SIZE") == "1"
        else ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    missing = [name for name in needed if name not in given]
    if missing:
        raise ConfigError(
            f"the environment sets {', '.join(given)} but not {', '.join(missing)}; start with torchrun or `unspool "
            "launch`, or unset them to train on one rank."
        )
    try:
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
        local_rank = int(given.get("LOCAL_RANK", rank))
        local_world_size = int(env.get("LOCAL_WORLD_SIZE", 1))
        port = int(given.get("MASTER_PORT", 0))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be whole numbers: {error}.") from None
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} does not fit WORLD_SIZE={world_size}; use 0 to {world_size - 1}.")
    return RankEnv(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        host=given.get("MASTER_ADDR", ""),
        port=port,
        agent_hosts_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def pick_backend(device_type: str, rank_env: RankEnv, *, num_devices: int) -> tuple[torch.device, str]:
    """Return this rank's device and its torch.distributed backend."""
    if device_type == "cpu":
        return torch.device("cpu"), "gloo"
    if num_devices == 0:
        raise ConfigError("device: cuda is not available here; use auto or cpu.")
    shared = rank_env.local_world_size > num_devices
    backend = "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"
    return torch.device("cuda", rank_env.local_rank % num_devices), backend


USER_ERROR = 2  # exit code of the command for an UnspoolError


class CommonError(ConfigError):
    """An error that all ranks raise at the same place. Rank 0 prints it."""


# The timeout of a collective is the last resort: heartbeats detect failures earlier and identify the rank.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
MIN_POLL, MAX_POLL = 0.02, 1.0  # seconds between two requests to the store, which hundreds of ranks may send


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process as a rank of its job."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    watchdog: Watchdog | None = field(default=None, repr=False, compare=False)
    store: Any = field(default=None, repr=False, compare=False)  # for the main thread
    uses: dict[str, int] = field(default_factory=dict, repr=False, compare=False)  # number of uses of each name

    @property
    def is_leader(self) -> bool:
        """Rank 0, which writes shared files and prints progress."""
        return self.rank == 0

    def enter_step(self, step: int, activity: str = "computing") -> None:
        """Mark progress inside `step`. The watchdog limits the time until the next mark."""
        if self.watchdog is not None:
            self.watchdog.mark(step, activity, timed=True)

    def leave_step(self, activity: str, step: int = NO_STEP) -> None:
        """Start work without a time limit, such as loading, a checkpoint or an export, until the next `enter_step`."""
        if self.watchdog is not None:
            self.watchdog.mark(step, activity, timed=False)

    def barrier(self, name: str) -> None:
        """Wait for all ranks, without a timeout while they are alive."""
        if self.store is None:
            return
        key = self._unique_key(f"barrier/{name}")
        if self.store.add(key, 1) == self.world_size:
            self.store.set(f"{key}/all", "1")
        self._wait(f"{key}/all")

    def broadcast(self, name: str, value: Any = None) -> Any:
        """Return the leader's JSON-compatible `value` on all ranks."""
        if self.store is None:
            return value
        key = self._unique_key(f"broadcast/{name}")
        if self.is_leader:
            self.store.set(key, json.dumps(value))
        else:
            self._wait(key)
        return json.loads(self.store.get(key))

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return the JSON-compatible values of all ranks, in order, on the leader; an empty list on other ranks."""
        if self.store is None:
            return [value]
        key = self._unique_key(f"gather/{name}")
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        if not self.is_leader:
            return []
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        for each in keys:
            self._wait(each)
        return [json.loads(self.store.get(each)) for each in keys]

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank. A collective: all ranks must call it."""
        if self.world_size == 1:
            return flag
        found = torch.tensor([int(flag)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def _unique_key(self, name: str) -> str:
        """Return a new key for each use of a name; all ranks use names in the same order."""
        self.uses[name] = self.uses.get(name, 0) + 1
        return f"{name}/{self.uses[name]}"

    def _wait(self, key: str) -> None:
        # Not `store.wait`, which has a timeout; the watchdog ends this process if another rank fails.
        pause = MIN_POLL
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(MAX_POLL, 1.5 * pause)


@contextmanager
def init_ranks(
    device_type: str, *, env: Mapping[str, str] = os.environ, limits: Limits | None = None
) -> Iterator[Ranks]:
    """Join the other ranks of the job described by the environment, for the duration of the block."""
    rank_env = read_rank_env(env)
    device, backend = pick_backend(device_type, rank_env, num_devices=torch.cuda.device_count())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if rank_env.world_size == 1:
        yield Ranks(rank=0, world_size=1, local_rank=rank_env.local_rank, device=device)
        return
    store = _connect(rank_env)
    watchdog = Watchdog(store.clone(), rank=rank_env.rank, world_size=rank_env.world_size, limits=limits or Limits())
    dist.init_process_group(
        backend,
        store=PrefixStore("groups", store.clone()),
        rank=rank_env.rank,
        world_size=rank_env.world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if "nccl" in backend else None,
    )
    mine = Ranks(
        rank=rank_env.rank,
        world_size=rank_env.world_size,
        local_rank=rank_env.local_rank,
        device=device,
        watchdog=watchdog,
        store=store,
    )
    watchdog.start()
    # From here on, every rank has sent a heartbeat.
    mine.barrier("started")
    with _handle_sigterm():
        try:
            yield mine
        except BaseException as error:
            _fail(watchdog, rank_env, error)
        mine.leave_step("leaving")
        mine.barrier("ended")
        watchdog.stop()
        if rank_env.hosts_store:
            watchdog.wait_for_others(failed=False)
        dist.destroy_process_group()


def _connect(rank_env: RankEnv) -> Any:
    """Connect to the rendezvous store, which torchrun's agent or rank 0 hosts."""
    try:
        store = TCPStore(
            rank_env.host,
            rank_env.port,
            rank_env.world_size,
            is_master=rank_env.hosts_store,
            timeout=RENDEZVOUS_TIMEOUT,
            multi_tenant=True,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise UnspoolError(
            f"rank {rank_env.rank}: rendezvous at {rank_env.host}:{rank_env.port} failed: no other rank "
            f"connected ({reason}); check that all {rank_env.world_size} ranks were started and that every machine "
            "reaches this address."
        ) from None
    # torchrun may restart ranks on the same store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"unspool/{attempt}", store)


def _fail(watchdog: Watchdog, rank_env: RankEnv, error: BaseException) -> None:
    """End this rank with `error`, unless another rank's failure caused it. Always raises."""
    rank = rank_env.rank
    if threading.current_thread() is threading.main_thread():
        # torchrun sends SIGTERM as soon as a rank has exited; ignore it until the message is printed.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if isinstance(error, SystemExit) and not isinstance(error, _TerminatedError):
        watchdog.stop()  # all ranks received the stop signal
        raise error
    try:
        caused_elsewhere = isinstance(error, _TerminatedError) or _lost_connection(error)
        if caused_elsewhere and watchdog.await_failure() is not None:
            raise SystemExit(exit_code()) from None
        if isinstance(error, _TerminatedError):
            raise error  # the whole job is stopping
        if isinstance(error, CommonError) and rank != 0:
            raise SystemExit(0 if os.environ.get(REFUSAL) else USER_ERROR) from None  # rank 0 prints it
        sentence = explain(error)
        refused = sentence is not None and _note_refusal(sentence, rank)
        text = (sentence or str(error)).strip() or type(error).__name__
        first = watchdog.report_failure(f"rank {rank} failed {watchdog.position}: {text.splitlines()[0]}")
    except RuntimeError:  # from the store
        announce(
            f"rank {rank} {watchdog.position}: the rendezvous store does not answer; rank 0 or torchrun, which "
            "hosts it, has ended"
        )
        raise error from None
    finally:
        watchdog.stop()
        if rank_env.hosts_store:
            watchdog.wait_for_others(failed=True)
    if refused:
        raise SystemExit(0) from None
    if not first:
        raise SystemExit(exit_code()) from None
    if not isinstance(error, CommonError):
        announce(f"rank {rank} failed {watchdog.position}; stopping the job")
    raise error


def _note_refusal(sentence: str, rank: int) -> bool:
    """Write the message of an error that only the user can fix to the file of the launcher, if it has set one."""
    path = os.environ.get(REFUSAL)
    if not path:
        return False
    with suppress(OSError), Path(path).open("x", encoding="utf-8") as file:  # another rank may have written it first
        file.write(sentence if rank == 0 else f"rank {rank}: {sentence}")
    return Path(path).exists()


def _lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed, as on all ranks after one has died."""
    words = ("gloo", "nccl", "connection", "peer", "socket", "broken pipe", "timed out")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


class _TerminatedError(SystemExit):
    """SIGTERM outside of steps: torchrun sends it when another rank has failed or the whole job stops."""


@contextmanager
def _handle_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception; inside steps, the stage handles the signal itself."""
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
