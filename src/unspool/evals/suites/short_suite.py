"""The suite `short`: lm-eval tasks with short prompts, as an entry of a recipe's `evals`.

This module needs neither lm-eval nor torch, because recipe checks import it. short.py runs the tasks.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from unspool.core.artifacts import folder_digest
from unspool.core.config import lookup
from unspool.core.errors import ConfigError
from unspool.core.formatting import join_words
from unspool.evals.config import EvalConfig
from unspool.evals.heldout import PlanInputs
from unspool.evals.suite import Cell, PlannedEval, QuestionId, Sample, Suite, Unit

if TYPE_CHECKING:
    from unspool.evals.backends.base import Backend

logger = logging.getLogger(__name__)

TASKS = ("hellaswag", "mmlu", "arc_challenge", "winogrande", "gsm8k")
# Short tasks of papers, as NAME:SHOTS.
SHORT_PRESETS: dict[str, tuple[str, ...]] = {
    # ProLong, Tables 6 and 26: shots as in the Open LLM Leaderboard.
    "prolong": ("hellaswag:10", "mmlu:5", "arc_challenge:25", "winogrande:5", "gsm8k:5"),
    # Untie the Knots, Table 3.
    "utk": ("nq_open:5", "triviaqa:5", "bbh_cot_fewshot:3", "humaneval:0", "mbpp:3", "gsm8k:4"),
}
# Tasks that run code written by the model, in lm-eval's process.
CODE_TASKS = ("humaneval", "mbpp")


def chosen_tasks(tasks: Sequence[str], preset: str | None, *, sandboxed: bool) -> list[str]:
    """The tasks to run: the given tasks, else the preset's, else `TASKS`.

    Tasks that run the model's code need a sandbox. Otherwise they are refused, or removed from a preset.
    """
    if preset is None:
        names = list(tasks) or list(TASKS)
    else:
        names = list(tasks) or list(lookup(SHORT_PRESETS, preset, kind="`preset` of short"))
    code = [name for name in names if name.startswith(CODE_TASKS)]
    if not code or sandboxed:
        return names
    reason = (
        f"{join_words(code)} would run code that the model writes, with your permissions on this machine; run it "
        "only in a container or virtual machine without network and without your files, and pass `sandboxed`"
    )
    if tasks:
        raise ConfigError(f"`tasks={code[0]!r}`: {reason}.")
    logger.warning(f"short: skipping {join_words(code)}: {reason}")
    return [name for name in names if name not in code]


class ShortEval(EvalConfig):
    """lm-eval tasks with short prompts. Needs `pip install 'unspool[eval]'`."""

    suite: Literal["short"]
    preset: str | None = Field(None, description="A paper's tasks and shots: `prolong` or `utk`. `tasks` overrides it.")
    tasks: list[str] = Field(
        [], description="Tasks of lm-eval, as `NAME` or `NAME:SHOTS`, such as `gsm8k:4`. Default: ProLong's five tasks."
    )
    samples: int | None = Field(None, ge=1, description="Questions per task. Default: all.")
    paths: dict[Literal["tasks"], str] = Field(
        {}, description="`tasks`: a folder with additional task files for lm-eval."
    )
    sandboxed: bool = Field(
        False,
        description="Allow tasks that run code written by the model (humaneval, mbpp). Set it only inside a sandbox.",
    )

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        try:
            _ = self.chosen
        except ConfigError as error:
            raise ValueError(str(error).rstrip(".")) from error
        return self

    @property
    def chosen(self) -> list[str]:
        return chosen_tasks(self.tasks, self.preset, sandboxed=self.sandboxed)


@dataclass(frozen=True, kw_only=True)
class ShortSuite(Suite):
    def lengths(self, config: ShortEval) -> list[int]:
        return [0]

    def labels(self, config: ShortEval) -> list[str]:
        return [f"short ({_name(task)})" for task in config.chosen]

    def inputs(self, config: ShortEval, root: Path) -> dict[str, dict[str, Any]]:
        return {"short tasks": {name: folder_digest(root / path) for name, path in config.paths.items()}}

    def plan(self, config: ShortEval, inputs: PlanInputs) -> "PlannedShort":
        return PlannedShort(self, config)

    def cells(self, config: ShortEval, samples: Sequence[Sample]) -> list[Cell]:
        """One cell per task. A group such as mmlu gets its mean; a tag has no mean and gets its tasks."""
        of_suite = [sample for sample in samples if sample["suite"] == self.name]
        found = [
            [cell for cell in sample["cells"] if cell["task"] == _name(sample["task"])] or sample["cells"]
            for sample in of_suite
        ]
        return [cell for cells in found for cell in cells]


class PlannedShort(PlannedEval):
    """One unit per task, so that a killed run keeps its finished tasks."""

    def __init__(self, suite: ShortSuite, config: ShortEval) -> None:
        self.suite, self.config = suite, config
        self.units = [
            Unit(planned=self, length=0, index=index, tokens=1, questions=(QuestionId(task=task, length=0, index=0),))
            for index, task in enumerate(config.chosen)
        ]

    def check(self) -> None:
        from unspool.evals.suites.short import check_tasks

        check_tasks(self.config.chosen, self.config.paths.get("tasks"))

    def prepare(self, unit: Unit) -> str:
        return unit.questions[0].task

    def ask(self, prepared: str, backend: "Backend") -> list[Cell]:
        from unspool.evals.suites.short import run_short

        assert backend.options is not None, "checked before the first unit"
        config = self.config
        found = run_short(
            backend.options,
            [prepared],
            samples=config.samples,
            include=config.paths.get("tasks"),
            sandboxed=config.sandboxed,
        )
        cells: list[Cell] = found["cells"]
        return cells

    def samples(self, unit: Unit, prepared: str, answers: list[Cell]) -> list[Sample]:
        return [{"suite": self.suite.name, "task": prepared, "length": unit.length, "cells": answers}]


def _name(task: str) -> str:
    return task.partition(":")[0]


SUITE = ShortSuite(name="short", title="Short tasks", config=ShortEval, measure="score", version=1, runs_model=True)
