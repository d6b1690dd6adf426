"""Prompts wait on disk: made once, given back as they were, made again where they are missing."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unspool.evals import suites
from unspool.evals.backends.mock import Oracle
from unspool.evals.prompts import PromptCache
from unspool.evals.run import Scoring, score
from unspool.evals.suite import Question
from unspool.evals.suites.ruler import RulerEval
from unspool.evals.task_suite import TaskSuite

from .toy import TOY

ASKED = Question(
    context="Δ text " * 50, question="?", references=("a", "b"), depth=0.5, meta={"ids": {"1": 2}, "t": (1,)}
)
IDS = np.arange(1000, dtype=np.uint32)


@pytest.fixture
def made(monkeypatch) -> Counter:
    """How often each question of the toy suite was made."""
    counted: Counter = Counter()

    def counting(task):
        def build(sources, ask):
            counted[task.name, ask.length, ask.index] += 1
            return task.build(sources, ask)

        return replace(task, build=build)

    suite: TaskSuite = replace(TOY, tasks={name: counting(task) for name, task in TOY.tasks.items()})
    monkeypatch.setitem(suites.SUITES, "ruler", suite)
    return counted


@pytest.fixture
def scoring(tmp_path: Path) -> Scoring:
    entry = RulerEval(suite="ruler", lengths=[256, 512], samples=6)
    return Scoring(model="m", model_hash="m", evals=[entry], seed=0, out_dir=tmp_path / "out/scores", root=tmp_path)


def test_what_is_put_comes_back_once_and_equal(tmp_path: Path):
    cache = PromptCache(tmp_path)
    cache.put("one", (ASKED, IDS))
    cache.put("two", (replace(ASKED, depth=None), IDS[:0]))

    asked, ids = cache.take("one") or pytest.fail("nothing came back")
    assert asked == ASKED and isinstance(asked.meta["t"], tuple)
    np.testing.assert_array_equal(ids, IDS)
    assert (cache.take("two") or pytest.fail("nothing"))[0].depth is None
    assert cache.take("one") is None and cache.take("three") is None
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_it_stops_at_its_limit_and_after_a_full_disk(tmp_path: Path):
    small = PromptCache(tmp_path, max_bytes=10)
    small.put("one", (ASKED, IDS))
    assert small.take("one") is None

    full = PromptCache(tmp_path)
    full.put("one", (ASKED, IDS))

    class Full:
        def seek(self, place):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    full._file = Full()
    full.put("two", (ASKED, IDS))
    full.put("three", (ASKED, IDS))
    assert full.take("one") is full.take("two") is full.take("three") is None


def test_every_prompt_is_made_once(scoring, made, tokenizer):
    score(scoring, Oracle(tokenizer))

    assert len(made) == 2 * 4 * 6 and set(made.values()) == {1}
    assert [path.name for path in scoring.out_dir.parent.iterdir()] == ["scores"], "nothing else is left"


def test_without_room_it_is_made_twice_with_the_same_result(scoring, made, tokenizer, monkeypatch):
    score(scoring, Oracle(tokenizer))
    monkeypatch.setattr("unspool.evals.run.PromptCache", lambda folder: PromptCache(folder, max_bytes=0))
    other = replace(scoring, out_dir=scoring.root / "other")
    made.clear()
    score(other, Oracle(tokenizer))

    assert set(made.values()) == {2}
    for name in ("prompts.jsonl", "samples.jsonl", "summary.json"):
        assert (other.out_dir / name).read_bytes() == (scoring.out_dir / name).read_bytes()
