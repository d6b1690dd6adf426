"""What every rank tells the others about itself, and what is made of a rank that falls silent.

In: a store that all ranks reach, where this rank stands (`at`, `outside`). Out: one sentence that names the rank and
the step, once for the whole job; after it no rank lives for longer than `Limits.grace`.
Three ways to fail: a rank says so itself (`tell`), its process is gone (its beats end), or its main thread hangs (its
beats go on and say that nothing has moved for too long). Rank 0 watches all others, and all others watch rank 0, so
that the store is asked little by many ranks.
Price: one thread per rank and some bytes a second. What hangs is known by what usually takes long: four times the
longest time between two of this run's marks, and at least `Limits.hang`; the first two steps compile and get longer.
Elsewhere: process groups and the environment (ranks.py); restarting is torchrun's.
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

# What a rank says of itself, and the sentences that are made of it when one has failed.


NO_STEP = 0


@dataclass(frozen=True, kw_only=True)
class Beat:
    number: int
    step: int  # NO_STEP: outside of all
    marks: int
    doing: str
    still: float  # seconds since the last mark
    stuck: bool  # that is longer than it may be
    waits: bool  # the main thread is inside of torch.distributed
    where: str
    suspects: bool = False  # it has lost a connection
    left: bool = False  # it ended in order


def announce(text: str) -> None:
    """Said by whichever rank comes to know it, also by those that are quiet otherwise (base/progress.py)."""
    print(text, file=sys.stderr, flush=True)


def gone_sentence(beats: Mapping[int, Beat]) -> str:
    told = "; ".join(f"rank {rank} is gone: it stood {place_of(beat.step, beat.doing)}" for rank, beat in beats.items())
    return f"{told}; {_WHAT_NOW}"


def hang_sentence(beats: Mapping[int, Beat]) -> str:
    """Names those that the others wait for, as far as it can be known."""
    living = {rank: beat for rank, beat in beats.items() if not beat.left}
    last = min((beat.step or sys.maxsize, beat.marks) for beat in living.values())
    late = [rank for rank, beat in living.items() if (beat.step or sys.maxsize, beat.marks) == last]
    busy = [rank for rank in late if not living[rank].waits]
    late = busy or late
    told = "; ".join(
        f"rank {rank} hangs {place_of(living[rank].step, living[rank].doing)}, in {living[rank].where}" for rank in late
    )
    others = len(living) - len(late)
    waiting = f", and {others} other{'s' * (others > 1)} wait{'s' * (others == 1)} for it" if others else ""
    return f"{told}: nothing has moved for {max(living[rank].still for rank in late):.0f} s{waiting}; {_WHAT_NOW}"


_WHAT_NOW = "the job is stopped, and the same command goes on from the last checkpoint"


def place_of(step: int, doing: str) -> str:
    return f"at step {step} ({doing})" if step != NO_STEP else f"outside of steps ({doing})"


FAILED = 1  # exit code of ranks that another one takes along
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = str(Path(_TORCH) / "distributed")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """In seconds."""

    beat: float = 1.0
    gone: float = 25.0  # without a beat; a long call that never lets another thread run must fit in
    suspected: float = 4.0  # the same, once a rank has lost a connection
    hang: float = 30.0  # without a mark while steps are made
    first: float = 600.0  # the same in the first two steps
    grace: float = 3.0  # for a rank's own error to be told before its process is ended


class Heartbeat:
    """This rank's beats, and its eye on the others'."""

    def __init__(self, store: Any, *, rank: int, world_size: int, limits: Limits) -> None:
        self._store, self._rank, self._world_size, self._limits = store, rank, world_size, limits
        self._main = threading.main_thread().ident
        self._lock = threading.Lock()
        self._step, self._marks, self._doing = NO_STEP, 0, "starting"
        self._last, self._num_steps = NO_STEP, 0
        self._longest, self._since, self._counts = 0.0, time.monotonic(), False
        self._suspects = self._left = False
        self._number = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._say_where()
        self._thread.start()

    def stop(self) -> None:
        """This rank ends in order: its silence means nothing any more."""
        self._stop.set()
        self._thread.join(timeout=self._limits.beat + 1)
        self._left = True
        with suppress(RuntimeError):  # the store may be gone before
            self._say_where()

    def outlive(self, *, failed: bool) -> None:
        """Wait for the others to leave: they ask at the store, which this rank keeps, what has happened.

        After a failure only a little; in good order as long as a rank may be slow, since without the store it fails.
        """
        until = time.monotonic() + (self._limits.grace if failed else self._limits.gone)
        with suppress(RuntimeError):
            while time.monotonic() < until and not all(beat.left for beat in self._others().values()):
                time.sleep(self._limits.beat / 4)

    def mark(self, step: int, doing: str, *, counts: bool) -> None:
        """The main thread is here now; with `counts` the time until the next mark is limited."""
        with self._lock:
            now = time.monotonic()
            if self._counts:
                self._longest = max(self._longest, now - self._since)
            self._step, self._doing, self._since, self._counts = step, doing, now, counts
            self._marks += 1
            new = counts and step != self._last
            if new:
                self._last = step
                self._num_steps += 1
        if new:
            # At once: whoever dies before the next beat is still named with its step.
            self._say_where()

    @property
    def place(self) -> str:
        return place_of(self._step, self._doing)

    def suspect(self) -> str | None:
        """This rank lost a connection: what became of the others, as soon as that is known; None if all is well."""
        self._suspects = True
        # Twice as long as silence is allowed: whoever is to notice it may be slow as well.
        until = time.monotonic() + 2 * self._limits.suspected + 4 * self._limits.beat
        while not (verdict := self.verdict()) and time.monotonic() < until:
            time.sleep(self._limits.beat / 4)
        return verdict

    def tell(self, sentence: str) -> bool:
        """Make `sentence` what the job ended of; False if there is one already."""
        found: bytes = self._store.compare_set("verdict", "", sentence)
        return found.decode() == sentence

    def verdict(self) -> str | None:
        if not self._store.check(["verdict"]):
            return None
        said: str = self._store.get("verdict").decode()
        return said

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._limits.beat):
                self._say_where()
                if self.verdict():
                    break
                sentence = self._judge()
                if sentence and self.tell(sentence):
                    announce(sentence)
                    break
            else:
                return
        except RuntimeError as error:  # what the store raises
            if self._stop.is_set():
                return
            reason = str(error).strip().splitlines()[0][:200]
            announce(
                f"rank {self._rank} stood {self.place}: the ranks' meeting point does not answer any more ({reason})"
            )
        self._end()

    def _end(self) -> None:
        # The main thread may be inside of a call that never returns.
        if not self._stop.wait(self._limits.grace):
            sys.stderr.flush()
            os._exit(FAILED)

    def _say_where(self) -> None:
        self._store.set(_key(self._rank), json.dumps(asdict(self._beat())))

    def _beat(self) -> Beat:
        with self._lock:
            step, marks, doing = self._step, self._marks, self._doing
            still = time.monotonic() - self._since
            early = self._num_steps <= 2
            limit = self._limits.first if early else max(self._limits.hang, 4 * self._longest)
            stuck = self._counts and still > limit and not self._suspects
            self._number += 1
            number = self._number
        waits, where = _where(self._main)
        return Beat(
            number=number,
            step=step,
            marks=marks,
            doing=doing,
            still=still,
            stuck=stuck,
            waits=waits,
            where=where,
            suspects=self._suspects,
            left=self._left,
        )

    def _judge(self) -> str | None:
        beats = self._others()
        gone = self._gone(beats)
        if gone:
            return gone_sentence({rank: beats[rank] for rank in gone})
        beats[self._rank] = self._beat()
        if any(beat.suspects for beat in beats.values()):
            return None  # soon known to be gone
        if self._rank == 0 and any(beat.stuck for beat in beats.values()):
            return hang_sentence(beats)
        return None

    def _others(self) -> dict[int, Beat]:
        others = range(1, self._world_size) if self._rank == 0 else [0]
        texts = self._store.multi_get([_key(rank) for rank in others])
        return {rank: Beat(**json.loads(text)) for rank, text in zip(others, texts, strict=True)}

    def _gone(self, beats: Mapping[int, Beat]) -> list[int]:
        now = time.monotonic()
        suspected = self._suspects or any(beat.suspects for beat in beats.values())
        limit = self._limits.suspected if suspected else self._limits.gone
        for rank, beat in beats.items():
            if self._seen.get(rank, (-1, 0.0))[0] != beat.number:
                self._seen[rank] = (beat.number, now)
        return [rank for rank, beat in beats.items() if not beat.left and now - self._seen[rank][1] > limit]


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _where(main: int | None) -> tuple[bool, str]:
    """Whether the main thread is inside of torch.distributed, and the innermost line of it that is not torch's."""
    frames: Callable[[], Mapping[int, Any]] = sys._current_frames
    frame = frames().get(main or 0)
    if frame is None:
        return False, "no Python code"
    waits = frame.f_code.co_filename.startswith(_COLLECTIVES)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, "<")):
        frame = frame.f_back
    return waits, f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
