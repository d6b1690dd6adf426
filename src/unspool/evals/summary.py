"""The cells of suites that consist of tasks: per task and depth, and the means over tasks and categories.

In: samples as written to samples.jsonl. Out: cells, and what is said of each suite, as written to summary.json.
Promise: every task counts as much as every other, whatever its n; a mean has the n of all its tasks, an interval that
adds up theirs, and says over how many tasks of the suite it goes. What was not scored is null with n 0 and counted
(`not_judged`, `unparsable`), never zero: a category that lacks a task is null, and so is the whole of categories.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from unspool.core.stats import score_interval
from unspool.evals.config import TaskEval
from unspool.evals.scoring.effective_length import adaptation_rate, effective_length
from unspool.evals.scoring.ranking import pair_accuracy
from unspool.evals.suite import Suite, Task

Cell = dict[str, Any]
Sample = dict[str, Any]
# Depths are continuous; a heatmap has rows.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
MEAN, OVERALL = "mean", "overall"


def task_cells(
    config: TaskEval, tasks: Sequence[Task], samples: Sequence[Sample], *, of_tasks: int | None = None
) -> list[Cell]:
    """For each length: the mean over tasks, then each task with its depths. `of_tasks`: all that the suite has."""
    cells: list[Cell] = []
    for length in sorted(config.lengths):
        here = [sample for sample in samples if (sample["suite"], sample["length"]) == (config.suite, length)]
        by_task = {
            task.name: _task(config, task, length, [s for s in here if s.get("task") == task.name]) for task in tasks
        }
        cells.append(_mean(config, length, [found[0] for found in by_task.values()], of_tasks or len(tasks)))
        cells += [cell for found in by_task.values() for cell in found]
    return cells


def suite_summary(config: TaskEval, suite: Suite, cells: Sequence[Cell], samples: Sequence[Sample]) -> dict[str, Any]:
    """A suite's means by length; how far they hold, and how much of the shortest length's is kept at the longest."""
    means = [mean for length in sorted(config.lengths) for mean in _means(config, suite, length, cells)]
    # The number that the suite's papers print, where all of it is known.
    head = OVERALL if all(mean["value"] is not None for mean in means if mean["name"] == OVERALL) else MEAN
    head = head if suite.categories else MEAN
    by_length = {
        length: [mean["value"] for mean in means if (mean["name"], mean["length"]) == (head, length)]
        for length in config.lengths
    }
    shortest, longest = min(config.lengths), max(config.lengths)
    of_suite = [sample for sample in samples if sample["suite"] == config.suite]
    rate = adaptation_rate(_by_task(of_suite, longest), _by_task(of_suite, shortest)) if longest > shortest else None
    return {
        "suite": config.suite,
        "mode": config.mode,
        "wording": next((sample["wording"] for sample in of_suite if "wording" in sample), None),
        "means": means,
        "effective_length": effective_length(by_length),
        "effective_length_of": head,
        "adaptation_rate": None if rate is None else {"from": shortest, "to": longest, **vars(rate)},
    }


def _by_task(samples: Sequence[Sample], length: int) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {}
    for sample in samples:
        if sample["length"] == length:
            found.setdefault(sample["task"], []).append(sample["score"])
    return found


def _means(config: TaskEval, suite: Suite, length: int, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The plain mean over tasks; then, of a suite that has them, its categories and the mean of all categories."""
    here = [cell for cell in cells if (cell["suite"], cell["length"], cell["depth"]) == (config.suite, length, None)]
    by_task = {cell["task"]: cell for cell in here}
    plain = by_task[None]
    whole = {"length": length, "name": MEAN, "tasks": plain["tasks"], "of_tasks": plain["of_tasks"]}
    found = [{**whole, **{key: plain[key] for key in ("value", "n", "low", "high")}}]
    categories = []
    for name, tasks in suite.categories.items():
        known = [by_task[task] for task in tasks if task in by_task and by_task[task]["value"] is not None]
        value = combined(known) if len(known) == len(tasks) else combined([])
        categories.append({"length": length, "name": name, "tasks": len(known), "of_tasks": len(tasks), **value})
    if not categories:
        return found
    known = [category for category in categories if category["value"] is not None]
    value = combined(known) if len(known) == len(categories) else combined([])
    counts = {key: sum(category[key] for category in categories) for key in ("tasks", "of_tasks")}
    parts = {"categories": len(known), "of_categories": len(categories)}
    return [*found, *categories, {"length": length, "name": OVERALL, **counts, **parts, **value}]


def combined(parts: Sequence[Cell]) -> Cell:
    """The plain mean of independent means, with the n of all; nothing where there are none."""
    if not parts:
        return {"value": None, "n": 0, "low": None, "high": None}
    value = fmean(part["value"] for part in parts)

    def spread(side: str) -> float:
        # Tasks vary independently, so the squares of their half intervals add up.
        return math.sqrt(sum((part[side] - part["value"]) ** 2 for part in parts)) / len(parts)

    return {
        "value": value,
        "n": sum(part["n"] for part in parts),
        "low": max(0.0, value - spread("low")),
        "high": min(1.0, value + spread("high")),
    }


def _task(config: TaskEval, task: Task, length: int, samples: Sequence[Sample]) -> list[Cell]:
    def cell(depth: float | None, chosen: Sequence[Sample]) -> Cell:
        known = [sample["score"] for sample in chosen if sample["score"] is not None]
        low, high = score_interval(known) if known else (None, None)
        return {
            **_head(config, length),
            "task": task.name,
            "metric": task.metric,
            "depth": depth,
            "value": fmean(known) if known else None,
            "n": len(known),
            "low": low,
            "high": high,
            "not_judged": sum(sample["score"] is None and "judgement" not in sample for sample in chosen),
            "unparsable": sum(sample["score"] is None and "judgement" in sample for sample in chosen),
        }

    pairs = [(str(sample["pair"]), sample["score"]) for sample in samples if "pair" in sample]
    deep = [sample for sample in samples if sample["depth"] is not None]
    cells = [cell(None, samples)]
    if deep:
        cells += [cell(depth, [s for s in deep if _nearest(s["depth"]) == depth]) for depth in DEPTHS]
    return [*cells, _pairs(config, task, length, pairs)] if pairs else cells


def _pairs(config: TaskEval, task: Task, length: int, pairs: Sequence[tuple[str, float | None]]) -> Cell:
    """Of questions that come in pairs: how many pairs are right as a whole; guessing gets one in four."""
    found = pair_accuracy(pairs)
    return {
        **_head(config, length),
        "task": f"{task.name}, pairs",
        "metric": "pair accuracy",
        "depth": None,
        "value": found.value,
        "n": found.n,
        "low": found.low,
        "high": found.high,
        "not_judged": found.missing,
        "unparsable": 0,
    }


def _mean(config: TaskEval, length: int, cells: Sequence[Cell], of_tasks: int) -> Cell:
    known = [cell for cell in cells if cell["value"] is not None]
    return {
        **_head(config, length),
        "task": None,
        "metric": MEAN,
        "depth": None,
        **combined(known),
        "tasks": len(known),
        "of_tasks": of_tasks,
        "not_judged": sum(cell["not_judged"] for cell in cells),
        "unparsable": sum(cell["unparsable"] for cell in cells),
    }


def _head(config: TaskEval, length: int) -> Cell:
    return {"suite": config.suite, "length": length, "mode": config.mode}


def _nearest(depth: float) -> float:
    return min(DEPTHS, key=lambda known: abs(known - depth))
