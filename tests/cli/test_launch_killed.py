"""A recipe on two ranks that are killed: the job ends and says which, and goes on without a gap or a repeat."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from factory import save_mini
from unspool.training.loader import LEDGER, find_gaps, read_ledger

pytestmark = pytest.mark.slow

STEPS = 40
SECONDS = 600  # of a job; far less than the half hour after which a collective gives up by itself


def job(recipe: Path, out: Path, *, gpus: int, restarts: int) -> "subprocess.Popen[str]":
    settings = {
        "out": out,
        "device": "cpu",
        "stages.0.tokens": STEPS * 256,
        "stages.0.checkpoint_every": 2,
        "stages.0.parallel.ulysses": gpus,
    }
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "unspool.cli.main", "launch", str(recipe), f"--gpus={gpus}"),
            *(f"--restarts={restarts}", "--verb=train"),
            *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def recipe(tmp_path) -> Path:
    """Only the first stage of the mini recipe."""
    path = save_mini(tmp_path / "mini")
    text = path.read_text()
    first, rest = text.index("  - name: abf"), text.index("evals:")
    path.write_text(text[:first] + text[rest:])
    return path


def wait_for_step(job: "subprocess.Popen[str]", work: Path, step: int) -> None:
    until = time.monotonic() + SECONDS
    while not any(int(path.name[5:]) >= step for path in (work / "checkpoints").glob("step-" + "[0-9]" * 6)):
        assert job.poll() is None, job.stderr and job.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.05)


def rank_process(rank: int, out: Path) -> int:
    """The process of a rank that works into `out`."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            env = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"RANK=%d" % rank in env and f"out={out}".encode() in words:
            return int(path.name)
    raise AssertionError(f"no rank {rank}")


def test_a_killed_rank_ends_the_job_and_a_restart_loses_and_repeats_nothing(recipe, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    first = job(recipe, whole, gpus=2, restarts=0)
    _, said = first.communicate(timeout=SECONDS)
    assert first.returncode == 0, said

    killed = job(recipe, out, gpus=2, restarts=0)
    work = out / "stages" / "first.work"
    wait_for_step(killed, work, 6)
    os.kill(rank_process(1, out), signal.SIGKILL)
    _, said = killed.communicate(timeout=SECONDS)
    assert killed.returncode != 0
    named = re.findall(r"rank 1 died at step (\d+)", said)
    assert len(named) == 1, said
    assert int(named[0]) >= 6

    # Once more, and now torchrun begins anew by itself.
    restarted = job(recipe, out, gpus=2, restarts=2)
    wait_for_step(restarted, work, 20)
    os.kill(rank_process(0, out), signal.SIGKILL)
    _, said = restarted.communicate(timeout=SECONDS)
    assert restarted.returncode == 0, said
    assert "rank 0 died at step" in said
    assert "resuming after step" in said

    place, wanted = out / "stages" / "first", whole / "stages" / "first"
    assert (place / LEDGER).read_text() == (wanted / LEDGER).read_text()
    lines = read_ledger(place / LEDGER)
    sizes = {"long": 1 + max(index for line in lines for index in line["rows"]["long"])}
    assert find_gaps(lines, steps=STEPS, sizes=sizes) == []
    name = "model/model.safetensors"
    assert (place / name).read_bytes() == (wanted / name).read_bytes()


def test_a_job_that_is_asked_to_stop_saves_and_goes_on(recipe, tmp_path):
    out = tmp_path / "out"
    asked = job(recipe, out, gpus=2, restarts=3)
    work = out / "stages" / "first.work"
    wait_for_step(asked, work, 4)
    asked.terminate()
    _, said = asked.communicate(timeout=SECONDS)
    assert asked.returncode != 0
    assert "stopped by SIGTERM, saved as step-" in said, said
    assert " died" not in said

    again = job(recipe, out, gpus=1, restarts=0)
    _, said = again.communicate(timeout=SECONDS)
    assert again.returncode == 0, said
    assert "resuming after step" in said, "on another number of ranks, too"
    lines = read_ledger(out / "stages" / "first" / LEDGER)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
