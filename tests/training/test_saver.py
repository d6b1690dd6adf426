"""Checkpoints are written while training goes on, one at a time, and a full disk loses no older one."""

import errno
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from unspool.training.checkpoint import save as checkpoint_module
from unspool.training.checkpoint import save as saver_module
from unspool.training.checkpoint.save import Saver, checkpoints, newest_checkpoint, write_checkpoint


def open_saver(folder: Path) -> Saver:
    return Saver(folder, stage="one", pin=False)


def state(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((64,), value)}


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """Nothing is written before it is set."""
    opened = threading.Event()

    def slowly(*args) -> None:
        assert opened.wait(300)
        write_checkpoint(*args)

    monkeypatch.setattr(saver_module, "write_checkpoint", slowly)
    return opened


def test_a_slow_disk_does_not_hold_up_training_and_gets_the_state_of_its_step(gate, tmp_path):
    tensors = state(1.0)
    with open_saver(tmp_path) as saver:
        saver.save(tensors, {"step": 1}, {})
        # Training goes on: were this to wait for the disk, it would wait forever.
        assert checkpoints(tmp_path) == []
        saver.wait_for_copy()
        tensors["weight"].fill_(2.0)
        gate.set()

    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.tensors()["weight"].tolist() == [1.0] * 64


def test_without_a_copy_a_later_state_would_be_written(gate, tmp_path, monkeypatch):
    """So the test above would notice."""
    monkeypatch.setattr(saver_module.Saver, "_copy", lambda self, tensors: dict(tensors))
    tensors = state(1.0)
    with open_saver(tmp_path) as saver:
        saver.save(tensors, {"step": 1}, {})
        tensors["weight"].fill_(2.0)
        gate.set()
    assert newest_checkpoint(tmp_path).tensors()["weight"].tolist() == [2.0] * 64


def test_the_second_checkpoint_waits_for_the_first_and_says_so(gate, tmp_path, monkeypatch, capsys):
    # Any wait is told of, since how long this one is depends on the machine.
    monkeypatch.setattr(saver_module, "SHORT_S", 0.0)
    with open_saver(tmp_path) as saver:
        saver.save(state(1.0), {"step": 1}, {})
        second = threading.Thread(target=saver.save, args=(state(2.0), {"step": 2}, {}))
        second.start()
        second.join(0.2)
        waits = second.is_alive()
        gate.set()
        second.join()
        assert waits, "two were being written at once"

    said = capsys.readouterr().err
    assert re.search(r"stage one: step 2 waited \d+ s for the checkpoint of step 1;", said), said
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000001", "step-000002"]


def test_buffers_are_used_again_and_hold_each_state_in_turn(tmp_path):
    tensors = state(0.0)
    with open_saver(tmp_path) as saver:
        for step in range(1, 5):
            saver.wait_for_copy()
            tensors["weight"].fill_(step)
            saver.save(tensors, {"step": step}, {})
    assert [float(checkpoint_module.Checkpoint(path, {}).tensors()["weight"][0]) for path in checkpoints(tmp_path)] == [
        3.0,
        4.0,
    ]


# A full disk


@pytest.mark.parametrize("name", ["_sync", "save", "list_files"])
def test_a_full_disk_costs_the_new_checkpoint_only_and_training_goes_on(name, tmp_path, monkeypatch, capsys):
    true = getattr(checkpoint_module, name)
    full = True

    def failing(*args, **kwargs):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return true(*args, **kwargs)

    with open_saver(tmp_path) as saver:
        saver.save(state(1.0), {"step": 1}, {})
        saver.wait()
        monkeypatch.setattr(checkpoint_module, name, failing)
        saver.save(state(2.0), {"step": 2}, {})
        saver.wait()
        assert [path.name for path in tmp_path.iterdir()] == ["step-000001"], "what it took was not given back"
        full = False
        saver.save(state(3.0), {"step": 3}, {})

    said = capsys.readouterr().err
    assert "cannot write the checkpoint of step 2 (No space left on device); the newest is step-000001" in said
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000001", "step-000003"]
    assert newest_checkpoint(tmp_path).step == 3


def test_an_error_that_nobody_foresaw_is_not_swallowed(tmp_path, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(saver_module, "write_checkpoint", broken)
    with open_saver(tmp_path) as saver:
        saver.save(state(1.0), {"step": 1}, {})
        with pytest.raises(ZeroDivisionError):
            saver.wait()


FULL = """
import logging, sys, torch
logging.basicConfig()
from pathlib import Path
from unspool.training.checkpoint.save import checkpoints, newest_checkpoint
from unspool.training.checkpoint.save import Saver
folder = Path(sys.argv[1])
with Saver(folder, stage="one", pin=False) as saver:
    saver.save({"weight": torch.ones(50_000)}, {"step": 1}, {})
    saver.save({"weight": torch.ones(50_000)}, {"step": 2}, {})
    saver.wait()
    print([path.name for path in sorted(folder.iterdir())], float(newest_checkpoint(folder).tensors()["weight"].sum()))
    saver.save({"weight": torch.ones(10)}, {"step": 3}, {})
print([path.name for path in checkpoints(folder)])
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path):
    """200 KB each on a disk of 300 KB."""
    mount = f"mount -t tmpfs -o size=300k tmpfs {tmp_path}"
    command = ["unshare", "-rm", "sh", "-c"]
    try:
        subprocess.run([*command, mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no small disk can be made here without being root")

    done = subprocess.run(
        [*command, f'{mount} && exec "$0" -c "$1" {tmp_path}', sys.executable, FULL], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['step-000001'] 50000.0", "['step-000001', 'step-000003']"]
    assert "cannot write the checkpoint of step 2 (No space left on device); the newest is step-000001" in done.stderr
