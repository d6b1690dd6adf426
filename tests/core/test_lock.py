"""One writer per folder: the error names the first writer, and a dead process holds no lock."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from factory import die, in_child
from unspool.core import lock
from unspool.core.errors import BusyError, explain
from unspool.core.lock import LOCK, lock_output, lock_run, wait_for_lock


@contextmanager
def other_process(work: Callable[[Callable[[], None]], None]) -> Iterator[int]:
    """A forked process that has called the function it was given, and then sleeps until it is killed."""
    ready, told = os.pipe()

    def sleep() -> None:
        os.write(told, b"1")
        time.sleep(60)

    child = os.fork()
    if child == 0:
        try:
            work(sleep)
        finally:
            os._exit(3)
    os.close(told)
    assert os.read(ready, 1) == b"1", "the other process could not lock"
    os.close(ready)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def holding(folder: Path, **options) -> Callable[[Callable[[], None]], None]:
    def work(ready: Callable[[], None]) -> None:
        with lock_run(folder, **options):
            ready()

    return work


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_second_writer_gets_the_first_ones_name_and_changes_nothing(tmp_path):
    with other_process(holding(tmp_path / "run")) as pid:
        before = contents(tmp_path)
        with pytest.raises(BusyError) as error, lock_run(tmp_path / "run"):
            pytest.fail("two writers in one folder")
        assert contents(tmp_path) == before
        holder = json.loads((tmp_path / "run" / LOCK).read_text())

    text = str(error.value)
    assert f"{tmp_path / 'run'} is in use: process {pid} on {socket.gethostname()}" in text
    assert f"since {holder['started']}" in text
    assert holder["command"][:100] in text
    assert "\n" not in text


def test_the_lock_holders_description_cannot_move_the_cursor(tmp_path):
    text = lock._describe(tmp_path, {"pid": 1, "host": "h\x1b[2J", "started": "now", "command": "a\nb\x07"})
    assert text.isprintable()


def test_a_killed_process_holds_nothing(tmp_path):
    def work() -> None:
        with lock_run(tmp_path / "run"):
            die()

    assert in_child(work) == -signal.SIGKILL
    assert (tmp_path / "run" / LOCK).exists(), "it died too early to test anything"
    with lock_run(tmp_path / "run"):
        pass


@pytest.mark.parametrize("kind", ["forked", "started"])
def test_a_child_of_a_killed_process_does_not_keep_its_lock(kind, tmp_path):
    """The child lives on, as workers may for a moment."""

    def work() -> None:
        with lock_run(tmp_path / "run"):
            if kind == "forked":
                child = os.fork()
                if child == 0:
                    time.sleep(60)
                    os._exit(0)
            else:
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False).pid
            (tmp_path / "child").write_text(str(child))
            time.sleep(0.05)
            die()

    assert in_child(work) == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    try:
        os.kill(child, 0)
        with lock_run(tmp_path / "run"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_ends_does_not_release_the_lock_of_its_parent(tmp_path):
    with lock_run(tmp_path / "run"):
        assert in_child(lambda: None) == 0

        def try_it() -> None:
            with pytest.raises(BusyError), lock_run(tmp_path / "run"):
                pass

        assert in_child(try_it) == 0
        assert (tmp_path / "run" / LOCK).exists()


def test_nothing_is_left_behind(tmp_path):
    with pytest.raises(ValueError, match="refused"), lock_run(tmp_path / "new" / "run"):
        raise ValueError("refused")
    assert list(tmp_path.iterdir()) == []

    with lock_run(tmp_path / "run"):
        (tmp_path / "run" / "result").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["result"]


def test_shared_locks_exclude_only_exclusive_ones(tmp_path):
    with other_process(holding(tmp_path, shared=True)):
        with lock_run(tmp_path, shared=True):
            pass
        with pytest.raises(BusyError), lock_run(tmp_path):
            pass
        assert (tmp_path / LOCK).exists(), "the other process still needs it"
    with lock_run(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("inside", ["scores/base", "scores/base/judgements.jsonl"])
def test_folders_inside_a_run_are_locked_with_the_run(inside, tmp_path):
    with (
        other_process(holding(tmp_path / "run")),
        pytest.raises(BusyError, match="run is in use"),
        lock_output(tmp_path / "run" / inside),
    ):
        pass


def test_folders_outside_runs_are_locked_alone(tmp_path):
    with lock_output(tmp_path / "scores"):
        assert not (tmp_path / "scores").exists()
        with lock_output(tmp_path / "others"):
            pass
        with pytest.raises(BusyError, match="scores is in use"), lock_output(tmp_path / "scores"):
            pass
    assert list(tmp_path.iterdir()) == []


def test_waiting_ends_with_the_other_process(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.01)

    def work(ready: Callable[[], None]) -> None:
        with wait_for_lock(tmp_path / LOCK):
            ready()

    with other_process(work) as child:
        os.kill(child, signal.SIGKILL)
        with wait_for_lock(tmp_path / LOCK):
            pass


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file/run"), lock_run(tmp_path / "file" / "run"):
        pass


# Without locks


@pytest.fixture
def no_locks(request, monkeypatch):
    number = getattr(request, "param", errno.ENOLCK)

    def flock(descriptor: int, mode: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    monkeypatch.setattr(lock, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(lock, "EXPIRE_SECONDS", 0.4)


def from_another_host(folder: Path) -> None:
    """As if the lease there were of a process on another machine."""
    path = folder / (LOCK + lock.LEASE)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "elsewhere"}))


@pytest.mark.parametrize("no_locks", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], indirect=True)
def test_without_locks_a_lease_is_used_and_logged(no_locks, tmp_path, capsys):
    with lock_run(tmp_path / "run"):
        assert (tmp_path / "run" / (LOCK + lock.LEASE)).exists()
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().err
    assert said.count("this file system has no locks") == 1


def test_a_lease_that_is_renewed_excludes_others(no_locks, tmp_path):
    with other_process(holding(tmp_path)) as pid:
        from_another_host(tmp_path)
        with pytest.raises(BusyError, match=f"process {pid} on elsewhere"), lock_run(tmp_path):
            pass


def test_a_lease_of_a_dead_process_of_this_machine_is_taken_over_at_once(no_locks, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "EXPIRE_SECONDS", 60)
    with other_process(holding(tmp_path)):
        pass
    with lock_run(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_expired_lease_is_taken_over_even_if_clocks_differ(no_locks, tmp_path):
    with other_process(holding(tmp_path)):
        pass
    from_another_host(tmp_path)
    ahead = time.time() + 86400
    os.utime(tmp_path / (LOCK + lock.LEASE), (ahead, ahead))
    began = time.monotonic()
    with lock_run(tmp_path):
        assert time.monotonic() - began >= lock.EXPIRE_SECONDS


def test_whoever_lost_its_lease_while_it_was_suspended_ends(no_locks, tmp_path):
    def work() -> None:
        os.dup2(os.open(tmp_path / "said", os.O_CREAT | os.O_WRONLY), 2)
        with lock_run(tmp_path / "run"):
            lease = tmp_path / "run" / (LOCK + lock.LEASE)
            lease.rename(lease.with_name("taken"))
            lease.write_text("{}")
            time.sleep(10)

    assert in_child(work) == 2


def test_a_refused_lock_names_the_output_and_not_the_lock_file(tmp_path, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(lock.os, "open", refuse)
    with pytest.raises(PermissionError) as caught, lock_output(tmp_path / "scores"):
        pass
    assert (
        explain(caught.value) == f"{tmp_path}/scores: permission denied; change the permissions, or use another path."
    )
