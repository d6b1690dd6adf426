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


def job(recipe: Path, out: Path, *, gpus: int, restarts: int, **env: str) -> "subprocess.Popen[str]":
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
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
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


def processes(out: Path) -> dict[int, bytes]:
    """Every process of a job that works into `out`, with its environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            env = (path / "environ").read_bytes()
        except OSError:
            continue
        if f"out={out}".encode() in words:
            found[int(path.name)] = env
    return found


def rank_process(rank: int, out: Path) -> int:
    """The process of a rank that works into `out`."""
    for process, env in processes(out).items():
        if b"RANK=%d" % rank in env.split(b"\0"):
            return process
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
    assert asked.returncode == 143, said
    assert "Traceback" not in said
    assert "stopped by SIGTERM, saved as step-" in said, said
    assert " died" not in said

    again = job(recipe, out, gpus=1, restarts=0)
    _, said = again.communicate(timeout=SECONDS)
    assert again.returncode == 0, said
    assert "resuming after step" in said, "on another number of ranks, too"
    lines = read_ledger(out / "stages" / "first" / LEDGER)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))


def test_a_job_that_is_asked_to_stop_before_it_trains_prints_no_traceback(recipe, tmp_path):
    out = tmp_path / "out"
    asked = job(recipe, out, gpus=2, restarts=3)
    until = time.monotonic() + SECONDS
    while not (out / "run.json").exists():
        assert asked.poll() is None and time.monotonic() < until, asked.stderr and asked.stderr.read()
        time.sleep(0.05)
    asked.terminate()
    _, said = asked.communicate(timeout=SECONDS)
    assert asked.returncode == 143, said
    assert "Traceback" not in said


def test_a_killed_launch_leaves_nothing_behind_that_trains(recipe, tmp_path):
    out = tmp_path / "out"
    killed = job(recipe, out, gpus=2, restarts=3)
    wait_for_step(killed, out / "stages" / "first.work", 4)
    assert len(processes(out)) >= 4, "launch, torchrun and two ranks"
    killed.kill()
    killed.wait()
    until = time.monotonic() + 60
    while (left := processes(out)) and time.monotonic() < until:
        time.sleep(0.2)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, "they went on without it"
    assert not (out / "stages" / "first").exists(), "it came to its end, so this shows nothing"


def test_what_only_ranks_find_out_is_said_once_and_not_tried_again(recipe, tmp_path):
    """Here, that one of them runs another version of Python."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, platform\nif os.environ.get('RANK') == '1': platform.python_version = lambda: '2.7'\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    refused = job(recipe, tmp_path / "out", gpus=2, restarts=3, PYTHONPATH=path)
    _, said = refused.communicate(timeout=SECONDS)
    assert refused.returncode == 2, said
    assert said.count("rank 1 disagrees with rank 0: python version is '2.7' there") == 1, said
    assert "Traceback" not in said
    assert len([line for line in said.splitlines() if line.startswith("error: ")]) == 1, said
