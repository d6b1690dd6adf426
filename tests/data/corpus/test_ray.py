"""The Ray engine, against a real Ray on this machine. Starting it takes seconds, so one process tries everything."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from unspool.core.errors import ConfigError
from unspool.data.corpus import cluster
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.executors import run_tasks

from .pipeline_steps import Write, is_alive, outputs, ran, wait_until

pytest.importorskip("ray", reason="Ray is not installed: pip install 'unspool[cluster]'")

TESTS = Path(__file__).parents[2]
MARK = "UNSPOOL_TEST_RAY"
ENGINE = EngineConfig(kind="ray", workers=2)


def run(folder: Path, does=None, *, kind="ray", ranks=range(5), num_tasks=5) -> None:
    folder.mkdir(exist_ok=True)
    engine = ENGINE if kind == "ray" else EngineConfig(kind=kind)
    run_tasks([Write(folder, does)], folder / "tasks", ranks=ranks, num_tasks=num_tasks, engine=engine, label="test")


def remember_folders(root: Path) -> None:
    """List Ray's folders from now on; folders of other runs have the same parent."""

    class Remembered(cluster.TemporaryDirectory):
        def __init__(self, **options) -> None:
            super().__init__(**options)
            with (root / "folders").open("a") as file:
                file.write(f"{self.name}\n")

    cluster.TemporaryDirectory = Remembered


def remembered(root: Path) -> list[Path]:
    return [Path(line) for line in (root / "folders").read_text().splitlines()]


SCRIPT = """
import json, sys
from pathlib import Path
from data.corpus.test_ray import ENGINE, remember_folders, run
from unspool.core.errors import DataError
from unspool.data.corpus.executors import started

root = Path(sys.argv[1])
said = []
remember_folders(root)
run(root / "whole", ranks=range(1, 3))
import ray
said.append(ray.is_initialized())
with started(ENGINE):
    run(root / "whole")
    for name, does in (("broken", {1: "fail"}), ("bug", {1: "divide"})):
        try:
            run(root / name, does)
        except DataError as error:
            said.append(str(error))
    said.append(ray.is_initialized())
(root / "said").write_text(json.dumps(said))
"""


def start(script: str, root: Path, mark: str) -> subprocess.Popen[str]:
    environment = os.environ | {MARK: mark, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", script, str(root)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def processes(mark: str) -> list[int]:
    """Everything that descends from a process that was started with this mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass  # it ended meanwhile, or belongs to someone else
    return list(filter(is_alive, found))


def test_ray_makes_the_same_files_carries_errors_over_and_leaves_nothing_behind(tmp_path):
    mark = uuid.uuid4().hex
    run(tmp_path / "local", kind="local")
    child = start(SCRIPT, tmp_path, mark)
    stdout, stderr = child.communicate(timeout=600)

    assert child.returncode == 0, stderr
    assert outputs(tmp_path / "whole") == outputs(tmp_path / "local")
    tasks = ran(tmp_path / "whole")
    assert sorted(rank for rank, *_ in tasks) == ["0", "1", "2", "3", "4"]
    assert str(child.pid) not in {pid for _, pid, _ in tasks}
    assert {parallelism for *_, parallelism in tasks} == {"false"}
    before, broken, bug, after = json.loads((tmp_path / "said").read_text())
    assert (before, after) == (False, True), "Ray is shut down by whoever started it"
    assert broken == "file-1.jsonl, line 7: broken."
    assert bug.startswith("task 1 failed with ZeroDivisionError")
    assert (stdout, stderr) == ("", "")
    wait_until(lambda: not processes(mark))
    folders = remembered(tmp_path)
    assert len(folders) == 2
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "not an address"])
def test_an_address_where_no_cluster_answers_is_refused(tmp_path, monkeypatch, address):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    engine = EngineConfig(kind="ray", address=address)
    with pytest.raises(ConfigError, match=f"engine.address={address}: no Ray cluster answers at this address"):
        run_tasks([Write(tmp_path)], tmp_path / "tasks", ranks=range(1), num_tasks=1, engine=engine, label="test")


SLEEPS = """
import sys
from pathlib import Path
from data.corpus.test_ray import remember_folders, run
remember_folders(Path(sys.argv[1]))
run(Path(sys.argv[1]) / "killed", {3: "sleep"})
"""


@pytest.mark.slow
def test_ray_ends_with_a_run_that_is_killed_and_a_repeat_does_the_rest(tmp_path):
    mark = uuid.uuid4().hex
    child = start(SLEEPS, tmp_path, mark)
    sleeping = tmp_path / "killed/sleeping-3"
    wait_until(lambda: child.poll() is not None or sleeping.exists())
    assert len(processes(mark)) > 3, "Ray is not running, so the next lines would check nothing"
    child.kill()
    child.communicate()
    wait_until(lambda: not processes(mark))
    # Only the files of Ray's that nobody was left to remove.
    for folder in remembered(tmp_path):
        shutil.rmtree(folder)

    run(tmp_path / "killed", kind="local")
    run(tmp_path / "local", kind="local")
    assert outputs(tmp_path / "killed") == outputs(tmp_path / "local")
