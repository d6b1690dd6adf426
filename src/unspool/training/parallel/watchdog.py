"""Heartbeats between ranks, and the message that names a dead or hung rank.

A rank fails in one of three ways: it reports an error itself (`report_failure`), its process dies (its heartbeats
stop), or its main thread hangs (its heartbeats show no progress). The first message becomes the job's message, and
every rank exits within `Limits.grace` of it. Rank 0 watches all other ranks, and they watch rank 0, so the store gets
few requests. A rank exits if the store does not answer, because the machine that hosts it is gone. The cost is two
threads per rank and a few bytes per second.

A rank counts as hung if it makes no progress for `Limits.hung_after`. The limit is four times the longest time between
two progress marks of this run, if that is longer. The first two steps compile and get more time. torchrun restarts
ranks; this module does not.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from unspool.training.parallel.config import REFUSAL

NO_STEP = 0
FAILED = 1
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = str(Path(_TORCH) / "distributed")
_RESUME = "stopping the job; rerun the same command to resume from the last checkpoint"


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The status message of one rank."""

    number: int
    step: int  # NO_STEP: outside of steps
    marks: int  # progress marks so far
    activity: str
    idle: float  # seconds since the last mark
    is_stuck: bool  # idle for too long
    in_collective: bool  # whether the main thread is inside torch.distributed
    location: str  # innermost line of the main thread outside of torch
    lost_connection: bool = False
    has_left: bool = False  # it exited normally


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Time limits in seconds."""

    interval: float = 1.0
    dead_after: float = 25.0  # without a heartbeat; longer than any call that blocks all threads
    dead_after_lost_connection: float = 4.0  # the same, after a rank has lost a connection
    hung_after: float = 30.0  # without a progress mark inside steps
    hung_after_in_first_steps: float = 600.0
    grace: float = 3.0  # time for a rank to print its own error before its process is ended


def exit_code() -> int:
    """Return the exit code of a rank that ends because of another rank."""
    return 0 if os.environ.get(REFUSAL) and Path(os.environ[REFUSAL]).exists() else FAILED


def announce(text: str) -> None:
    """Print from any rank, also from ranks that do not print progress."""
    print(text, file=sys.stderr, flush=True)


def dead_message(beats: Mapping[int, Heartbeat]) -> str:
    dead = "; ".join(f"rank {rank} died {at_step(beat.step, beat.activity)}" for rank, beat in beats.items())
    return f"{dead}; {_RESUME}"


def hang_message(beats: Mapping[int, Heartbeat]) -> str:
    """Return a message that names the ranks that the others wait for, as far as known."""
    alive = {rank: beat for rank, beat in beats.items() if not beat.has_left}
    last = min((beat.step or sys.maxsize, beat.marks) for beat in alive.values())
    late = [rank for rank, beat in alive.items() if (beat.step or sys.maxsize, beat.marks) == last]
    late = [rank for rank in late if not alive[rank].in_collective] or late
    hung = "; ".join(
        f"rank {rank} hangs {at_step(alive[rank].step, alive[rank].activity)} in {alive[rank].location}"
        for rank in late
    )
    others = len(alive) - len(late)
    waiting = f", {others} other rank{'s wait' if others > 1 else ' waits'} for it" if others else ""
    return f"{hung}: no progress for {max(alive[rank].idle for rank in late):.0f} s{waiting}; {_RESUME}"


def at_step(step: int, activity: str) -> str:
    return f"at step {step} ({activity})" if step != NO_STEP else f"outside of steps ({activity})"


class Watchdog:
    """Sender of this rank's heartbeats, and monitor of those of other ranks."""

    def __init__(self, store: Any, *, rank: int, world_size: int, limits: Limits) -> None:
        self._store, self._rank, self._world_size, self._limits = store, rank, world_size, limits
        self._main = threading.main_thread().ident
        self._lock = threading.Lock()
        self._step, self._marks, self._activity = NO_STEP, 0, "starting"
        self._last, self._num_steps = NO_STEP, 0
        self._longest, self._since, self._timed = 0.0, time.monotonic(), False
        self._lost_connection = self._has_left = False
        self._number = self._answers = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._store_thread = threading.Thread(target=self._watch_store, name="watchdog of the store", daemon=True)

    def start(self) -> None:
        self._send()
        self._thread.start()
        self._store_thread.start()

    def stop(self) -> None:
        """Stop before this rank exits normally: missing heartbeats are no failure from now on."""
        self._stop.set()
        self._thread.join(timeout=self._limits.interval + 1)
        self._has_left = True
        with suppress(RuntimeError):  # the store may have ended already
            self._send()

    def wait_for_others(self, *, failed: bool) -> None:
        """Keep the store, which this rank hosts, until the other ranks have left.

        After a failure, wait only for a short time. Otherwise wait as long as a rank may be slow, because it fails
        without a store.
        """
        until = time.monotonic() + (self._limits.grace if failed else self._limits.dead_after)
        with suppress(RuntimeError):
            while time.monotonic() < until and not all(beat.has_left for beat in self._read_others().values()):
                time.sleep(self._limits.interval / 4)

    def mark(self, step: int, activity: str, *, timed: bool) -> None:
        """Record progress of the main thread; with `timed`, the time until the next mark is limited."""
        with self._lock:
            now = time.monotonic()
            if self._timed:
                self._longest = max(self._longest, now - self._since)
            self._step, self._activity, self._since, self._timed = step, activity, now, timed
            self._marks += 1
            is_new = timed and step != self._last
            if is_new:
                self._last = step
                self._num_steps += 1
        if is_new:
            # Send at once, so that the message has the right step if this rank dies before its next heartbeat.
            self._send()

    @property
    def position(self) -> str:
        return at_step(self._step, self._activity)

    def await_failure(self) -> str | None:
        """Return the job's failure message after this rank lost a connection, as soon as there is one; else None."""
        self._lost_connection = True
        # Twice the limit, because the rank that notices may be slow as well.
        until = time.monotonic() + 2 * self._limits.dead_after_lost_connection + 4 * self._limits.interval
        while not (message := self.failure()) and time.monotonic() < until:
            time.sleep(self._limits.interval / 4)
        return message

    def report_failure(self, message: str) -> bool:
        """Set `message` as the job's failure; return False if there is one already."""
        found: bytes = self._store.compare_set("failure", "", message)
        return found.decode() == message

    def failure(self) -> str | None:
        if not self._store.check(["failure"]):
            return None
        message: str = self._store.get("failure").decode()
        return message

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._limits.interval):
                self._send()
                if self.failure():
                    break
                message = self._find_failure()
                if message and self.report_failure(message):
                    announce(message)
                    break
                self._answers += 1
            else:
                return
        except RuntimeError as error:  # from the store
            if self._stop.is_set():
                return
            reason = str(error).strip().splitlines()[0][:200]
            announce(f"rank {self._rank} {self.position}: the rendezvous store does not answer ({reason})")
        # The main thread may be inside a call that never returns.
        if not self._stop.wait(self._limits.grace):
            sys.stderr.flush()
            os._exit(exit_code())

    def _watch_store(self) -> None:
        """End this process if the store does not answer: a request to a dead machine may wait for hours."""
        answers = silent = 0
        while not self._stop.wait(self._limits.interval):
            silent = silent + 1 if self._answers == answers else 0
            answers = self._answers
            # Count checks instead of seconds, because a call that blocks all threads also blocks this one.
            if silent * self._limits.interval > self._limits.dead_after:
                announce(
                    f"rank {self._rank} {self.position}: no answer from the rendezvous store for "
                    f"{self._limits.dead_after:g} s: the machine that hosts it, usually that of rank 0, cannot be "
                    f"reached; {_RESUME}"
                )
                os._exit(FAILED)

    def _send(self) -> None:
        self._store.set(_key(self._rank), json.dumps(asdict(self._heartbeat())))

    def _heartbeat(self) -> Heartbeat:
        with self._lock:
            step, marks, activity = self._step, self._marks, self._activity
            idle = time.monotonic() - self._since
            limit = max(self._limits.hung_after, 4 * self._longest)
            if self._num_steps <= 2:
                limit = self._limits.hung_after_in_first_steps
            is_stuck = self._timed and idle > limit and not self._lost_connection
            self._number += 1
            number = self._number
        in_collective, location = _find_location(self._main)
        return Heartbeat(
            number=number,
            step=step,
            marks=marks,
            activity=activity,
            idle=idle,
            is_stuck=is_stuck,
            in_collective=in_collective,
            location=location,
            lost_connection=self._lost_connection,
            has_left=self._has_left,
        )

    def _find_failure(self) -> str | None:
        beats = self._read_others()
        dead = self._find_dead(beats)
        if dead:
            return dead_message({rank: beats[rank] for rank in dead})
        beats[self._rank] = self._heartbeat()
        if any(beat.lost_connection for beat in beats.values()):
            return None  # a rank will soon be detected as dead
        if self._rank == 0 and any(beat.is_stuck for beat in beats.values()):
            return hang_message(beats)
        return None

    def _read_others(self) -> dict[int, Heartbeat]:
        others = range(1, self._world_size) if self._rank == 0 else [0]
        texts = self._store.multi_get([_key(rank) for rank in others])
        return {rank: Heartbeat(**json.loads(text)) for rank, text in zip(others, texts, strict=True)}

    def _find_dead(self, beats: Mapping[int, Heartbeat]) -> list[int]:
        now = time.monotonic()
        lost = self._lost_connection or any(beat.lost_connection for beat in beats.values())
        limit = self._limits.dead_after_lost_connection if lost else self._limits.dead_after
        for rank, beat in beats.items():
            if self._seen.get(rank, (-1, 0.0))[0] != beat.number:
                self._seen[rank] = (beat.number, now)
        return [rank for rank, beat in beats.items() if not beat.has_left and now - self._seen[rank][1] > limit]


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"


def _find_location(main: int | None) -> tuple[bool, str]:
    """Return whether the main thread is inside torch.distributed, and its innermost line outside of torch."""
    frames: Callable[[], Mapping[int, Any]] = sys._current_frames
    frame = frames().get(main or 0)
    if frame is None:
        return False, "no Python code"
    in_collective = frame.f_code.co_filename.startswith(_COLLECTIVES)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, "<")):
        frame = frame.f_back
    return in_collective, f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
