"""Compute summary cells from samples, each with `n` and a 95% interval.

A number that was not measured is null with n 0, never zero. In suites of tasks, every task has equal weight. A mean has
the summed n of its tasks, an interval combined from theirs, and the number of tasks it covers. If a category lacks one
of its tasks, the category and the mean over categories are null.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from unspool.core.stats import score_interval, t_quantile, wilson
from unspool.evals.baselines import baseline_means
from unspool.evals.config import TaskEval
from unspool.evals.scoring.effective_length import adaptation_rate, effective_length, rate_lengths
from unspool.evals.scoring.ranking import pair_accuracy
from unspool.evals.suite import Cell, Sample, Task

# Depths are continuous; a heatmap needs discrete rows.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
MEAN, OVERALL = "mean", "overall"


def accuracy_cell(suite: str, length: int, depth: float | None, scores: Sequence[float]) -> Cell:
    value = fmean(scores) if scores else None
    low, high = wilson(sum(scores), len(scores)) if scores else (None, None)
    cell = {"suite": suite, "metric": "accuracy", "length": length, "depth": depth}
    return {**cell, "value": value, "n": len(scores), "low": low, "high": high}


def accuracy_cells(suite: str, length: int, depths: Sequence[float], samples: Sequence[Sample]) -> list[Cell]:
    """One cell over all depths (depth null), then one cell per depth of the grid."""
    chosen = [sample for sample in samples if sample["suite"] == suite and sample["length"] == length]
    cells = [accuracy_cell(suite, length, None, [sample["score"] for sample in chosen])]
    for depth in depths:
        scores = [sample["score"] for sample in chosen if sample["depth"] == depth]
        cells.append(accuracy_cell(suite, length, depth, scores))
    return cells


def loss_cells(suite: str, length: int, samples: Sequence[Sample]) -> list[Cell]:
    """One cell per position range: the mean over tokens, with an interval from the variation over windows."""
    windows = [sample["losses"] for sample in samples if sample["suite"] == suite and sample["length"] == length]
    return [_loss_cell(suite, length, buckets) for buckets in zip(*windows, strict=True)]


def _loss_cell(suite: str, length: int, buckets: Sequence[dict[str, Any]]) -> Cell:
    n = sum(bucket["n"] for bucket in buckets)
    value = sum(bucket["value"] * bucket["n"] for bucket in buckets) / n
    means = [bucket["value"] for bucket in buckets]
    # One window has no variation.
    half = t_quantile(len(means) - 1) * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return {
        "suite": suite,
        "metric": "loss",
        "length": length,
        "from": buckets[0]["from"],
        "to": buckets[0]["to"],
        "value": value,
        "n": n,
        "low": None if half is None else value - half,
        "high": None if half is None else value + half,
    }


def task_cells(
    config: TaskEval, tasks: Sequence[Task], samples: Sequence[Sample], *, of_tasks: int | None = None
) -> list[Cell]:
    """For each length: the mean over tasks, then each task with its depths. `of_tasks` is the suite's task count."""
    cells: list[Cell] = []
    for length in sorted(config.lengths):
        here = [sample for sample in samples if (sample["suite"], sample["length"]) == (config.suite, length)]
        by_task = {
            task.name: _task(config, task, length, [s for s in here if s.get("task") == task.name]) for task in tasks
        }
        cells.append(_mean(config, length, [found[0] for found in by_task.values()], of_tasks or len(tasks)))
        cells += [cell for found in by_task.values() for cell in found]
    return cells


def suite_summary(
    config: TaskEval,
    categories: Mapping[str, tuple[str, ...]],
    cells: Sequence[Cell],
    samples: Sequence[Sample],
    *,
    has_overall: bool = True,
) -> dict[str, Any]:
    """Means by length, the effective length and the adaptation rate (target score ÷ reference score)."""
    means = [
        mean
        for length in sorted(config.lengths)
        for mean in _means(config, categories, length, cells)
        if has_overall or mean["name"] != OVERALL
    ]
    # Use the number that the suite's paper reports, if all its parts are known.
    head = OVERALL if all(mean["value"] is not None for mean in means if mean["name"] == OVERALL) else MEAN
    head = head if categories and has_overall else MEAN
    of_suite = [sample for sample in samples if sample["suite"] == config.suite]
    # A prompt that was cut to the model's context says nothing about its full length.
    cut = {sample["length"] for sample in of_suite if "cut_tokens" in sample}
    lengths = [length for length in config.lengths if length not in cut] or config.lengths
    by_length = {
        length: [mean["value"] for mean in means if (mean["name"], mean["length"]) == (head, length)]
        for length in lengths
    }
    target, reference = rate_lengths(lengths, config.target_length, config.reference_length)
    is_known = target != reference and {target, reference} <= set(lengths)
    rate = adaptation_rate(_by_task(of_suite, target), _by_task(of_suite, reference)) if is_known else None
    return {
        "suite": config.suite,
        "mode": config.mode,
        "wording": next((sample["wording"] for sample in of_suite if "wording" in sample), None),
        "means": means,
        "average": _average(means, head, config.lengths),
        "effective_length": effective_length(by_length),
        "effective_length_of": head,
        "adaptation_rate": None if rate is None else {"from": reference, "to": target, **vars(rate)},
    }


def _average(means: Sequence[Mapping[str, Any]], head: str, lengths: Sequence[int]) -> dict[str, Any] | None:
    """Mean over lengths of the suite's main number, as in papers. None for one length or a missing score."""
    values = [mean["value"] for mean in means if mean["name"] == head]
    if len(lengths) < 2 or len(values) != len(lengths) or None in values:
        return None
    return {"of": head, "lengths": sorted(lengths), "value": fmean(values)}


def average_over(
    suite: str,
    categories: Mapping[str, tuple[str, ...]],
    lengths: Mapping[str, Sequence[int]],
    cells: Sequence[Cell],
) -> dict[str, Any] | None:
    """Mean over categories if each task has its own lengths. None if a score is missing."""
    known = {
        (cell["task"], cell["length"]): cell["value"]
        for cell in cells
        if cell["suite"] == suite and cell["depth"] is None and cell["value"] is not None
    }
    means = []
    for tasks in categories.values():
        asked = [(task, length) for task in tasks for length in lengths.get(task, ())]
        if not set(asked) <= set(known):
            return None
        by_task = [fmean(known[task, length] for length in lengths[task]) for task in tasks if task in lengths]
        means += [fmean(by_task)] if by_task else []
    all_lengths = sorted({length for each in lengths.values() for length in each})
    return {"of": OVERALL, "lengths": all_lengths, "value": fmean(means), "task_lengths": dict(lengths)}


def _by_task(samples: Sequence[Sample], length: int) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {}
    for sample in samples:
        if sample["length"] == length:
            found.setdefault(sample["task"], []).append(sample["score"])
    return found


def _means(
    config: TaskEval, categories: Mapping[str, tuple[str, ...]], length: int, cells: Sequence[Cell]
) -> list[dict[str, Any]]:
    """The plain mean over tasks, then each category, then the mean over categories."""
    of_suite = [cell for cell in cells if (cell["suite"], cell["length"]) == (config.suite, length)]
    here = [cell for cell in of_suite if cell["depth"] is None]
    by_task = {cell["task"]: cell for cell in here}
    plain = by_task[None]
    whole = {"length": length, "name": MEAN, "tasks": plain["tasks"], "of_tasks": plain["of_tasks"]}
    found = [{**whole, **{key: plain[key] for key in ("value", "n", "low", "high")}}]
    means = []
    for name, tasks in categories.items():
        known = [by_task[task] for task in tasks if task in by_task and by_task[task]["value"] is not None]
        value = combined(known) if len(known) == len(tasks) else combined([])
        means.append({"length": length, "name": name, "tasks": len(known), "of_tasks": len(tasks), **value})
    if not means:
        return found
    known = [mean for mean in means if mean["value"] is not None]
    value = combined(known) if len(known) == len(means) else combined([])
    counts = {key: sum(mean[key] for mean in means) for key in ("tasks", "of_tasks")}
    parts = {"categories": len(known), "of_categories": len(means)}
    return [*found, *means, {"length": length, "name": OVERALL, **counts, **parts, **value}]


def combined(parts: Sequence[Cell]) -> Cell:
    """Plain mean of independent means, with the summed n; null if there are none."""
    if not parts:
        return {"value": None, "n": 0, "low": None, "high": None}
    value = fmean(part["value"] for part in parts)

    def spread(side: str) -> float:
        # Tasks vary independently, so the squared half-widths of their intervals add up.
        return math.sqrt(sum((part[side] - part["value"]) ** 2 for part in parts)) / len(parts)

    return {
        "value": value,
        "n": sum(part["n"] for part in parts),
        "low": max(0.0, value - spread("low")),
        "high": min(1.0, value + spread("high")),
    }


def _task(config: TaskEval, task: Task, length: int, samples: Sequence[Sample]) -> list[Cell]:
    def cell(depth: float | None, chosen: Sequence[Sample], group: str = "") -> Cell:
        known = [sample["score"] for sample in chosen if sample["score"] is not None]
        low, high = score_interval(known) if known else (None, None)
        return {
            **_head(config, length),
            "task": f"{task.name}, {group}" if group else task.name,
            "metric": task.metric,
            "depth": depth,
            "value": fmean(known) if known else None,
            "n": len(known),
            "low": low,
            "high": high,
            "not_judged": sum(sample["score"] is None and "judgement" not in sample for sample in chosen),
            "unparsable": sum(sample["score"] is None and "judgement" in sample for sample in chosen),
            **({} if depth is not None else baseline_means(chosen)),
        }

    pairs = [(str(sample["pair"]), sample["score"]) for sample in samples if "pair" in sample]
    deep = [sample for sample in samples if sample["depth"] is not None]
    cells = [cell(None, samples)]
    if deep:
        cells += [cell(depth, [s for s in deep if _nearest(s["depth"]) == depth]) for depth in DEPTHS]
    for group in sorted({name for sample in samples for name in sample.get("groups", ())}):
        cells.append(cell(None, [sample for sample in samples if group in sample.get("groups", ())], group))
    return [*cells, _pairs(config, task, length, pairs)] if pairs else cells


def _pairs(config: TaskEval, task: Task, length: int, pairs: Sequence[tuple[str, float | None]]) -> Cell:
    """Share of pairs with two correct answers. Guessing gets 1 in 4."""
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
        **baseline_means(known),
    }


def _head(config: TaskEval, length: int) -> Cell:
    return {"suite": config.suite, "length": length, "mode": config.mode}


def _nearest(depth: float) -> float:
    return min(DEPTHS, key=lambda known: abs(known - depth))
