"""Two commands at the same time in one folder: the second names the first and ends, and the first is not disturbed."""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import unspool.recipe.run
import unspool.recipe.synthesis
import unspool.studies.run
import unspool.studies.study_report  # noqa: F401  (so that forked commands need not load them)
from factory import SMALL_SIZE, build_model, save_folder, save_mini
from synthesis.toy import write_documents, write_recipe
from unspool.cli.main import build_app
from unspool.core.lock import lock_run
from unspool.models.config import SIZES
from unspool.models.location import ASSETS

from .test_study import STUDY

SECONDS = 120


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "4M", SMALL_SIZE)
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A recipe, a study, a model and documents; nothing is built yet."""
    folder = save_mini(tmp_path_factory.mktemp("pairs")).parent
    save_folder(folder / "model", build_model(vocab_size=4200))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "tiny-base" / name, folder / "model")
    (folder / "mini-study.yaml").write_text(STUDY)
    (folder / "synth").mkdir()
    write_documents(folder / "synth" / "docs.jsonl", 12)
    write_recipe(folder / "synth", {})
    return folder


@pytest.fixture(scope="module")
def judge_url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            reply = json.dumps({"choices": [{"message": {"content": '{"fluency": 1, "correctness": 2}'}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def command(name: str, inputs: Path, out: Path, url: str) -> list[str]:
    recipe = ["--set", f"out={out}", "--set", "engine.workers=1"]
    if name in ("run", "train", "tokenize", "pack"):
        return [name, str(inputs / "mini.yaml"), *recipe]
    if name == "eval":
        suite = ["--suite", "niah", "--lengths", "192", "--samples", "2", "--value", "words", "--device", "cpu"]
        return ["eval", str(inputs / "model"), *suite, "--out", str(out / "scores" / "mine")]
    if name == "synth":
        return ["synth", str(inputs / "synth" / "recipe.yaml"), *recipe]
    if name == "judge":
        return ["judge", str(out), "--url", url, "--model-name", "judge"]
    return ["study", str(inputs / "mini-study.yaml"), "--out", str(out)]


def start(args: list[str], log: Path) -> int:
    """The command in a forked process: everything is imported already, so it is at work at once."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            sys.argv = ["unspool", *args]
            build_app()(args, standalone_mode=True)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return child


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def stop_at_work(child: int, place: Path, before: set[Path]) -> None:
    """Suspend a command as soon as it has written anything."""
    deadline = time.monotonic() + SECONDS
    while not any(path.is_file() and path.stat().st_size for path in {*place.rglob("*")} - before):
        assert os.waitpid(child, os.WNOHANG)[0] == 0, "it ended before it wrote anything"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(child, signal.SIGSTOP)


def contents(place: Path) -> dict[str, str]:
    files = sorted(path for path in place.rglob("*") if path.is_file())
    return {str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def results(place: Path) -> dict[str, str]:
    """Weights, rows, documents, answers and conversations; other files hold times."""
    endings = (".safetensors", ".arrow", "samples.jsonl", ".jsonl.zst", "ledger.jsonl", "summary.json")
    return {name: found for name, found in contents(place).items() if name.endswith(endings)}


def prepare(first: str, second: str, inputs: Path, place: Path) -> None:
    """What a command reads from its own folder."""
    if "judge" in (first, second):
        record = {
            "task": "judged", "suite": "helmet", "length": 256, "output": "It was Ann.", "score": None, "depth": None,
            "judge": {"protocol": "qa", "question": "Who?", "references": ["Ann"], "key_points": ["Ann came."]},
        }  # fmt: skip
        from unspool.core.artifacts import publish

        settings = {"evals": [{"suite": "helmet", "lengths": [256], "samples": 1}]}
        with publish(place / "run" / "scores" / "base", kind="scores", inputs={}, settings=settings) as draft:
            (draft.folder / "samples.jsonl").write_text(json.dumps(record) + "\n")
            (draft.folder / "summary.json").write_text(json.dumps({"model": "base", "cells": []}))


FAST = [("run", "train"), ("eval", "eval"), ("judge", "judge")]
PAIRS = [
    ("run", "run"),
    ("tokenize", "tokenize"),
    ("pack", "run"),
    ("synth", "synth"),
    ("study", "study"),
    ("train", "eval"),
]


@pytest.mark.parametrize(("first", "second"), [*FAST, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS)])
def test_the_second_command_names_the_first_and_changes_nothing(first, second, inputs, judge_url, tmp_path):
    place, out = tmp_path / "place", tmp_path / "place" / "run"
    place.mkdir()
    prepare(first, second, inputs, place)
    before = {*place.rglob("*")}
    child = start(command(first, inputs, out, judge_url), tmp_path / "first")
    try:
        stop_at_work(child, place, before)
        found = contents(place)
        code = wait(start(command(second, inputs, out, judge_url), tmp_path / "second"))
        said = (tmp_path / "second").read_text()
        assert (code, contents(place)) == (2, found), said
        assert f"in use: process {child} on {socket.gethostname()} has been writing to it since 20" in said, said
        assert f"(unspool {first} " in said
        assert "Traceback" not in said
        assert len([line for line in said.splitlines() if line.startswith("error:")]) == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [*FAST, *PAIRS])
def test_the_first_command_ends_as_if_it_were_alone(first, second, inputs, judge_url, tmp_path):
    """Both are started at once, so either may be first; afterwards the other one runs alone."""
    for name in ("alone", "both"):
        prepare(first, second, inputs, tmp_path / name)
        (tmp_path / name).mkdir(exist_ok=True)
    logs = [tmp_path / "log-0", tmp_path / "log-1"]
    for name in (first, second):
        assert wait(start(command(name, inputs, tmp_path / "alone" / "run", judge_url), logs[0])) == 0, logs[
            0
        ].read_text()

    for _ in range(3):
        commands = [command(name, inputs, tmp_path / "both" / "run", judge_url) for name in (first, second)]
        children = [start(args, log) for args, log in zip(commands, logs, strict=True)]
        codes = [wait(child) for child in children]
        said = [log.read_text() for log in logs]
        assert set(codes) <= {0, 2}, said
        assert 0 in codes, said
        for code, text in zip(codes, said, strict=True):
            assert "Traceback" not in text
            assert code == 0 or "has been writing to it since" in text, text
    for name in (first, second):
        assert wait(start(command(name, inputs, tmp_path / "both" / "run", judge_url), logs[0])) == 0, logs[
            0
        ].read_text()
    assert results(tmp_path / "both") == results(tmp_path / "alone")


@pytest.mark.slow
def test_ranks_of_a_job_are_refused_together_and_once(inputs, tmp_path):
    """Rank 0 locks for all. `unspool launch` refuses before any rank starts."""
    out = tmp_path / "run"
    words = [str(inputs / "mini.yaml"), "--set", f"out={out}", "--set", "device=cpu"]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "unspool.cli.main", "train"]
    launch = ["-m", "unspool.cli.main", "launch", "--verb=train", "--gpus=2"]
    with lock_run(out):
        before = contents(tmp_path)
        direct, launched = (
            subprocess.run(
                [sys.executable, *args, *words], capture_output=True, text=True, check=False, timeout=SECONDS
            )
            for args in (ranks, launch)
        )
        assert contents(tmp_path) == before
    sentence = f"error: {out} is in use: process {os.getpid()} on "
    assert direct.returncode != 0
    assert direct.stderr.count(sentence) == 1, direct.stderr
    assert (launched.returncode, launched.stderr.count("error: "), launched.stderr.count(sentence)) == (2, 1, 1)
    assert "Traceback" not in launched.stderr
