"""A model in several processes: the same scores, and nothing that is waited for or left behind."""

import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.errors import ConfigError, UnspoolError
from unspool.evals.backends.transformers import ModelBackend, ProcessesBackend
from unspool.evals.eval_plan import EvalPlan
from unspool.evals.run import Scoring, score
from unspool.evals.suites.key_value import KeyValueEval
from unspool.evals.suites.niah import NiahEval
from unspool.evals.suites.perplexity import PerplexityEval

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
MODEL = Path(__file__).parents[2] / "src/unspool/assets/tiny-base"


@pytest.fixture
def scoring(tmp_path: Path, documents: list[str]) -> Scoring:
    (tmp_path / "held.txt").write_text("\n\n".join(documents))
    evals = [
        NiahEval.model_validate(
            {"suite": "niah", "lengths": [192, 256], "samples": 6, "value": "words", "text": "held.txt"}
        ),
        KeyValueEval.model_validate({"suite": "key_value", "lengths": [256], "samples": 6, "value": "words"}),
        PerplexityEval.model_validate({"suite": "perplexity", "length": 256, "samples": 3, "text": "held.txt"}),
    ]
    return Scoring(model="base", model_hash="m", evals=evals, seed=0, out_dir=tmp_path / "one", root=tmp_path)


def test_two_processes_give_the_bytes_of_one_and_go_on_after_one_of_them_has_died(scoring):
    score(scoring, ModelBackend(str(MODEL), **CPU))
    wanted = (scoring.out_dir / "samples.jsonl").read_bytes()
    two = replace(scoring, out_dir=scoring.root / "two")
    backend = ProcessesBackend(str(MODEL), **CPU, width=2)
    answers = backend.answers
    asked = itertools.count(1)  # counts rightly in several threads

    def deadly(prompt):
        if next(asked) == 3:
            os.kill(backend._children[0].pid, signal.SIGKILL)
        return answers(prompt)

    backend.answers = deadly
    with pytest.raises(UnspoolError, match=r"one of 2 answering processes died.*fewer `processes`"):
        score(two, backend)
    assert not any(is_running(child.pid) for child in backend._children)
    score(two, ProcessesBackend(str(MODEL), **CPU, width=2))

    assert (two.out_dir / "samples.jsonl").read_bytes() == wanted


def test_the_command_reports_the_error_of_a_process(tmp_path):
    backend = ProcessesBackend(str(tmp_path / "none"), **CPU, width=2)
    plan = EvalPlan(
        [KeyValueEval.model_validate({"suite": "key_value", "lengths": [256], "samples": 4, "value": "words"})],
        ModelBackend(str(MODEL), **CPU).tokenizer,
        seed=0,
        root=tmp_path,
    )
    with pytest.raises(ConfigError, match="none"):
        backend.answers(plan.evals[0].prepare(plan.units[0]))
    backend.stop()


def test_no_process_starts_after_all_were_stopped():
    backend = ProcessesBackend(str(MODEL), **CPU, width=2)
    backend.stop()
    with pytest.raises(UnspoolError):
        backend.window_losses(np.arange(8))
    assert backend._children == []


ANSWERS_AND_WAITS = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import torch
from unspool.evals.backends.transformers import ProcessesBackend

if __name__ == "__main__":
    backend = ProcessesBackend(sys.argv[1], device=torch.device("cpu"), dtype=torch.float32, width=2)
    ids = backend.tokenizer("some words of a text", return_tensors="np")["input_ids"][0]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(backend.window_losses, [ids, ids]))
    print(*[child.pid for child in backend._children], flush=True)
    time.sleep(600)
"""


def test_no_process_outlives_a_command_that_was_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ANSWERS_AND_WAITS)
    with subprocess.Popen([sys.executable, str(script), str(MODEL)], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        try:
            children = [int(pid) for pid in command.stdout.readline().split()]
            assert len(children) == 2 and all(is_running(pid) for pid in children)
        finally:
            command.kill()
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)

    assert not any(is_running(pid) for pid in children)


def is_running(pid: int) -> bool:
    try:
        # The third field; a name may hold spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backend", "oracle"], "--processes works only with --backend transformers, not with oracle"),
        (["--suite", "short"], "--suite short runs lm-eval in one process"),
        (["--lm-eval", "tasks"], "--processes cannot be combined with --lm-eval, which only writes tasks."),
    ],
)
def test_other_engines_take_no_processes(arguments, said):
    done = CliRunner().invoke(build_app(), ["eval", "asset:tiny-base", "--processes", "2", *arguments])

    assert done.exit_code == 2 and said in " ".join(done.output.split())
