"""The registries of suites and backends, and extending them from outside of the package."""

from dataclasses import replace
from importlib import import_module
from typing import Literal

import pytest

from unspool.core.errors import ConfigError
from unspool.evals import suites
from unspool.evals.backends import base
from unspool.evals.backends.base import BackendOptions, build_backend, register_backend
from unspool.evals.backends.mock import Empty, Oracle
from unspool.evals.config import TaskEval, eval_adapter
from unspool.evals.prompts import MAX_UNRELATED
from unspool.evals.run import score
from unspool.evals.suites import SUITES, register_suite, suite_of
from unspool.models.generation.greedy import MAX_PROMPTS

from .toy import TOY


def test_every_suite_can_be_named_in_a_recipe_and_on_the_command_line():
    for name, suite in SUITES.items():
        lengths = {"lengths": [256], "length": 256}
        entry = {key: value for key, value in lengths.items() if key in suite.config.model_fields}
        entry |= {"paths": {"data": "data.jsonl"}} if name in ("longbench_v2", "oolong") else {}
        found = eval_adapter().validate_python({"suite": name, **entry})
        assert suite.name == name and isinstance(found, suite.config) and suite_of(found) is suite
    assert all(name == task.name for suite in SUITES.values() for name, task in suite.tasks.items())


def test_what_needs_a_judge_says_by_which_protocol():
    for suite in SUITES.values():
        assert {task.judge for task in suite.tasks.values()} <= {None, "qa", "summary"}


def test_a_suite_from_outside_is_checked_in_recipes_and_scored(scoring, tokenizer, monkeypatch):
    class MineEval(TaskEval):
        suite: Literal["mine"]

    monkeypatch.setattr(suites, "SUITES", dict(SUITES))
    register_suite(replace(TOY, name="mine", title="Mine", config=MineEval))

    entry = eval_adapter().validate_python({"suite": "mine", "lengths": [256], "samples": 3, "tasks": ["lone"]})
    summary = score(replace(scoring, evals=[entry]), Oracle(tokenizer))

    assert {(cell["suite"], cell["value"]) for cell in summary["cells"] if cell["depth"] is None} == {("mine", 1.0)}
    with pytest.raises(ValueError, match=r"'niah', .*'mine'"):
        eval_adapter().validate_python({"suite": "nine", "lengths": [256]})


def test_a_backend_from_outside_is_built_by_name(tokenizer, monkeypatch):
    monkeypatch.setattr(base, "BACKENDS", dict(base.BACKENDS))
    register_backend("mine", lambda options: Empty(tokenizer))

    assert isinstance(build_backend(BackendOptions(kind="mine", model="m", url="http://x")), Empty)
    with pytest.raises(ConfigError, match=r"`backend` 'mime' is not known\. Did you mean 'mine'"):
        build_backend(BackendOptions(kind="mime", model="m"))


@pytest.mark.parametrize("name", base.BACKENDS)
def test_every_backend_can_be_imported(name):
    module, function = base.BACKENDS[name].split(":")

    assert callable(getattr(import_module(module), function))


def test_rows_have_as_many_prompts_as_a_model_answers_together():
    assert MAX_UNRELATED == MAX_PROMPTS
