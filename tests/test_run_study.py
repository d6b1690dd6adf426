"""tools/run_study.py: order, limits, clean stops, failures, and results in small files. Runs are small scripts here."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import run_states  # noqa: E402
import run_study  # noqa: E402
import study_results  # noqa: E402
from run_study import FAILED, FINISHED, STOPPED, WAITING, Queue, Run  # noqa: E402
from unspool.cli.main import build_app  # noqa: E402
from unspool.core.errors import BusyError, ConfigError  # noqa: E402
from unspool.core.lock import lock_output, lock_run  # noqa: E402

# A run: it starts, trains and is scored, and writes when. `{}` is put at its end.
SCRIPT = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
def note(word):
    with open(folder.parent / "times", "a") as file:
        file.write(f"{{time.monotonic()}} {{folder.name}} {{word}}\\n")
note("start")
time.sleep(0.15)
(folder / "stages/train.work").mkdir(parents=True, exist_ok=True)
(folder / "stages/train.work/metrics.jsonl").write_text("{{}}")
time.sleep(0.15)
note("trained")
(folder / "scores/train.work").mkdir(parents=True, exist_ok=True)
time.sleep(0.3)
note("end")
{}
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(run_study, "POLL", 0.02)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def queue(out: Path, endings: dict[str, str], **options) -> Queue:
    runs = [
        Run(name, [sys.executable, "-S", "-c", SCRIPT.format(end), str(out / name)], out)
        for name, end in endings.items()
    ]
    for run in runs:
        run.folder.mkdir(exist_ok=True)
    settings = {"at_once": 3, "training": 2, "limit": 60} | options
    return Queue(runs, out, out, **settings)


def events(out: Path) -> list[tuple[str, str]]:
    lines = sorted(line.split() for line in (out / "times").read_text().splitlines())
    return [(name, word) for _, name, word in lines]


def most_open(found: list[tuple[str, str]], closing: str) -> int:
    """Largest number of runs between `start` and `closing`."""
    counts = [sum((word == "start") - (word == closing) for _, word in found[:end]) for end in range(len(found) + 1)]
    return max(counts)


def test_runs_start_in_their_order_and_both_limits_hold(tmp_path):
    made = queue(tmp_path, dict.fromkeys("abcdef", ""), at_once=3, training=2)
    made.work()
    found = events(tmp_path)
    assert [name for name, word in found if word == "start"] == list("abcdef")
    assert most_open(found, "end") == 3, "never three at once, or more than three"
    assert most_open(found, "trained") == 2
    assert {run.state for run in made.runs} == {FINISHED}
    assert json.loads((tmp_path / "runs.json").read_text())["ended"] is True


def test_a_run_is_shown_as_soon_as_it_starts(tmp_path, capsys):
    queue(tmp_path, {"a": ""}).work()
    states = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  a ")]
    assert list(dict.fromkeys(states)) == ["waiting", "starting", "training", "scoring", "finished"]


def test_a_failed_run_is_named_with_its_message_and_the_others_go_on(tmp_path, capsys):
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "a.json").write_text(json.dumps({"error": "no such file\nsecond line"}))
    made = queue(tmp_path, {"a": "sys.exit(1)", "b": ""})
    made.work()
    assert [run.state for run in made.runs] == [FAILED, FINISHED]
    assert "failed" in (shown := capsys.readouterr().out) and f"no such file (log: {tmp_path}/logs/a.log)" in shown


def test_a_run_that_failed_without_a_record_is_named_with_the_last_error_of_its_log(tmp_path, capsys):
    sentence = "model m: config.json has changed since it was written; export it again."
    ending = f"print('error: another'); print('error: {sentence}'); print('loss 1.5'); sys.exit(2)"
    queue(tmp_path, {"a": ending, "b": "sys.exit(1)"}).work()
    log = tmp_path / "logs"
    shown = capsys.readouterr().out
    assert f"{sentence} (log: {log}/a.log)" in shown and "error:" not in shown and "loss" not in shown
    assert f"no message (log: {log}/b.log)" in shown

    # An error of an earlier process is not the reason why this one failed.
    queue(tmp_path, {"a": "sys.exit(1)"}).work()
    assert f"no message (log: {log}/a.log)" in capsys.readouterr().out


def test_the_limit_stops_runs_with_an_interrupt_and_starts_no_other(tmp_path):
    saving = "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    note('saved'); sys.exit(130)"
    made = queue(tmp_path, dict.fromkeys("abc", saving), at_once=2, limit=1.5)
    began = time.monotonic()
    made.work()
    assert time.monotonic() - began < 6
    assert [run.state for run in made.runs] == [STOPPED, STOPPED, WAITING]
    assert events(tmp_path)[-2:] == [("a", "saved"), ("b", "saved")] or events(tmp_path)[-2:] == [
        ("b", "saved"),
        ("a", "saved"),
    ]


def test_a_run_that_ignores_the_interrupt_is_killed_with_its_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(run_study, "GRACE", 0.3)
    stuck = (
        "import signal, subprocess\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'])\n(folder / 'child').write_text(str(child.pid))\ntime.sleep(60)"
    )
    made = queue(tmp_path, {"a": stuck}, limit=1.5)
    made.work()
    assert made.runs[0].state == STOPPED
    child = int((tmp_path / "a" / "child").read_text())
    deadline = time.monotonic() + 2
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_average_waits_for_the_run_whose_weights_it_needs(tmp_path):
    made = queue(tmp_path, dict.fromkeys("abc", ""))
    made.runs[0].needs = "b"
    made.work()
    found = events(tmp_path)
    assert found.index(("a", "start")) > found.index(("b", "end"))
    assert {run.state for run in made.runs} == {FINISHED}


def test_finished_runs_are_not_started_again(tmp_path):
    made = queue(tmp_path, dict.fromkeys("ab", ""))
    made.runs[0].state = FINISHED
    made.work()
    assert {name for name, _ in events(tmp_path)} == {"b"}


def test_the_state_shows_progress_and_no_score(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("stage train: 1/40  loss 3.1  eta 0:01:00\nscore train: 3 of 9 contexts\narm  niah/32K\nabf  77%\n")
    assert run_states.last_line(log, run_states.PROGRESS) == "score train: 3 of 9 contexts"
    facts = {"ended": True, "ends_at": 0, "runs": {"a": {"state": FINISHED, "seconds": {"scoring": 1.0}}}}
    (tmp_path / "logs").mkdir()
    log.rename(tmp_path / "logs" / "a.log")
    assert "%" not in run_states.describe(tmp_path, facts)


def test_a_later_stage_trains_after_the_scores_of_an_earlier_one(tmp_path):
    phases = []
    for path in (
        "scores/base.work/a",
        "stages/32k.work/metrics.jsonl",
        "scores/32k.work/a",
        "stages/128k.work/metrics.jsonl",
    ):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("{}")
        phases.append(run_states.phase_of(tmp_path))
        done = (tmp_path / path).parent
        done.rename(done.with_suffix(""))
    assert phases == ["scoring", "training", "scoring", "training"]
    assert run_states.phase_of(tmp_path) == "scoring"


def exited(status: int) -> subprocess.CompletedProcess[bytes]:
    return subprocess.CompletedProcess([], status)


def test_longppl_scores_the_arms_with_key_tokens_of_the_first_one(tmp_path, monkeypatch):
    for folder in ("abf-s1/stages/train/model", "merged-s1/model", "base"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "abf-s1" / "recipe.yaml").write_text("stages: [{name: train}]")
    ran = []
    monkeypatch.setattr(run_study.subprocess, "run", lambda command, check: ran.append(command[3:]) or exited(0))
    given = [
        "longppl",
        str(tmp_path),
        "abf",
        "merged",
        "base",
        "--data",
        "d",
        "--model",
        str(tmp_path / "base"),
        "--seed",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["run_study.py", *given])
    assert run_study.main() == 0
    assert [Path(command[1]).relative_to(tmp_path).as_posix() for command in ran] == [
        "abf-s1/stages/train/model", "merged-s1/model", "base",
    ]  # fmt: skip
    key = f"key_tokens={tmp_path}/longppl/abf-s1"
    assert [key in command for command in ran] == [False, True, True]
    assert [Path(command[-1]).name for command in ran] == ["abf-s1", "merged-s1", "base-s1"]


def test_a_run_is_scored_after_its_last_stage_or_a_named_one(tmp_path):
    for folder in ("long-4.5-s0/stages/128k/model", "long-4.5-s0/stages/sft/model"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "long-4.5-s0" / "recipe.yaml").write_text("stages: [{name: 128k}, {name: sft}]")
    given = {"out": tmp_path, "seed": 0, "model": None}
    found = run_study.find_models(argparse.Namespace(arms=["long-4.5.128k", "long-4.5"], **given))
    assert {name: path.relative_to(tmp_path).as_posix() for name, path in found.items()} == {
        "long-4.5.128k-s0": "long-4.5-s0/stages/128k/model",
        "long-4.5-s0": "long-4.5-s0/stages/sft/model",
    }
    for missing in ("long-4.5.32k", "long-4", "long"):
        with pytest.raises(ConfigError, match=f"{missing}-s0: no trained model"):
            run_study.find_models(argparse.Namespace(arms=[missing], **given))


def test_arms_are_scored_beside_active_runs_but_not_twice_at_once(tmp_path, monkeypatch):
    out = tmp_path / "longppl" / "abf-s0"

    def evaluate(command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        with lock_output(Path(command[-1])):  # as `unspool eval --out` does
            return exited(0)

    monkeypatch.setattr(run_study.subprocess, "run", evaluate)
    with lock_run(tmp_path, shared=True):  # as active runs do
        with pytest.raises(BusyError):
            evaluate([str(out)], check=False)
        run_study.score(tmp_path, out, [])
    with lock_run(tmp_path / "longppl"), pytest.raises(BusyError, match="longppl is in use: process"):
        run_study.score(tmp_path, tmp_path / "longppl" / "cip-2-s0", [])


def test_only_the_message_of_a_failed_evaluation_is_printed(tmp_path, monkeypatch, capfd):
    (tmp_path / "out" / "abf-s0" / "model").mkdir(parents=True)
    given = ["longppl", str(tmp_path / "out"), "abf", "--data", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run_study.py", *given])
    with pytest.raises(SystemExit) as end:
        run_study.main()
    assert end.value.code == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and "Command" not in lines[0]
    monkeypatch.setattr(run_study.subprocess, "run", lambda command, check: exited(-9))
    assert run_study.main() == 2
    assert "abf-s0: signal 9 stopped this evaluation" in capfd.readouterr().err


def test_an_arm_without_a_model_is_refused_before_the_first_evaluation(tmp_path, monkeypatch, capsys):
    (tmp_path / "abf-s0" / "model").mkdir(parents=True)
    monkeypatch.setattr(run_study, "score", None)
    monkeypatch.setattr(sys, "argv", ["run_study.py", "longppl", str(tmp_path), "abf", "cip-2", "--data", "d"])
    assert run_study.main() == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/cip-2-s0: no trained model")


# Results


def write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Three finished runs of 10 KB and an unfinished one, in a study's folder."""

    def collect(folder: Path, out: Path) -> list[str]:
        names = ["abf-s0", "cip-2-s0", "utk-80-s0"]
        for name in names:
            write(out / name / "niah.jsonl.gz", 10_000)
        return names

    monkeypatch.setattr(study_results, "collect", collect)
    for name in ("abf-s0", "cip-2-s0", "utk-80-s0"):
        write(tmp_path / "study" / name / "recipe.yaml", 10)
        write(tmp_path / "study" / name / "scores" / "train" / "manifest.json", 10)
        write(tmp_path / "study" / "logs" / f"{name}.log", 10)
    for name in ("recipe.yaml", "scores/train.work/samples.jsonl", "stages/train/model/model.safetensors"):
        write(tmp_path / "study" / "abf-s1" / name, 100)
    write(tmp_path / "study" / "logs" / "abf-s1.log", 10)
    return tmp_path / "study"


def names_in(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        return {entry.name for entry in archive.getmembers() if entry.isfile()}


def test_results_are_packed_without_weights_in_files_of_the_given_size(study, tmp_path):
    packed = study_results.pack(study, tmp_path / "out", most=40_000, files=8)
    assert packed["finished"] == ["abf-s0", "cip-2-s0", "utk-80-s0"] and packed["unfinished"] == ["abf-s1"]
    assert set(packed["files"]) == {"finished-1.tar", "finished-2.tar", "unfinished.tar.gz"}
    assert max(packed["files"].values()) <= 40_000
    assert names_in(tmp_path / "out" / "finished-1.tar") == {"abf-s0/niah.jsonl.gz", "cip-2-s0/niah.jsonl.gz"}
    unfinished = names_in(tmp_path / "out" / "unfinished.tar.gz")
    # The log of a finished run prints its scores.
    assert unfinished == {"abf-s1/recipe.yaml", "abf-s1/scores/train.work/samples.jsonl", "logs/abf-s1.log"}


def test_later_scores_are_packed_once_and_key_tokens_are_kept(study, tmp_path):
    for name, key_tokens in (("abf-s0", None), ("cip-2-s0", "longppl/abf-s0"), ("base-s0", "longppl/abf-s0")):
        for file in ("samples.jsonl", "manifest.json"):
            write(study / "longppl" / name / file, 10)
        facts = {"suites": [{"suite": "longppl", "key_tokens": key_tokens}]}
        (study / "longppl" / name / "summary.json").write_text(json.dumps(facts))
    write(study / "short" / "abf-s0" / "summary.json", 0)
    (study / "short" / "abf-s0" / "summary.json").write_text(json.dumps({"cells": []}))
    write(study / "short" / "abf-s1.work" / "samples.jsonl", 10)
    packed = study_results.pack(study, tmp_path / "out", most=40_000, files=8)
    assert set(packed["files"]) == {"finished-1.tar", "finished-2.tar", "unfinished.tar.gz"}
    # `collect` puts the others into the finished runs, without the key tokens that the first arm chose.
    later = {name for name in names_in(tmp_path / "out" / "unfinished.tar.gz") if name.startswith(("longppl", "short"))}
    of_base = {f"longppl/base-s0/{file}" for file in ("samples.jsonl", "manifest.json", "summary.json")}
    assert later == {"longppl/abf-s0/samples.jsonl", "short/abf-s1.work/samples.jsonl", *of_base}


def test_too_many_or_too_large_files_are_refused_with_the_setting_to_change(study, tmp_path):
    with pytest.raises(ConfigError, match="3 files; use --max-files 3"):
        study_results.pack(study, tmp_path / "out", most=40_000, files=2)
    with pytest.raises(ConfigError, match="use --max-mb above"):
        study_results.pack(study, tmp_path / "out", most=5_000, files=8)
    write(tmp_path / "own" / "notes.txt", 1)
    with pytest.raises(ConfigError, match="holds other files"):
        study_results.pack(study, tmp_path / "own", most=40_000, files=8)
    assert (tmp_path / "own" / "notes.txt").is_file()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["start", "out", "abf-s0", "--model", "m"], "start: give either --study or --recipe."),
        (["start", "out", "abff-s0", "--model", "m", "--study", "tiny"], "tiny has no run 'abff-s0'. It has "),
        (["start", "out", "abf", "--model", "m", "--study", "tiny"], "'abf' is not a run; write ARM-sSEED, such as"),
        (["start", "out", "a", "--model", "m", "--study", "tiny", "--data", "x"], "--data x: no such folder"),
        (["start", "out", "a", "--model", "m", "--study", "tiny", "--at-once", "0"], "--at-once, --training and"),
        (["status", "out"], "out: no runs were started there"),
        (["pack", "nowhere", "results"], "nowhere: no such folder"),
        (["longppl", "out", "abf", "--data", "data"], "ROOT/out/abf-s0: no trained model; run the arm first"),
        (["short", "out", "base", "--data", "data"], "--data data: holds no hellaswag.jsonl.zst"),
    ],
)
def test_mistakes_end_with_one_sentence(tmp_path, monkeypatch, capsys, given, message):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_study.py", *given])
    assert run_study.main() == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(message.replace("ROOT", str(tmp_path))) and not shown.out


def test_a_recipe_is_run_into_the_folder_of_its_name(tmp_path, monkeypatch):
    """The real command, in this process; a run without stages and evaluations ends at once."""
    (tmp_path / "data").mkdir()
    recipe = tmp_path / "untrained.yaml"
    recipe.write_text("name: untrained\nmodel: m\nsources: {}\ndatasets: {}\nstages: []\nevals: []\n")
    monkeypatch.setattr(Queue, "work", lambda queue: CliRunner().invoke(build_app(), queue.runs[0].command[3:]))
    model = ROOT / "src" / "unspool" / "assets" / "tiny-base"
    given = ["start", str(tmp_path / "out"), "raised", "--recipe", str(recipe), "--data", str(tmp_path / "data")]
    monkeypatch.setattr(sys, "argv", ["run_study.py", *given, "--model", str(model)])
    assert run_study.main() == 0
    assert (tmp_path / "out" / "raised" / "recipe.yaml").is_file()
