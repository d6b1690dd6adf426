"""`unspool launch`: what is printed, what is refused, and jobs that run through stand-ins for Slurm's commands."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unspool.cli.main import build_app
from unspool.recipe import start_job
from unspool.recipe.launch import LaunchOptions, ray_command, slurm_script, torchrun_command

SECONDS = 300  # of a job; far beyond what one needs, so that only those that hang reach it
AWKWARD = 'it\'s "$(touch hacked)" `touch hacked` \\ ; & #'
# In the place of torch.distributed.run: notes what it was given, and does what the test wants.
PYTHON = """#!/bin/bash
[ "$3" = --help ] && { [ -e "$FAKE/early" ] && kill -TERM "$PPID"; echo "  --shutdown-timeout SECONDS"; exit 0; }
for word in "$@"; do echo "$word"; done > "$FAKE/words"
echo "$VALUE" > "$FAKE/value"
echo x >> "$FAKE/tries"
if [ -e "$FAKE/wait" ]; then
  trap 'echo stopped > "$FAKE/signal"; kill $!; exit 143' TERM
  touch "$FAKE/started"
  sleep 600 &> /dev/null &
  wait
fi
[ "$(wc -l < "$FAKE/tries")" -ge "$GOOD_TRY" ]
"""
COMMANDS = {
    "sbatch": 'echo "$1" > "$FAKE/script"; echo "Submitted batch job 17"',
    # As the real one: SIGTERM to srun kills its task at once, and scancel hands a signal to it.
    "srun": 'while [[ "$1" == --* ]]; do shift; done; trap \'kill -KILL "$task"\' TERM; "$@" & task=$!; '
    'echo "$task" > "$FAKE/task"; wait "$task"; code=$?; rm -f "$FAKE/task"; exit "$code"',
    "squeue": 'echo 17.batch; [ -e "$FAKE/task" ] && echo 17.0',
    "scancel": 'kill -TERM "$(cat "$FAKE/task")"',
    "scontrol": 'if [ "$1" = show ]; then echo node1; else echo "$*" > "$FAKE/requeued"; fi',
}


def run(*args: str) -> Result:
    return CliRunner().invoke(build_app(), ["launch", "tiny", *args])


def recipe_lengths() -> int:
    from unspool.recipe.load import load_recipe

    return len(load_recipe("tiny").recipe.stages)


@pytest.fixture
def fits() -> list[str]:
    return [word for index in range(recipe_lengths()) for word in ("--set", f"stages.{index}.parallel.ulysses=2")]


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    (tmp_path / "bin").mkdir()
    for name, body in {**{name: "#!/bin/bash\n" + body for name, body in COMMANDS.items()}, "python": PYTHON}.items():
        (tmp_path / "bin" / name).write_text(body)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setenv("GOOD_TRY", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(folder: Path, **changes) -> LaunchOptions:
    plain = {"recipe": "my recipe.yaml", "folder": folder, "logs": folder, "python": str(folder / "bin" / "python")}
    return LaunchOptions(**plain | changes)


def batch(folder: Path, script: str, **options) -> "subprocess.Popen[str]":
    path = folder / "job.sbatch"
    path.write_text(script)
    return subprocess.Popen(["bash", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def test_one_machine_is_one_torchrun_command(fits):
    done = run("--gpus", "2", *fits, "--env", f"VALUE={AWKWARD}", "--dry-run")
    assert done.exit_code == 0, done.output
    words = shlex.split(done.stdout)
    assert words[0] == f"VALUE={AWKWARD}"
    assert words[1:4] == [sys.executable, "-m", "torch.distributed.run"]
    assert {"--standalone", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=3"} <= set(words)
    assert words[words.index("unspool.cli.main") + 1 :][:2] == ["run", "tiny"]
    assert words.count("--set") == len(fits) // 2
    assert "ulysses 2" in done.stderr


def test_several_machines_get_a_line_each_and_need_the_first_ones_name(fits):
    refused = run("--gpus", "1", "--nodes", "2", *fits, "--dry-run")
    assert refused.exit_code == 2
    assert "--host" in refused.stderr
    done = run("--gpus", "1", "--nodes", "2", *fits, "--host", "node1", "--port", "5000")
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == 2
    assert all("--rdzv-endpoint=node1:5000" in line for line in done.stdout.splitlines())


def test_json_holds_exactly_what_would_be_run(fits):
    printed = run("--gpus", "2", *fits, "--via", "slurm", "--dry-run")
    found = json.loads(run("--gpus", "2", *fits, "--via", "slurm", "--dry-run", "--json").stdout)
    assert found["script"] == printed.stdout
    assert found["ranks"] == 2
    assert found["layouts"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--gpus", "3"), "stage abf on 3 ranks"),
        (("--gpus", "16", "--set", "stages.0.parallel.ulysses=16"), "use 1, 2, 4 or 8"),
        (("--via", "carrier-pigeon"), "Known: ray, slurm, torchrun."),
        (("--verb", "eval"), "run, train"),
        (("--env", "NOTHING"), "KEY=VALUE"),
        (("--env", "RANK=3"), "cannot be set"),
        (("--env", "A B=3"), "cannot be set"),
        (("--via", "slurm", "--partition", "gpu --wrap=x"), "--partition"),
        (("--via", "slurm", "--time", "soon"), "--time"),
        (("--via", "slurm", "--sbatch", "rm"), "--sbatch"),
        (("--via", "slurm", "--sbatch", "--comment=x\n#SBATCH --wrap=y"), "--sbatch"),
        (("--nodes", "2", "--host", "a;b"), "--host"),
        (("--set", "stages.0.tokens=many"), "tokens"),
    ],
)
def test_what_would_not_work_is_refused_before_anything_is_started(options, told, monkeypatch):
    monkeypatch.setattr(start_job, "start", lambda *args, **kwargs: pytest.fail("started"))
    done = run(*options)
    assert done.exit_code == 2, done.output
    assert told in done.stderr
    assert "Traceback" not in done.output


def test_slurm_gets_a_script_and_the_answer_is_passed_on(cluster, fits):
    done = run("--gpus", "2", *fits, "--via", "slurm", "--partition", "gpu", "--set", f"out={cluster / 'out'}")
    assert done.exit_code == 0, done.output
    assert done.stdout == "Submitted batch job 17\n"
    script = Path((cluster / "script").read_text().strip()).read_text()
    assert "#SBATCH --partition=gpu\n" in script
    assert "#SBATCH --gpus-per-node=2\n" in script


def test_without_slurm_the_script_is_left_to_be_submitted_elsewhere(tmp_path, monkeypatch, fits):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run("--gpus", "2", *fits, "--via", "slurm", "--set", f"out={tmp_path / 'out'}")
    assert done.exit_code == 2
    assert "sbatch is not installed here" in done.stderr


def test_a_job_script_hands_every_value_on_as_it_was_given(cluster):
    overrides = (f"name={AWKWARD}",)
    job = batch(cluster, slurm_script(ask(cluster, nodes=2, gpus=4, overrides=overrides, env={"VALUE": AWKWARD})))
    said, _ = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, said
    words = (cluster / "words").read_text().splitlines()
    assert (cluster / "value").read_text().rstrip("\n") == AWKWARD
    assert words[-4:] == ["run", "my recipe.yaml", "--set", f"name={AWKWARD}"]
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=node1:29417", "--shutdown-timeout=300"} <= set(words)
    assert not (cluster / "hacked").exists()


def test_a_job_that_fails_is_tried_again_and_no_more_often_than_asked(cluster, monkeypatch):
    monkeypatch.setenv("GOOD_TRY", "2")
    assert batch(cluster, slurm_script(ask(cluster))).wait(timeout=SECONDS) == 0
    assert len((cluster / "tries").read_text().split()) == 2
    (cluster / "tries").unlink()
    monkeypatch.setenv("GOOD_TRY", "9")
    assert batch(cluster, slurm_script(ask(cluster, restarts=1))).wait(timeout=SECONDS) == 1
    assert len((cluster / "tries").read_text().split()) == 2
    assert not (cluster / "requeued").exists()


def test_a_job_that_must_leave_its_machine_saves_and_is_queued_again(cluster):
    (cluster / "wait").touch()
    job = batch(cluster, slurm_script(ask(cluster)))
    until = time.monotonic() + SECONDS
    while not (cluster / "started").exists() and job.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    job.terminate()
    job.communicate(timeout=SECONDS)
    assert (cluster / "signal").read_text() == "stopped\n"
    assert (cluster / "requeued").read_text() == "requeue 17\n"
    assert len((cluster / "tries").read_text().split()) == 1, "the machine is gone, so it is not tried again here"


def test_a_job_that_must_leave_before_it_begins_does_not_begin(cluster):
    (cluster / "early").touch()
    assert batch(cluster, slurm_script(ask(cluster))).wait(timeout=SECONDS) == 143
    assert not (cluster / "tries").exists()
    assert (cluster / "requeued").read_text() == "requeue 17\n"


def test_a_value_that_is_not_quoted_would_be_noticed(cluster, monkeypatch):
    monkeypatch.setattr("unspool.recipe.launch.shlex.quote", lambda text: text)
    monkeypatch.setattr("unspool.recipe.launch.shlex.join", " ".join)
    job = batch(cluster, slurm_script(ask(cluster, overrides=(f"name={AWKWARD}",), env={"VALUE": AWKWARD})))
    job.communicate(timeout=SECONDS)
    words = (cluster / "words").read_text().splitlines() if (cluster / "words").exists() else []
    assert words[-4:] != ["run", "my recipe.yaml", "--set", f"name={AWKWARD}"]


def test_ranks_of_a_recipe_for_the_cpu_ask_for_no_gpus(tmp_path):
    assert "gpus-per-node" not in slurm_script(ask(tmp_path, on_gpus=False))


def test_ray_is_refused_where_it_is_not_installed(monkeypatch, fits):
    monkeypatch.setattr(start_job, "find_spec", lambda name: None)
    done = run("--gpus", "2", *fits, "--via", "ray")
    assert done.exit_code == 2
    assert "unspool[cluster]" in done.stderr


def test_a_command_that_fails_gives_its_exit_code(fits):
    done = run("--gpus", "2", *fits, "--python", "false")
    assert done.exit_code == 1


def test_torchrun_starts_as_many_ranks_as_asked(tmp_path):
    words = torchrun_command(ask(tmp_path, gpus=2, python=sys.executable, restarts=0))
    at = words.index("-m", words.index("torch.distributed.run"))
    # A file each: what two processes print to one pipe may come mixed.
    code = "import os, pathlib, sys; pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])"
    (tmp_path / "who.py").write_text(code)
    said = tmp_path / "said"
    said.mkdir()
    command = [*words[:at], str(tmp_path / "who.py"), str(said)]
    subprocess.run(command, capture_output=True, check=True, timeout=SECONDS)
    assert {one.name: one.read_text() for one in said.iterdir()} == {"0": "2", "1": "2"}


def test_ranks_on_ray_are_neighbours_on_their_machines_and_meet_at_the_first():
    environments = pytest.importorskip("unspool.recipe.ray_job").environments
    places = [
        ("node-b", "10.0.0.2", 5),
        ("node-a", "10.0.0.1", 6),
        ("node-b", "10.0.0.2", 7),
        ("node-a", "10.0.0.1", 8),
    ]
    found = environments(places, {"A": "b"})
    assert [worker for worker, _ in found] == [1, 3, 0, 2]
    assert [env["RANK"] for _, env in found] == ["0", "1", "2", "3"]
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"], env["WORLD_SIZE"], env["A"]) for _, env in found} == {
        ("10.0.0.1", "6", "4", "b")
    }


@pytest.mark.slow
def test_ray_starts_all_ranks_again_when_one_fails(tmp_path):
    code = (
        "import os, pathlib, sys; place = pathlib.Path(os.environ['PLACE']); rank = os.environ['RANK'];"
        "first = not (place / rank).exists(); (place / rank).touch(); sys.exit(3 if first and rank == '1' else 0)"
    )
    words = ray_command(
        ask(tmp_path, gpus=2, on_gpus=False, restarts=1, python=sys.executable, env={"PLACE": str(tmp_path)})
    )
    done = subprocess.run(
        [*words[: words.index("--") + 1], "-c", code], capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert "attempt 1 of 2 failed; exit codes by rank: {1: 3}" in done.stderr
    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}
