"""The cells of suites that consist of tasks: per task and depth, and the plain mean over tasks.

In: samples as written to samples.jsonl. Out: cells as written to summary.json.
Promise: what was not scored is null with n 0 and counted (`not_judged`, `unparsable`), never zero; a mean says
over how many tasks it goes.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from unspool.eval.config import TaskEval
from unspool.eval.metrics.pairs import pair_accuracy
from unspool.eval.metrics.reach import adaptation_rate, effective_length
from unspool.eval.stats import interval
from unspool.eval.task import Task

Cell = dict[str, Any]
Sample = dict[str, Any]
# Depths are continuous; a heatmap has rows.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def task_cells(config: TaskEval, tasks: Sequence[Task], samples: Sequence[Sample]) -> list[Cell]:
    """For each length: the mean over tasks, then each task with its depths."""
    cells: list[Cell] = []
    for length in sorted(config.lengths):
        here = [sample for sample in samples if (sample["suite"], sample["length"]) == (config.suite, length)]
        by_task = {
            task.name: _task(config, task, length, [s for s in here if s.get("task") == task.name]) for task in tasks
        }
        cells.append(_mean(config, length, [found[0] for found in by_task.values()]))
        cells += [cell for found in by_task.values() for cell in found]
    return cells


def reach(config: TaskEval, cells: Sequence[Cell], samples: Sequence[Sample]) -> dict[str, Any]:
    """How far a suite's mean holds, and how much of its score at the shortest length is kept at the longest."""
    of_suite = [cell for cell in cells if cell["suite"] == config.suite and cell["depth"] is None]
    means = {
        length: [cell["value"] for cell in of_suite if cell["length"] == length and cell["metric"] == "mean"]
        for length in config.lengths
    }

    def scores(length: int) -> list[float | None]:
        return [s["score"] for s in samples if (s["suite"], s["length"]) == (config.suite, length)]

    shortest, longest = min(config.lengths), max(config.lengths)
    rate = adaptation_rate(scores(longest), scores(shortest)) if longest > shortest else None
    return {
        "suite": config.suite,
        "mode": config.mode,
        "effective_length": effective_length(means),
        "adaptation_rate": None if rate is None else {"from": shortest, "to": longest, **vars(rate)},
    }


def _task(config: TaskEval, task: Task, length: int, samples: Sequence[Sample]) -> list[Cell]:
    def cell(depth: float | None, chosen: Sequence[Sample]) -> Cell:
        known = [sample["score"] for sample in chosen if sample["score"] is not None]
        low, high = interval(known) if known else (None, None)
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


def _mean(config: TaskEval, length: int, cells: Sequence[Cell]) -> Cell:
    known = [cell for cell in cells if cell["value"] is not None]
    value = fmean(cell["value"] for cell in known) if known else None

    def spread(side: str) -> float:
        # Tasks vary independently, so the squares of their half intervals add up.
        return math.sqrt(sum((cell[side] - cell["value"]) ** 2 for cell in known)) / len(known)

    return {
        **_head(config, length),
        "task": None,
        "metric": "mean",
        "depth": None,
        "value": value,
        "n": sum(cell["n"] for cell in known),
        "low": None if value is None else max(0.0, value - spread("low")),
        "high": None if value is None else min(1.0, value + spread("high")),
        "tasks": len(known),
        "of_tasks": len(cells),
        "not_judged": sum(cell["not_judged"] for cell in cells),
        "unparsable": sum(cell["unparsable"] for cell in cells),
    }


def _head(config: TaskEval, length: int) -> Cell:
    return {"suite": config.suite, "length": length, "mode": config.mode}


def _nearest(depth: float) -> float:
    return min(DEPTHS, key=lambda known: abs(known - depth))
