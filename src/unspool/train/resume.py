"""Going on from the newest checkpoint that is whole, or from the beginning.

Promise: everything that the steps to come depend on is as it was after the checkpoint's step: weights, moments,
random generators, what the guard remembers. Files that grow by a line per step end with that step.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unspool.base.artefact import write_atomic
from unspool.train.checkpoint import Checkpoint, newest_checkpoint
from unspool.train.guard import Guard
from unspool.train.optimizer import Updater
from unspool.train.random_state import read_random_state, seed_all, set_random_state
from unspool.train.team import Team

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
