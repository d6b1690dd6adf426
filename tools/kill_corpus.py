"""Kill `unspool pack` at random times and check that it ends with the same bytes. Does not import unspool.

    python tools/kill_corpus.py RECIPE WORK_FOLDER [--kills 10] [--seed 0] [--set sources.books.limit=1M ...]

Runs `unspool pack RECIPE --set out=WORK_FOLDER/whole` once without a kill. Then runs it repeatedly with
out=WORK_FOLDER/killed-0 and kills its process group with SIGKILL at a random time within the duration of the first run.
A run that finishes before the kill completes its folder; the next kills go to killed-1, and so on. At the end the last
folder is finished, and the Arrow files of every folder are compared with those of the first.
"""

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

Span = tuple[float, float]


def start(command: list[str], out: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the command in its own process group, so that its workers can be killed too."""
    with log.open("ab") as file:
        return subprocess.Popen([*command, "--set", f"out={out}"], stdout=file, stderr=file, start_new_session=True)


def arrow_files(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*.arrow")):
        with path.open("rb") as file:
            found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def progress(folder: Path) -> str:
    """Return where a killed run stopped, according to its folder."""
    unfinished = sorted(path for path in folder.glob("*/*.partial"))
    done = sum(1 for path in folder.glob("*/*/manifest.json") if path.parent.suffix != ".partial")
    inside = [
        f"{path.relative_to(folder).with_suffix('')} ({len(list(path.glob('*.arrow')))} files)" for path in unfinished
    ]
    return f"{done} parts done" + (f", during {', '.join(inside)}" if inside else "")


def fail(what: str, log: Path) -> None:
    print(f"FAILS {what}; its output is in {log}")
    sys.exit(1)


def run_whole(command: list[str], work: Path) -> Span:
    """Return the seconds until the work begins (after Python's imports) and until it ends."""
    began = time.monotonic()
    running = start(command, work / "whole", work / "whole.log")
    while not (work / "whole" / "corpus").exists() and running.poll() is None:
        time.sleep(0.01)
    first = time.monotonic() - began
    if running.wait() != 0:
        fail("the run without kills", work / "whole.log")
    last = time.monotonic() - began
    print(f"never killed: work from {first:.1f} s to {last:.1f} s, {len(arrow_files(work / 'whole'))} Arrow files")
    return first, last


def kill_runs(
    command: list[str], work: Path, *, kills: int, span: tuple[float, float], rng: random.Random
) -> list[Path]:
    """Kill and repeat; return the folders that were finished."""
    folders: list[Path] = []
    killed = 0
    while True:
        out = work / f"killed-{len(folders)}"
        log = work / f"{out.name}.log"
        running = start(command, out, log)
        if killed < kills:
            moment = rng.uniform(*span)
            try:
                running.wait(moment)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
        code = running.wait()
        if code == -signal.SIGKILL:
            killed += 1
            print(f"kill {killed:3}: after {moment:5.1f} s, {out.name}: {progress(out)}")
        elif code:
            fail(f"a repeated run ended with {code}", log)
        else:
            folders.append(out)
            print(f"{out.name}: ran to its end")
            if killed == kills:
                return folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("work", type=Path, help="a new folder, for the runs and their logs")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="passed on to unspool")
    options = parser.parse_args()
    work = options.work.resolve()
    if work.exists() and any(work.iterdir()):
        sys.exit(f"{work} is not empty; give a new folder.")
    work.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "unspool.cli.main", "pack", options.recipe]
    for change in options.set:
        command += ["--set", change]

    span = run_whole(command, work)
    folders = kill_runs(command, work, kills=options.kills, span=span, rng=random.Random(options.seed))
    expected = arrow_files(work / "whole")
    for folder in folders:
        found = arrow_files(folder)
        different = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        if different or not expected:
            print(f"FAILS {folder.name}: {len(different)} of {len(expected)} Arrow files differ: {different[:5]}")
            sys.exit(1)
    print(f"ok    {options.kills} kills, {len(folders)} folders: all {len(expected)} Arrow files as if never killed")


if __name__ == "__main__":
    main()
