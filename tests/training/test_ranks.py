"""The ranks of a job: read from the environment, meeting, and ending together when one of them fails."""

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unspool.core.errors import ConfigError, UnspoolError
from unspool.training.parallel import watchdog
from unspool.training.parallel.ranks import Ranks, init_ranks, pick_backend, read_rank_env
from unspool.training.parallel.watchdog import Heartbeat, Limits, Watchdog, dead_message, hang_message

# For ranks of which none falls silent: however slow the machine is, none is taken for one that did.
PATIENT = Limits(
    interval=0.1,
    dead_after=60.0,
    dead_after_lost_connection=60.0,
    hung_after=60.0,
    hung_after_in_first_steps=60.0,
    grace=30.0,
)
SECONDS = 300  # of all ranks together; only those that wait for each other reach it
STEPS, BAD_STEP = 8, 5
GIVEN: set[int] = set()  # ports of jobs that may not have begun
BEAT = Heartbeat(
    number=1,
    step=7,
    marks=9,
    activity="computing",
    idle=31.0,
    is_stuck=False,
    in_collective=False,
    location="f (x.py:3)",
)


def environment(rank: int, world_size: int, port: int = 1) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Below those that the system hands out by itself, so that nobody is given it before rank 0 takes it."""
    drawn = random.SystemRandom()
    while True:
        port = drawn.randrange(20_000, 32_000)
        if port in GIVEN:
            continue
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            GIVEN.add(port)
            return port


def begin(
    work: Callable[[Ranks], None], folder: Path, world_size: int = 2, limits: Limits = PATIENT
) -> Callable[[], tuple[list[int], list[str]]]:
    """`work` on forked ranks. What is returned waits for them: their exit codes, and what each said."""
    if torch.cuda.is_initialized():
        pytest.skip("a process that has used CUDA cannot fork; run this test by itself")
    port = free_port()
    children = [
        _fork(work, environment(rank, world_size, port), folder / str(rank), limits) for rank in range(world_size)
    ]
    return partial(_end, children, folder)


def _end(children: list[int], folder: Path) -> tuple[list[int], list[str]]:
    codes: dict[int, int] = {}
    until = time.monotonic() + SECONDS
    while len(codes) < len(children) and time.monotonic() < until:
        for rank, child in enumerate(children):
            if rank not in codes:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for rank, child in enumerate(children):
        if rank not in codes:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert len(codes) == len(children), f"ranks that did not end: {set(range(len(children))) - codes.keys()}"
    said = [(folder / str(rank)).read_text() for rank in range(len(children))]
    return [codes[rank] for rank in range(len(children))], said


def start(work: Callable[[Ranks], None], folder: Path, world_size: int = 2) -> tuple[list[int], list[str]]:
    return begin(work, folder, world_size)()


def _fork(work: Callable[[Ranks], None], env: dict[str, str], said: Path, limits: Limits) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # Not pytest's, which would keep what is said.
        sys.stderr = os.fdopen(2, "w")
        torch.set_num_threads(1)
        with init_ranks("cpu", env=env, limits=limits) as mine:
            work(mine)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 2
    finally:
        os._exit(code)


def steps(mine: Ranks, at_bad: Callable[[], None], *, rank: int = 1) -> None:
    for step in range(1, STEPS + 1):
        mine.enter_step(step)
        if step == BAD_STEP and mine.rank == rank:
            # The other may be a step behind, and would name that one.
            while any(beat.step < BAD_STEP for beat in mine.watchdog._read_others().values()):
                time.sleep(0.01)
            at_bad()
        dist.all_reduce(torch.ones(1))


def test_one_rank_has_no_process_group():
    for env in ({}, environment(0, 1)):
        with init_ranks("cpu", env=env) as mine:
            assert not dist.is_initialized()
            assert (mine.rank, mine.world_size, mine.is_leader) == (0, 1, True)
            mine.enter_step(1)
            mine.leave_step("saving")
            mine.barrier("here")
            assert mine.broadcast("name", [1]) == [1]
            assert mine.any(True) and not mine.any(False)


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT"),
        (environment(0, 2) | {"RANK": "one"}, "whole numbers"),
        (environment(2, 2), "use 0 to 1"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(env, told):
    with pytest.raises(ConfigError, match=told):
        read_rank_env(env)


def test_ranks_that_share_a_gpu_do_not_talk_by_nccl():
    place = read_rank_env(environment(1, 2))
    assert pick_backend("cuda", place, num_devices=8) == (torch.device("cuda", 1), "cpu:gloo,cuda:nccl")
    assert pick_backend("cuda", place, num_devices=1) == (torch.device("cuda", 0), "cpu:gloo,cuda:gloo")
    assert pick_backend("cpu", place, num_devices=8) == (torch.device("cpu"), "gloo")
    with pytest.raises(ConfigError, match="not available"):
        pick_backend("cuda", place, num_devices=0)


def test_ranks_meet_agree_and_leave(tmp_path):
    def work(mine: Ranks) -> None:
        assert mine.broadcast("name", {"a": mine.rank}) == {"a": 0}
        assert mine.broadcast("name", mine.rank + 10) == 10, "the same name again is another value"
        for _ in range(3):
            mine.barrier("again")
        assert mine.any(mine.rank == 1) and not mine.any(False)
        assert mine.is_leader == (mine.rank == 0)
        steps(mine, lambda: None)
        mine.leave_step("saving")

    codes, said = start(work, tmp_path)
    assert codes == [0, 0], said


def test_a_rank_may_be_still_for_longer_at_first_and_outside_of_steps_for_ever(monkeypatch):
    """By a clock that only goes on here: of a real one a slow machine makes what it likes."""
    now, told = 0.0, {}
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
    limits = Limits(hung_after=30.0, hung_after_in_first_steps=600.0)
    mine = Watchdog(SimpleNamespace(set=told.__setitem__), rank=1, world_size=2, limits=limits)

    def is_stuck_after(seconds: float) -> bool:
        nonlocal now
        now += seconds
        mine._send()
        return bool(json.loads(told["heartbeat/1"])["is_stuck"])

    for step in (1, 2):
        mine.mark(step, "computing", timed=True)
        assert not is_stuck_after(5)
    assert not is_stuck_after(590) and is_stuck_after(10)
    mine.mark(3, "saving", timed=False)
    assert not is_stuck_after(1e6)
    mine = Watchdog(SimpleNamespace(set=told.__setitem__), rank=1, world_size=2, limits=limits)
    for step in (1, 2, 3):
        mine.mark(step, "computing", timed=True)
        now += 5
    assert not is_stuck_after(20) and is_stuck_after(10)
    mine.mark(4, "computing", timed=True)
    assert not is_stuck_after(4 * 35 - 5) and is_stuck_after(10), "four times what a step has taken"


def stuck() -> None:
    time.sleep(10 * SECONDS)


@pytest.fixture(scope="module")
def silent(tmp_path_factory) -> dict[str, tuple[list[int], list[str]]]:
    """Jobs in which a rank falls silent, all at once, because the others only wait until they notice."""
    # Its beats must be missed within four of them after the connection was lost.
    killed = replace(PATIENT, interval=2.0, dead_after_lost_connection=0.5, grace=3.0)
    hung = replace(PATIENT, hung_after=5.0, grace=3.0)
    without = replace(
        PATIENT, dead_after=0.5, dead_after_lost_connection=0.5, hung_after=0.5, hung_after_in_first_steps=0.5
    )

    def begin_steps(limits: Limits, at_bad: Callable[[], None], rank: int = 1) -> Callable[[], Any]:
        return begin(lambda mine: steps(mine, at_bad, rank=rank), tmp_path_factory.mktemp("silent"), limits=limits)

    begun = {
        f"rank {bad} is killed": begin_steps(killed, lambda: os.kill(os.getpid(), signal.SIGKILL), bad)
        for bad in (0, 1)
    }
    begun["rank 1 hangs"] = begin_steps(hung, stuck)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watchdog, "_find_failure", lambda self: None)
        begun["rank 1 hangs, without beats"] = begin_steps(without, lambda: time.sleep(2))
    return {name: end() for name, end in begun.items()}


@pytest.mark.parametrize("bad", [0, 1])
def test_a_killed_rank_is_named_with_its_step_and_ends_the_others(bad, silent):
    codes, said = silent[f"rank {bad} is killed"]
    assert codes[bad] == -signal.SIGKILL
    assert codes[1 - bad] != 0
    # Without torchrun rank 0 hosts the store, which is gone with it.
    wanted = (
        f"rank 1 died at step {BAD_STEP}" if bad else f"rank 1 at step {BAD_STEP} (computing): the rendezvous store"
    )
    assert wanted in said[1 - bad], said


def test_a_rank_that_hangs_is_named_with_its_step_and_where(silent):
    codes, said = silent["rank 1 hangs"]
    assert all(codes)
    assert f"rank 1 hangs at step {BAD_STEP}" in said[0]
    assert "in stuck (test_ranks.py:" in said[0]
    assert "rank 0 hangs" not in said[0] + said[1]


def test_a_rank_that_raises_says_so_itself_and_the_others_end_quietly(tmp_path):
    def wrong() -> None:
        raise UnspoolError("the disk is full; make room.")

    codes, said = start(lambda mine: steps(mine, wrong), tmp_path)
    assert codes == [1, 2]
    assert said[1].splitlines() == [
        f"rank 1 failed at step {BAD_STEP} (computing); stopping the job",
        "error: the disk is full; make room.",
    ]
    assert said[0] == ""


def test_a_mistake_that_all_ranks_find_is_told_once(tmp_path):
    def work(mine: Ranks) -> None:
        raise ConfigError("lr must be above 0.")

    codes, said = start(work, tmp_path, world_size=3)
    assert sorted(codes) == [1, 1, 2]
    assert "".join(said).count("lr must be above 0.") == 1


def test_without_beats_a_rank_that_hangs_would_not_be_noticed(silent):
    """What is shown above is the heartbeat's doing."""
    codes, said = silent["rank 1 hangs, without beats"]
    assert codes == [0, 0], said


def test_of_ranks_that_stand_still_those_are_named_that_others_wait_for():
    waits = replace(BEAT, in_collective=True, location="all_reduce (x.py:1)", is_stuck=True)
    assert hang_message({0: waits, 1: BEAT, 2: waits}).startswith("rank 1 hangs at step 7 (computing) in f (x.py:3)")
    behind = replace(waits, step=6, marks=8)
    assert hang_message({0: waits, 1: waits, 2: behind}).startswith("rank 2 hangs at step 6")
    assert "rank 0 hangs" in hang_message({0: waits, 1: waits})


def test_several_that_are_gone_are_all_named():
    told = dead_message({1: BEAT, 3: replace(BEAT, step=0, activity="loading")})
    assert "rank 1 died at step 7" in told
    assert "rank 3 died outside of steps (loading)" in told


class SilentStore:
    """Takes heartbeats and answers nothing, as a store on a machine that vanished."""

    def __init__(self) -> None:
        self.forever = threading.Event()

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        self.forever.wait()
        raise RuntimeError("the connection is gone")


def test_a_rank_whose_store_does_not_answer_ends_and_says_so(monkeypatch, capsys):
    store, ended = SilentStore(), threading.Event()
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: ended.set())
    watched = Watchdog(store, rank=2, world_size=4, limits=Limits(interval=0.02, dead_after=0.1))
    watched.mark(7, "computing", timed=True)

    watched.start()

    assert ended.wait(10)
    watched._stop.set()
    store.forever.set()
    said = capsys.readouterr().err
    assert "rank 2 at step 7 (computing): no answer from the rendezvous store for 0.1 s" in said
    assert "rerun the same command to resume" in said
