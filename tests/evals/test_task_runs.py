"""Scoring tasks: killed and resumed, in blocks, by many at a time, the files are the same."""

import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from unspool.evals.backends.mock import Adversarial, Oracle
from unspool.evals.run import Scoring, score

from .toy import entry, lines

pytestmark = pytest.mark.usefixtures("toy_suite")
FILES = ("samples.jsonl", "summary.json", "prompts.jsonl")


def test_answers_that_break_lines_do_not_break_the_files(scoring, tokenizer):
    score(scoring, Adversarial(tokenizer))

    samples = lines(scoring.out_dir / "samples.jsonl")
    assert len(samples) == 96
    assert "\u2028" in samples[0]["output"] and "\x1b" not in (scoring.out_dir / "samples.jsonl").read_text()


class Slow(Oracle):
    def answers(self, prompt):
        time.sleep(0.01)
        return super().answers(prompt)


def _run(scoring: Scoring, tokenizer) -> None:
    score(scoring, Slow(tokenizer))


def _written(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.glob("*.jsonl"))
    except FileNotFoundError:  # the folder was published just now
        return 1 << 60


def test_killed_at_ten_moments_the_results_equal_the_uninterrupted_ones(scoring, tokenizer):
    whole = replace(scoring, out_dir=scoring.root / "whole")
    score(whole, Oracle(tokenizer))
    fork = multiprocessing.get_context("fork")
    rng = random.Random(0)
    kills = 0
    # A run that is over before this process has looked again is no kill; the next one may be.
    for trial in range(40):
        if kills == 10:
            break
        killed = replace(scoring, out_dir=scoring.root / f"killed{trial}")
        work = killed.out_dir.with_name(killed.out_dir.name + ".work")
        moment = rng.uniform(0, 0.95) * _written(whole.out_dir)
        child = fork.Process(target=_run, args=(killed, tokenizer))
        child.start()
        while child.exitcode is None and _written(work) < moment:
            time.sleep(0.001)
        if child.exitcode is None:
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        child.join()
        score(killed, Oracle(tokenizer))
        for name in FILES:
            assert (killed.out_dir / name).read_bytes() == (whole.out_dir / name).read_bytes()
    assert kills == 10, "the runs were over before they could be killed"


def test_work_is_counted_in_tokens(scoring, tokenizer, monkeypatch):
    from contextlib import contextmanager

    from unspool.evals import run

    bars = {}

    @contextmanager
    def bar(label, total):
        bars[label] = [total]
        yield lambda amount, note="": bars[label].append(amount)

    monkeypatch.setattr(run, "progress_bar", bar)
    score(replace(scoring, evals=[entry(tasks=["shared"])]), Oracle(tokenizer))

    total, *steps = bars["score base"]
    # A context that is shared is read once.
    assert total == sum(steps) == 3 * 256 + 3 * 512


def test_a_backend_that_takes_blocks_gives_the_same_files(scoring, tokenizer):
    class Engine(Oracle):
        block_size = 5
        calls = 0

        def answers_all(self, prompts):
            Engine.calls += 1
            return [self.answers(prompt) for prompt in prompts]

    score(scoring, Oracle(tokenizer))
    other = replace(scoring, out_dir=scoring.root / "other")
    score(other, Engine(tokenizer))

    assert 1 < Engine.calls < 20
    assert (scoring.out_dir / "samples.jsonl").read_bytes() == (other.out_dir / "samples.jsonl").read_bytes()


def test_a_server_that_answers_many_at_a_time_gives_the_same_files(scoring, tokenizer):
    class Wide(Oracle):
        width = 4

        def answers(self, prompt):
            time.sleep(0.005 * (prompt.index % 3))
            return super().answers(prompt)

    score(scoring, Oracle(tokenizer))
    other = replace(scoring, out_dir=scoring.root / "other")
    score(other, Wide(tokenizer))

    assert (scoring.out_dir / "samples.jsonl").read_bytes() == (other.out_dir / "samples.jsonl").read_bytes()
