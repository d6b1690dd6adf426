"""`tools/run_study.py start --mps`, with a script in the place of NVIDIA's control program."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import run_study  # noqa: E402
from mps import CONTROL, MAX_PIPE_PATH, find_control, mps  # noqa: E402
from run_study import Queue, Run  # noqa: E402

# Refuses to start while one runs, as NVIDIA's does. `calls` has what it was asked for.
SCRIPT = """#!/bin/sh
pipe="$CUDA_MPS_PIPE_DIRECTORY"
if [ "$1" = "-d" ]; then
    [ -e {folder}/broken ] && echo "no device" && exit 1
    [ -e "$pipe/control" ] && echo "An instance of this daemon is already running" && exit 1
    touch "$pipe/control" && echo "start $pipe $CUDA_MPS_LOG_DIRECTORY" >> {folder}/calls
else
    read word && rm -f "$pipe/control" && echo "$word $pipe" >> {folder}/calls
fi
"""
NAMES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / CONTROL).write_text(SCRIPT.format(folder=folder))
    (folder / CONTROL).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def out(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("o")
    assert len(str(found / "mps" / "pipe")) <= MAX_PIPE_PATH
    return found


def calls(fake: Path) -> list[str]:
    return (fake / "calls").read_text().splitlines() if (fake / "calls").exists() else []


def start(monkeypatch, out: Path, command: list[str]) -> int:
    """Start one run with this command and --mps."""
    queue = Queue([Run("a", command, out)], out, out, at_once=1, training=1, limit=30)
    monkeypatch.setattr(run_study, "build_queue", lambda args: queue)
    monkeypatch.setattr(run_study, "POLL", 0.02)
    monkeypatch.setattr(sys, "argv", ["run_study.py", "start", str(out), "a", "--model", "m", "--mps"])
    return run_study.main()


def test_runs_get_the_folders_of_a_daemon_that_ends_with_them(fake, out, monkeypatch):
    assert start(monkeypatch, out, ["sh", "-c", f"echo ${NAMES[0]} ${NAMES[1]} > {out}/seen; ls ${NAMES[0]}"]) == 0
    pipe, log = out / "mps" / "pipe", out / "mps" / "log"
    assert (out / "seen").read_text().split() == [str(pipe), str(log)]
    _, listed = (out / "logs" / "a.log").read_text().splitlines()
    assert listed == "control", "the daemon runs while the run does"
    assert calls(fake) == [f"start {pipe} {log}", f"quit {pipe}"]
    assert not any(name in os.environ for name in NAMES)


def test_the_daemon_ends_after_a_failed_run_too(fake, out, monkeypatch):
    assert start(monkeypatch, out, ["false"]) == 1
    assert [line.split()[0] for line in calls(fake)] == ["start", "quit"]


def test_a_long_path_gets_a_short_folder_for_sockets(fake, tmp_path):
    long = tmp_path / ("long" * 30)
    with mps(find_control(), long):
        pipe = Path(os.environ[NAMES[0]])
        assert len(str(pipe)) <= MAX_PIPE_PATH and (pipe / "control").exists()
        assert os.environ[NAMES[1]] == str(long / "mps" / "log")
    assert not pipe.exists() and calls(fake)[-1] == f"quit {pipe}"


def test_a_daemon_that_was_left_behind_is_replaced(fake, out):
    (out / "mps" / "pipe").mkdir(parents=True)
    (out / "mps" / "pipe" / "control").touch()
    with mps(find_control(), out):
        assert [line.split()[0] for line in calls(fake)] == ["quit", "start"]


def test_without_the_program_the_runs_start_and_one_sentence_says_so(out, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert start(monkeypatch, out, ["/bin/sh", "-c", f"echo ${NAMES[0]}"]) == 0
    assert capsys.readouterr().out.startswith(f"--mps: {CONTROL} is not on PATH, so the runs share the GPU in turns.\n")
    _, folder = (out / "logs" / "a.log").read_text().splitlines()
    assert folder == "" and not (out / "mps").exists()


def test_a_daemon_that_does_not_start_is_named_and_not_used(fake, out, capsys):
    (fake / "broken").touch()
    with mps(find_control(), out):
        assert not any(name in os.environ for name in NAMES)
    assert capsys.readouterr().out == (
        "--mps: the daemon did not start (no device), so the runs share the GPU in turns.\n"
    )
