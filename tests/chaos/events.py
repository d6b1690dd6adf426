"""Disturbances of a run: each takes a folder through something bad, and the run that follows must make up for it."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from factory import die
from unspool.cli.main import build_app

Hook = Callable[[], None]
FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


@dataclass
class Sandbox:
    """A recipe, the folder of its run, and commands in forked processes, which need not import anything."""

    recipe: Path
    out: Path
    log: Path
    seconds: float = 0.0  # of a whole run
    num_events: int = 0  # file events of a whole run
    ends: list[tuple[int, str]] = field(default_factory=list)  # exit code and output of every command

    def start(self, *sets: str, hook: Hook | None = None) -> int:
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            descriptor = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            args = ["run", str(self.recipe), *(word for text in (f"out={self.out}", *sets) for word in ("--set", text))]
            sys.argv = ["unspool", *args]
            if hook is not None:
                hook()
            build_app()(args, standalone_mode=True)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def run(self, *sets: str, hook: Hook | None = None) -> int:
        return self.wait(self.start(*sets, hook=hook))

    def wait(self, child: int) -> int:
        return self.note(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def note(self, code: int) -> int:
        self.ends.append((code, self.log.read_text(errors="replace") if self.log.exists() else ""))
        self.log.unlink(missing_ok=True)
        return code

    def files(self) -> list[Path]:
        return sorted(path for path in self.out.rglob("*") if path.is_file() and path.stat().st_size)


def at_event(number: int, react: Callable[[str, tuple[Any, ...]], None], *, stays: bool = False) -> Hook:
    """Call `react` at the `number`-th file event of a process, and with `stays` at every later one."""

    def install() -> None:
        seen = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal seen
            if event in FILE_EVENTS:
                seen += 1
                if seen == number or (stays and seen > number):
                    react(event, args)

        sys.addaudithook(hook)

    return install


def count_events(sandbox: Sandbox, path: Path) -> int:
    def install() -> None:
        seen = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal seen
            if event in FILE_EVENTS:
                seen += 1
                if event == "os.rename" and str(args[1]).endswith("report.html"):
                    os.write(descriptor, str(seen).encode())

        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
        sys.addaudithook(hook)

    assert sandbox.run(hook=install) == 0, sandbox.ends[-1]
    return int(path.read_text() or 0)


# What happens


def kill_at_random_moment(box: Sandbox, rng: random.Random) -> None:
    child = box.start()
    time.sleep(rng.uniform(0.02, box.seconds))
    os.kill(child, signal.SIGKILL)
    box.wait(child)


def kill_at_file_event(box: Sandbox, rng: random.Random) -> None:
    box.run(hook=at_event(rng.randint(1, box.num_events), lambda *_: die()))


def flip_unfinished(box: Sandbox, rng: random.Random) -> None:
    kill_at_file_event(box, rng)
    flip(box, rng)


def truncate_unfinished(box: Sandbox, rng: random.Random) -> None:
    kill_at_file_event(box, rng)
    truncate(box, rng)


def flip_finished(box: Sandbox, rng: random.Random) -> None:
    box.run()
    flip(box, rng)


def truncate_finished(box: Sandbox, rng: random.Random) -> None:
    box.run()
    truncate(box, rng)


def flip(box: Sandbox, rng: random.Random) -> None:
    for path in rng.sample(box.files(), min(1, len(box.files()))):
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)


def truncate(box: Sandbox, rng: random.Random) -> None:
    for path in rng.sample(box.files(), min(1, len(box.files()))):
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def failing_writes(box: Sandbox, number: int, error: int) -> Hook:
    """From some moment on, nothing can be written to the run's folder."""

    def react(event: str, args: tuple[Any, ...]) -> None:
        path = args[0]
        if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(str(box.out)):
            return
        if event == "open":
            mode, flags = args[1], args[2]
            writes = any(sign in str(mode or "") for sign in "wax+") or bool(flags & (os.O_WRONLY | os.O_RDWR))
        else:
            writes = error == errno.EROFS or event == "os.mkdir"
        if writes:
            raise OSError(error, os.strerror(error), os.fspath(path))

    return at_event(number, react, stays=True)


def disk_full(box: Sandbox, rng: random.Random) -> None:
    """A small file system of its own where one can be mounted, so that also writes of C++ and Rust code fail."""
    outside = box.out.with_name("outside")
    box.out.mkdir(parents=True, exist_ok=True)
    used = sum(-(-path.stat().st_size // 4096) * 4 + 4 for path in box.out.rglob("*"))
    box.out.rename(outside)
    box.out.mkdir()
    size = used + rng.randrange(4, 500) * 4
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(box.out)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        box.out.rmdir()
        outside.rename(box.out)
        box.run(hook=failing_writes(box, rng.randint(1, box.num_events), errno.ENOSPC))
        return
    try:
        shutil.copytree(outside, box.out, dirs_exist_ok=True)
        box.run()
        shutil.rmtree(outside)
        shutil.copytree(box.out, outside)
    finally:
        subprocess.run(["umount", str(box.out)], check=True)
    box.out.rmdir()
    outside.rename(box.out)  # as if there were more space now


def read_only(box: Sandbox, rng: random.Random) -> None:
    box.run(hook=failing_writes(box, rng.randint(1, box.num_events), errno.EROFS))


def second_writer(box: Sandbox, rng: random.Random) -> None:
    first = box.start(hook=at_event(rng.randint(1, box.num_events), lambda *_: os.kill(os.getpid(), signal.SIGSTOP)))
    _, status = os.waitpid(first, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        log, box.log = box.log, box.log.with_name("second")
        box.run()
        box.log = log
        os.kill(first, signal.SIGCONT)
        box.wait(first)
    else:  # it ended before
        box.note(os.waitstatus_to_exitcode(status))


def clock_jump(box: Sandbox, rng: random.Random) -> None:
    seconds = rng.choice([-1, 1]) * rng.uniform(3600, 3e8)
    real, real_ns = time.time, time.time_ns

    def jump(event: str, args: tuple[Any, ...]) -> None:
        time.time = lambda: real() + seconds
        time.time_ns = lambda: real_ns() + int(seconds * 1e9)

    def killed_later(event: str, args: tuple[Any, ...]) -> None:
        die()

    number = rng.randint(1, box.num_events)

    def hook() -> None:
        at_event(number, jump)()
        at_event(rng.randint(number, box.num_events), killed_later)()

    box.run(hook=hook)
    for path in box.files():
        os.utime(path, (time.time() + seconds, time.time() + seconds))


CHANGES = ("stages.0.lr=2e-3", "datasets.long.seq_len=64", "evals.0.samples=3", "sources.books.limit=2K", "seed=7")


def changed_recipe_and_back(box: Sandbox, rng: random.Random) -> None:
    change = rng.choice(CHANGES)
    for sets in rng.choice([((), (change,)), ((change,), ()), ((change,), (), (change,)), ((), (change,), ())]):
        box.run(*sets, hook=at_event(rng.randint(1, box.num_events), lambda *_: die()))


KINDS: dict[str, Callable[[Sandbox, random.Random], None]] = {
    "kill at a random moment": kill_at_random_moment,
    "kill at a file event": kill_at_file_event,
    "byte flip in unfinished work": flip_unfinished,
    "truncation in unfinished work": truncate_unfinished,
    "byte flip in finished work": flip_finished,
    "truncation in finished work": truncate_finished,
    "disk full": disk_full,
    "read-only": read_only,
    "second writer": second_writer,
    "clock jump": clock_jump,
    "changed recipe and back": changed_recipe_and_back,
}
