"""The Slurm engine, against stand-ins for Slurm's commands that run the job array on this machine."""

import os
import re
import sys
import threading
from pathlib import Path

import pytest

from unspool.core.errors import ConfigError, DataError
from unspool.data.corpus import cluster
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.executors import run_tasks

from .pipeline_steps import Write, outputs, ran, wait_until

# `queue/17` exists while job 17 has entries that wait or run. MODE is run, lose (the job vanishes) or refuse.
COMMANDS = {
    "sbatch": """
        [ "$MODE" = refuse ] && { echo "sbatch: error: invalid partition" >&2; exit 1; }
        script="$FAKE/script"
        cp "${!#}" "$script"
        echo "$*" > "$FAKE/arguments"
        echo "Submitted batch job 17"
        [ "$MODE" = lose ] && exit 0
        touch "$FAKE/queue/17"
        last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$script")
        output=$(sed -n 's/^#SBATCH --output=//p' "$script")
        export SLURM_ARRAY_JOB_ID=17 SLURM_JOB_ID=17 SLURM_NODELIST=node1 RUN_OFFSET=0
        (
          for entry in $(seq 0 "$last"); do
            log=${output//%A/17}
            SLURM_ARRAY_TASK_ID=$entry bash "$script" > "${log//%a/$entry}" 2>&1
          done
          rm -f "$FAKE/queue/17"
        ) > /dev/null 2>&1 &
    """,
    "squeue": """
        echo "$*" >> "$FAKE/asked"
        [ -e "$FAKE/silent" ] && { rm "$FAKE/silent"; echo "Unable to contact slurm controller" >&2; exit 1; }
        [ -e "$FAKE/queue/$3" ] && { echo "$3_0 cpu unspool me R 0:01 1 node1"; exit 0; }
        echo "slurm_load_jobs error: Invalid job id specified" >&2
        exit 1
    """,
    "srun": """
        while [[ "$1" == -* ]]; do [ "$1" = -n ] && shift; shift; done
        exec "$@"
    """,
    "scontrol": """
        echo "$3"
    """,
    "scancel": """
        echo "$1" >> "$FAKE/cancelled"
        rm -f "$FAKE/queue/$1"
    """,
}


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """Folder of the stand-ins' state."""
    fake = tmp_path / "slurm"
    (fake / "bin").mkdir(parents=True)
    (fake / "queue").mkdir()
    for name, body in COMMANDS.items():
        path = fake / "bin" / name
        path.write_text("#!/bin/bash\n" + body)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(fake))
    monkeypatch.setenv("MODE", "run")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # where the job finds this test's step
    monkeypatch.setattr(cluster, "POLL_SECONDS", 0.02)
    return fake


def run(folder: Path, does=None, *, ranks=range(3), num_tasks=3, kind="slurm", **options) -> None:
    folder.mkdir(exist_ok=True)
    engine = EngineConfig(kind=kind, partition="cpu", **options) if kind == "slurm" else EngineConfig(kind=kind)
    run_tasks([Write(folder, does)], folder / "tasks", ranks=ranks, num_tasks=num_tasks, engine=engine, label="test")


def test_a_job_array_makes_the_same_files_as_local_processes_and_prints_nothing(tmp_path, slurm, capfd):
    run(tmp_path / "local", kind="local")
    options = {"time": "00:30:00", "memory_gb": 6, "cpus": 2, "sbatch": {"account": "physics", "exclusive": ""}}
    run(tmp_path / "slurm-out", ranks=range(1), **options)
    run(tmp_path / "slurm-out", workers=2, **options)

    assert outputs(tmp_path / "slurm-out") == outputs(tmp_path / "local")
    assert [rank for rank, *_ in ran(tmp_path / "slurm-out")] == ["0", "1", "2"]
    assert capfd.readouterr() == ("", "")
    script = (slurm / "script").read_text()
    assert dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE)) == {
        "partition": "cpu",
        "time": "00:30:00",
        "mem": "6G",
        "cpus-per-task": "2",
        "nodes": "1",
        "account": "physics",
        "exclusive": "",
        "array": "0-1%2",  # of three tasks one was complete
        "job-name": "unspool",
        "requeue": "",
        "output": str(tmp_path / "slurm-out/tasks/slurm_logs/%A_%a.out"),
        "error": str(tmp_path / "slurm-out/tasks/slurm_logs/%A_%a.out"),
    }
    activate = Path(sys.executable).with_name("activate")
    assert f"source {activate}" in script or f"export PATH={activate.parent}:$PATH" in script
    assert "dependency" not in (slurm / "arguments").read_text(), "a second job was submitted"


def test_a_failed_task_ends_the_job_and_speaks_for_itself(tmp_path, slurm):
    with pytest.raises(DataError, match=r"^file-0.jsonl, line 7: broken\.$"):
        run(tmp_path / "out", {0: "fail"}, ranks=range(1), num_tasks=1)
    assert (slurm / "cancelled").read_text() == "17\n"
    # The sentence appears before the job's own process ends and also prints it.
    wait_until(lambda: "line 7: broken" in (tmp_path / "out/tasks/slurm_logs/17_0.out").read_text())


def test_a_job_that_vanishes_is_an_error_that_names_its_logs(tmp_path, slurm, monkeypatch):
    monkeypatch.setenv("MODE", "lose")
    said = r"Slurm job 17 ended without task 0 and 2 others: .*; the logs are in .*/out/tasks/slurm_logs\.$"
    with pytest.raises(DataError, match=said):
        run(tmp_path / "out")
    assert set((slurm / "asked").read_text().splitlines()) == {"-h -j 17"}


def test_a_silent_scheduler_is_polled_again(tmp_path, slurm):
    (slurm / "queue/17").touch()
    (slurm / "silent").touch()
    assert cluster._is_queued("17"), "no answer is not the same as no job"
    assert cluster._is_queued("17")
    (slurm / "queue/17").unlink()
    assert not cluster._is_queued("17")


def test_a_rejected_job_is_an_error_after_the_message_of_sbatch(tmp_path, slurm, monkeypatch, capfd):
    monkeypatch.setenv("MODE", "refuse")
    with pytest.raises(ConfigError, match=r"sbatch rejected the job .*; check engine.partition"):
        run(tmp_path / "out")
    assert capfd.readouterr().err == "sbatch: error: invalid partition\n"


def test_a_folder_with_a_space_is_refused(tmp_path, slurm):
    with pytest.raises(ConfigError, match="Slurm jobs need a path without spaces"):
        run(tmp_path / "my out")


def test_a_run_that_was_killed_finds_its_job_again_and_submits_no_other(tmp_path, slurm):
    out = tmp_path / "out"
    (out / "tasks/completions").mkdir(parents=True)
    (out / "tasks/slurm_job").write_text("12")
    (slurm / "queue/12").touch()

    def job() -> None:
        wait_until((slurm / "asked").exists)
        for rank in range(3):
            (out / f"tasks/completions/0000{rank}").touch()
        (slurm / "queue/12").unlink()

    earlier = threading.Thread(target=job)
    earlier.start()
    run(out)
    earlier.join()
    assert not (slurm / "script").exists()


def test_ctrl_c_cancels_the_job(tmp_path, slurm, monkeypatch):
    def interrupt(job: str) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setenv("MODE", "lose")
    monkeypatch.setattr(cluster, "_is_queued", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out")
    assert (slurm / "cancelled").read_text() == "17\n"


def test_more_tasks_than_an_array_may_have_share_its_entries(tmp_path, slurm, monkeypatch):
    monkeypatch.setattr(cluster, "MAX_ARRAY", 1)
    run(tmp_path / "out", ranks=range(2), workers=8)
    assert "#SBATCH --array=0-0%2" in (slurm / "script").read_text()
    assert len(outputs(tmp_path / "out")) == 2
