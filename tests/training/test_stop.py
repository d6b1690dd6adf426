"""Asked to stop, a stage finishes and saves the running step; asked twice, it ends at once."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from factory import in_child, save_mini
from unspool.training import loop as loop_module
from unspool.training.checkpoint.save import checkpoints
from unspool.training.schedule import StoppedError, catch_stop_signals

from .stage_runs import assert_same_result, run


def signalled(number: signal.Signals, *, step: int, times: int = 1):
    """A step during which the signal comes."""
    true_step, calls = loop_module.train_step, []

    def step_with_signal(*args, **kwargs):
        calls.append(1)
        for _ in range(times if len(calls) == step else 0):
            os.kill(os.getpid(), number)
        return true_step(*args, **kwargs)

    return step_with_signal


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_running_step_and_loses_nothing(
    number, code, materials, never_killed, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "one"
    before = signal.getsignal(number)
    with monkeypatch.context() as patched, pytest.raises(StoppedError) as stopped:
        patched.setattr(loop_module, "train_step", signalled(number, step=3))
        run(materials, out)

    assert stopped.value.code == code
    assert signal.getsignal(number) == before
    said = capsys.readouterr().err
    assert f"stage one: {number.name}: stopping after this step; send it again to stop at once" in said
    assert f"stage one: stopped by {number.name}, saved as step-000003; rerun the same command to resume" in said
    assert [path.name for path in checkpoints(tmp_path / "one.work" / "checkpoints")] == ["step-000002", "step-000003"]

    run(materials, out)
    assert "resuming after step 3" in capsys.readouterr().err
    assert_same_result(out, never_killed)


def test_a_second_signal_ends_the_process_at_once(materials, tmp_path, monkeypatch):
    monkeypatch.setattr(loop_module, "train_step", signalled(signal.SIGTERM, step=3, times=2))
    assert in_child(lambda: run(materials, tmp_path / "one")) == -signal.SIGTERM
    assert [path.name for path in checkpoints(tmp_path / "one.work" / "checkpoints")] in ([], ["step-000002"])


def test_in_a_job_of_several_ranks_sigterm_may_come_twice(capsys):
    """Slurm sends it to every process of a job, and torchrun to its ranks once more."""
    with catch_stop_signals("stage one", ranks=2) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal is signal.SIGTERM
    assert capsys.readouterr().err.endswith("stage one: SIGTERM: stopping after this step\n")


def test_elsewhere_than_in_the_main_thread_nothing_is_listened_to():
    def listening() -> None:
        with catch_stop_signals("x") as stop:
            found.append(stop.signal)

    found: list[object] = []
    thread = threading.Thread(target=listening)
    thread.start()
    thread.join()
    assert found == [None]


@pytest.mark.slow
def test_the_command_ends_with_the_code_of_the_signal_and_without_a_traceback(tmp_path):
    recipe = save_mini(tmp_path)
    command = [sys.executable, "-m", "unspool.cli.main", "train", str(recipe), "--stage", "first"]
    # Long enough to be met in the middle.
    sets = [f"out={tmp_path / 'out'}", "stages.first.tokens=25600000", "stages.first.checkpoint_every=100000"]
    child = subprocess.Popen([*command, *(part for one in sets for part in ("--set", one))], stderr=subprocess.PIPE)
    work = tmp_path / "out" / "stages" / "first.work"
    began = time.monotonic()
    while not (work / "metrics.jsonl").is_file() and time.monotonic() - began < 300:
        time.sleep(0.2)
    child.send_signal(signal.SIGTERM)
    said = child.communicate(timeout=300)[1].decode()

    assert child.returncode == 143, said
    assert "stopped by SIGTERM, saved as step-" in said
    assert "Traceback" not in said
    assert not [line for line in said.splitlines() if line.startswith("error")]
    assert len(checkpoints(work / "checkpoints")) == 1
