"""A job under a real Slurm of one node that is requeued in the middle and ends as if nothing had happened.

Needs root and Debian's slurmctld, slurmd, slurm-client and munge (tools/slurm_up.sh).
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .rank_jobs import assert_same, last_step, launch, wait_until
from .test_launch_killed import recipe as recipe

SLURM_UP = Path(__file__).parents[2] / "tools" / "slurm_up.sh"
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: no {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons need root"),
]


def tell(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "slurm"
    try:
        tell(str(SLURM_UP), "up", str(folder))
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        yield
    finally:
        tell(str(SLURM_UP), "down", str(folder))


def state(job: str) -> str:
    return re.findall(r"JobState=(\w+)", tell("scontrol", "show", "job", job))[0]


def test_a_requeued_job_ends_as_an_undisturbed_one(
    slurm: None, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole, out = tmp_path / "whole", tmp_path / "out"
    launch(recipe, whole, "--gpus=2")

    monkeypatch.chdir(tmp_path)
    launch(recipe, out, "--gpus=2", "--via=slurm")
    (job,) = re.findall(r"\d+", tell("squeue", "--noheader", "--format=%i"))
    log = out / "launch" / f"mini-{job}.log"

    def reaches(step: int) -> bool:
        assert state(job) in ("PENDING", "RUNNING", "COMPLETING"), log.read_text()
        return last_step(out) >= step

    # As before the end of its time: only the script gets SIGTERM. Then as an administrator does it.
    for number, stop in enumerate((("scancel", "--batch", "--signal=TERM", job), ("scontrol", "requeue", job)), 1):
        before = last_step(out)
        wait_until(lambda wanted=before + 4: reaches(wanted), f"step {before + 4}")
        tell(*stop)
        wait_until(lambda: state(job) == "PENDING", "the job in the queue again")
        said = log.read_text()
        assert said.count("stopped by SIGTERM, saved as step-") == number, said
        # Slurm would wait two minutes, so that the end of the old batch script is not taken for that of the new one.
        wait_until(lambda: tell("sinfo", "--noheader", "--format=%T").strip() == "idle", "an idle node")
        time.sleep(5)
        tell("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_until(lambda: state(job) not in ("PENDING", "RUNNING", "COMPLETING"), "the end of the job")

    said = log.read_text()
    assert state(job) == "COMPLETED", said
    assert said.count("resuming after step") == 2, said
    assert " died" not in said, said
    assert_same(out, whole)
