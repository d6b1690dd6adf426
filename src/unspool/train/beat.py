"""What a rank says of itself, and the sentences that are made of it when one has failed."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

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
