"""Jobs of several ranks that tests disturb, and how an undisturbed one ends."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from unspool.training.loader import LEDGER, find_gaps, read_ledger

from .test_launch_killed import SECONDS, STEPS


def overrides(out: Path, ranks: int, steps: int = STEPS) -> list[str]:
    settings = {
        "out": out,
        "device": "cpu",
        "stages.0.tokens": steps * 256,
        "stages.0.checkpoint_every": 2,
        "stages.0.parallel.ulysses": ranks,
    }
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def launch(recipe: Path, out: Path, *options: str, ranks: int = 2, steps: int = STEPS) -> None:
    """Run `unspool launch` until it ends."""
    command = [sys.executable, "-m", "unspool.cli.main", "launch", str(recipe), "--verb=train", *options]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *overrides(out, ranks, steps)], capture_output=True, text=True, env=env, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr


def wait_until(check: Callable[[], bool], what: str, *, seconds: float = SECONDS) -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.1)


def last_step(out: Path) -> int:
    """The last step of the first stage that was saved; 0 if none was."""
    checkpoints = out / "stages" / "first.work" / "checkpoints"
    return max((int(path.name[5:]) for path in checkpoints.glob("step-" + "[0-9]" * 6)), default=0)


def assert_same(out: Path, undisturbed: Path, steps: int = STEPS) -> None:
    """The ledger has no gap and no repeat, and the weights are equal bit for bit."""
    place, wanted = out / "stages" / "first", undisturbed / "stages" / "first"
    assert (place / LEDGER).read_text() == (wanted / LEDGER).read_text()
    lines = read_ledger(place / LEDGER)
    sizes = {"long": 1 + max(index for line in lines for index in line["rows"]["long"])}
    assert find_gaps(lines, steps=steps, sizes=sizes) == []
    name = "model/model.safetensors"
    assert (place / name).read_bytes() == (wanted / name).read_bytes()
