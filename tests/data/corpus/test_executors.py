import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from unspool.core.errors import ConfigError, DataError
from unspool.data.corpus import executors
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.executors import check_engine, run_tasks

from .pipeline_steps import Write, is_alive, outputs, ran, wait_until

TESTS = Path(__file__).parents[2]


def run(folder: Path, does=None, *, workers: int = 1, ranks: range = range(5), num_tasks: int = 5) -> None:
    engine = EngineConfig(workers=workers)
    run_tasks([Write(folder, does)], folder / "tasks", ranks=ranks, num_tasks=num_tasks, engine=engine, label="test")


def whole(num_tasks: int) -> dict[str, str]:
    return {f"out-{rank:05d}.txt": f"task {rank} of {num_tasks}\n" for rank in range(num_tasks)}


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_every_task_runs_once_for_any_number_of_workers_and_prints_nothing(tmp_path, capfd, workers):
    run(tmp_path, workers=workers)

    assert outputs(tmp_path) == whole(5)
    assert sorted(int(rank) for rank, *_ in ran(tmp_path)) == list(range(5))
    assert sorted(path.name for path in (tmp_path / "tasks/completions").iterdir()) == [f"0000{n}" for n in range(5)]
    assert capfd.readouterr() == ("", "")


def test_only_requested_ranks_run_and_completed_ones_do_not_run_again(tmp_path):
    for ranks, expected in ((range(1, 3), ["1", "2"]), (range(4), ["0", "3"]), (range(4), [])):
        run(tmp_path, ranks=ranks)
        assert [rank for rank, *_ in ran(tmp_path)] == expected


def test_one_worker_or_one_rank_stays_in_this_process_and_several_leave_it(tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    here = str(os.getpid())
    for name, workers, ranks in (("worker", 1, range(3)), ("rank", 4, range(1))):
        folder = tmp_path / name
        folder.mkdir()
        run(folder, workers=workers, ranks=ranks)
        assert {tuple(where) for _, *where in ran(folder)} == {(here, "None")}

    run(tmp_path, workers=2)
    away = ran(tmp_path)
    assert here not in {pid for _, pid, _ in away}
    assert len({pid for _, pid, _ in away}) <= 2
    assert {parallelism for *_, parallelism in away} == {"false"}
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_statistics_are_those_of_one_task_although_processes_are_used_again(tmp_path):
    run(tmp_path)
    for rank in range(5):
        (step,) = json.loads((tmp_path / f"tasks/stats/0000{rank}.json").read_text())
        assert step["stats"]["tasks"] == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_task_reports_its_own_message_and_a_repeat_runs_missing_tasks(tmp_path, capfd, workers):
    with pytest.raises(DataError, match=r"^file-3.jsonl, line 7: broken\.$"):
        run(tmp_path, {3: "fail"}, workers=workers)
    assert (tmp_path / "tasks/error-00003.txt").read_text() == "file-3.jsonl, line 7: broken."
    assert capfd.readouterr() == ("", "")
    done = {path.name for path in (tmp_path / "tasks/completions").iterdir()}
    assert done and "00003" not in done

    ran(tmp_path)
    run(tmp_path, workers=workers)
    assert {f"0000{rank}" for rank, *_ in ran(tmp_path)} == {f"0000{rank}" for rank in range(5)} - done
    assert outputs(tmp_path) == whole(5)
    assert not list((tmp_path / "tasks").glob("error-*"))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bug_in_a_task_is_named_and_its_traceback_kept(tmp_path, workers):
    with pytest.raises(
        DataError, match=r"^task 1 failed with ZeroDivisionError: .*; the traceback is in .*\.log\.$"
    ) as e:
        run(tmp_path, {1: "divide"}, workers=workers)
    log = Path(str(e.value).removesuffix(".").rpartition(" ")[2])
    assert "rank // 0" in log.read_text()


def test_a_worker_that_is_killed_is_an_error_and_not_a_wait_without_end(tmp_path):
    with pytest.raises(DataError, match=r"worker process of task 2 was killed by SIGKILL; .* lower engine.workers"):
        run(tmp_path, {2: "die"}, workers=2)
    run(tmp_path, workers=2)
    assert outputs(tmp_path) == whole(5)


SLEEPS = """
import signal, sys
from pathlib import Path
# As from a terminal, also where the tests run in the background of a shell, which ignores Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[2])
from data.corpus.test_executors import run
run(Path(sys.argv[1]), {2: "sleep", 3: "sleep"}, workers=2)
"""


@contextmanager
def sleeping_run(folder: Path):
    """Start a separate run, as from a terminal, whose two workers sleep; return it and their pids."""
    command = [sys.executable, "-c", SLEEPS, str(folder), str(TESTS)]
    child = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        marks = [folder / "sleeping-2", folder / "sleeping-3"]
        wait_until(lambda: child.poll() is not None or all(mark.exists() and mark.read_text() for mark in marks))
        yield child, [int(mark.read_text()) for mark in marks]
    finally:
        child.kill()
        child.communicate()


def test_ctrl_c_ends_the_worker_processes_and_only_one_process_complains(tmp_path):
    with sleeping_run(tmp_path) as (child, pids):
        assert all(map(is_alive, pids)), "the workers are gone already, so the next lines would check nothing"
        # A terminal sends the signal to all of them, but a worker that receives it would also print an error.
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        time.sleep(0.2)
        assert all(map(is_alive, pids))
        os.killpg(child.pid, signal.SIGINT)
        _, stderr = child.communicate(timeout=300)

        assert stderr.count("Traceback") == 1
        assert stderr.strip().endswith("KeyboardInterrupt")
        # What they had open is closed a moment before they are gone.
        wait_until(lambda: not any(map(is_alive, pids)))
    run(tmp_path)
    assert outputs(tmp_path) == whole(5)


def test_workers_end_with_a_run_that_is_killed_and_a_repeat_ends_with_the_same_files(tmp_path):
    with sleeping_run(tmp_path) as (child, pids):
        assert all(map(is_alive, pids))
        child.kill()
        wait_until(lambda: not any(map(is_alive, pids)))
    run(tmp_path, workers=2)
    assert outputs(tmp_path) == whole(5)


@contextmanager
def holding(path: Path, mode: int):
    path.parent.mkdir(exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, mode)
        yield file


def test_a_run_waits_for_running_tasks_of_a_killed_run(tmp_path):
    with holding(tmp_path / "tasks/tasks.lock", fcntl.LOCK_SH) as orphan:
        seen = []

        def end() -> None:
            seen.append(outputs(tmp_path))
            fcntl.flock(orphan, fcntl.LOCK_UN)

        timer = threading.Timer(0.3, end)
        timer.start()
        run(tmp_path)
        timer.join()
    assert seen == [{}]
    assert outputs(tmp_path) == whole(5)


def test_tasks_of_an_earlier_run_that_do_not_end_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "ORPHAN_SECONDS", 0.05)
    with (
        holding(tmp_path / "tasks/tasks.lock", fcntl.LOCK_SH),
        pytest.raises(DataError, match="tasks of an earlier run are still running here"),
    ):
        run(tmp_path)
    assert outputs(tmp_path) == {}


def test_a_task_at_work_holds_the_lock_that_a_later_run_waits_for(tmp_path):
    with sleeping_run(tmp_path), (tmp_path / "tasks/tasks.lock").open("a+b") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_two_runs_in_one_folder_are_refused(tmp_path):
    with (
        holding(tmp_path / "tasks/run.lock", fcntl.LOCK_EX),
        pytest.raises(DataError, match="another run is preparing documents here"),
    ):
        run(tmp_path)
    assert outputs(tmp_path) == {}


def test_tasks_run_on_file_systems_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    run(tmp_path)
    assert outputs(tmp_path) == whole(5)


def test_the_bar_counts_completed_tasks_and_is_hidden_without_a_terminal(tmp_path, monkeypatch):
    bars = []

    @contextmanager
    def bar(label, total):
        bars.append([label, total])
        yield lambda amount, note="": bars[-1].append(amount)

    monkeypatch.setattr(executors, "progress_bar", bar)
    run(tmp_path, ranks=range(2))
    assert bars == []

    monkeypatch.setattr(type(executors.console), "is_terminal", True)
    run(tmp_path)
    ((label, total, *amounts),) = bars
    assert (label, total, sum(amounts)) == ("test", 5, 5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partition": "cpu"}, "partition is an option of kind: slurm; remove it, or use kind: slurm"),
        ({"kind": "ray", "memory_gb": 8}, "memory_gb is an option of kind: slurm"),
        ({"kind": "slurm", "address": "auto"}, "address is an option of kind: ray"),
        ({"sbatch": {"account": "x"}}, "sbatch is an option of kind: slurm"),
        ({"kind": "slurm", "time": 43200}, 'a Slurm time limit, such as "02:00:00"'),
        ({"kind": "slurm", "time": "soon"}, 'a Slurm time limit, such as "02:00:00"'),
        ({"kind": "slurm", "sbatch": {"array": "0-3"}}, "array cannot be set here: Unspool numbers the tasks"),
        ({"kind": "slurm", "sbatch": {"mem": "4G"}}, "write engine.memory_gb instead"),
        ({"kind": "slurm", "sbatch": {"--account": "x"}}, "without dashes in front, such as account: physics"),
        ({"kind": "slurm", "sbatch": {"account": "x\nrm -r ."}}, "such as account: physics"),
        ({"kind": "slurm", "partition": "cpu\nrm"}, "partition"),
        ({"workers": 0}, "workers"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(ValidationError) as error:
        EngineConfig(**options)
    assert said in str(error.value)


@pytest.mark.parametrize("time", ["30", "02:00:00", "1-12", "1-12:00:00"])
def test_the_time_limits_of_slurm_are_taken(time):
    assert EngineConfig(kind="slurm", time=time).time == time


def test_engines_that_cannot_run_here_are_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(executors.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm = EngineConfig(kind="slurm", partition="cpu")
    check_engine(EngineConfig())
    for engine, said in (
        (EngineConfig(kind="ray"), r"Ray is not installed; run `pip install 'unspool\[cluster\]'`"),
        (EngineConfig(kind="slurm"), "engine.partition is missing"),
        (slurm, "this machine has no command sbatch"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_engine(engine)
        with pytest.raises(ConfigError, match=said):
            run_tasks([], tmp_path / "tasks", ranks=range(1), num_tasks=1, engine=engine, label="test")
    assert not (tmp_path / "tasks").exists()

    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    with pytest.raises(ConfigError, match="use kind: local in it"):
        check_engine(slurm)
