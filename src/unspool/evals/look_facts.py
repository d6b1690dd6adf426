"""Results of an effective-length measurement: scores by length, effective length, and a summary sentence."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from unspool.core.formatting import format_duration, format_percent, join_words
from unspool.core.sizes import format_size
from unspool.core.stats import score_interval
from unspool.evals.backends.base import ContextLimit
from unspool.evals.scoring.effective_length import KEPT, relative_effective_length
from unspool.evals.suite import Cell, Sample
from unspool.evals.summary import combined

Stop = Literal["context", "collapse", "budget", "refusal", "low score"]
TASK_TITLES = {"niah": "needle", "key_value": "key-value", "vt": "variable tracing"}
# A task with a lower score at the shortest length says nothing about longer lengths.
MIN_SCORE = 0.1
# The score has collapsed if its interval is below this share of the score at the shortest length.
HALF = 0.5


def task_name(sample: Mapping[str, Any]) -> str:
    return str(sample.get("task") or sample["suite"])


def task_cell(samples: Sequence[Sample]) -> Cell:
    scores = [float(sample["score"]) for sample in samples]
    low, high = score_interval(scores)
    return {"value": sum(scores) / len(scores), "n": len(scores), "low": low, "high": high}


def length_rows(samples: Sequence[Sample], tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Mean over tasks and score of each task, for lengths at which every task has an answer."""
    found = []
    for length in sorted({sample["length"] for sample in samples}):
        here = {
            task: [s for s in samples if (s["length"], task_name(s)) == (length, task) and s["score"] is not None]
            for task in tasks
        }
        if here and all(here.values()):
            cells = {task: task_cell(group) for task, group in here.items()}
            found.append({"length": length, **combined(list(cells.values())), "tasks": cells})
    return found


def has_collapsed(rows: Sequence[Mapping[str, Any]]) -> bool:
    """True if the interval at the last length is below half of the score at the first."""
    return len(rows) > 1 and bool(rows[-1]["high"] < HALF * rows[0]["value"])


def look_facts(
    model: str,
    samples: Sequence[Sample],
    *,
    tasks: Sequence[str],
    left_out: Mapping[str, str],
    lengths: Sequence[int],
    context: ContextLimit | None,
    stop: Stop,
    refusal: str,
    budget: float,
    seconds: float,
    needed: float | None,
) -> dict[str, Any]:
    """Results for `--json`, the page and the terminal.

    `tasks` are the tasks that the model can do at the shortest length. `lengths` are all planned lengths. `needed` is
    the predicted number of seconds for the first length that did not fit the budget.
    """
    # If the model can do no task, show all tasks that were run.
    rows = length_rows(samples, tasks or list(dict.fromkeys(task_name(sample) for sample in samples)))
    by_length = {
        row["length"]: {
            task: [float(s["score"]) for s in samples if (s["length"], task_name(s)) == (row["length"], task)]
            for task in tasks
        }
        for row in rows
    }
    estimate = relative_effective_length(by_length) if tasks and len(rows) > 1 else None
    longest = rows[-1]["length"] if rows else 0
    not_asked = [length for length in lengths if length > longest]
    is_open = bool(not_asked) and stop in ("budget", "refusal")
    facts: dict[str, Any] = {
        "effective_length": None if estimate is None else vars(estimate),
        "at_least": estimate is not None and is_open and estimate.value == longest,
        "high_is_open": estimate is not None and is_open and estimate.high == longest,
        "kept_share": KEPT,
        "context": None if context is None else context._asdict(),
        "lengths": rows,
        "tasks": list(tasks),
        "left_out_tasks": dict(left_out),
        "not_asked": not_asked,
        "stop": stop,
        "refusal": refusal,
        "questions": len(samples),
        "seconds": round(seconds, 1),
        "budget": budget,
        "needed_seconds": None if needed is None else round(needed, 1),
    }
    return {**facts, "sentence": _sentence(model, facts), "notes": _notes(facts)}


def _sentence(model: str, facts: Mapping[str, Any]) -> str:
    rows, found = facts["lengths"], facts["effective_length"]
    if not rows:
        return (
            f"The budget of {format_duration(facts['budget'])} ended before {model} answered one question of each "
            "task. The effective length was not determined."
        )
    first = rows[0]
    if not facts["tasks"]:
        right = round(first["value"] * first["n"])
        few = "none" if right == 0 else f"too few (about {right})"
        return (
            f"{model} answers {few} of {first['n']} questions correctly even at {format_size(first['length'])} tokens. "
            "The effective length was not determined."
        )
    basis = f"its score at {format_size(first['length'])} ({format_percent(first['value'])}, n = {first['n']})"
    claimed = f" of {format_size(facts['context']['tokens'])} claimed" if facts["context"] else ""
    if found is None:
        return f"{model} was tested at only one length, {basis}. The effective length was not determined."
    value = f"at least {format_size(found['value'])}" if facts["at_least"] else format_size(found["value"])
    high = format_size(found["high"]) + (" or more" if facts["high_is_open"] else "")
    tested = _lengths([row["length"] for row in rows])
    return (
        f"The effective length of {model} is {value} tokens{claimed} (95% interval {format_size(found['low'])} to "
        f"{high}, among the tested lengths {tested}): the longest tested length at which it keeps "
        f"{format_percent(facts['kept_share'])} of {basis}."
    )


def _lengths(lengths: Sequence[int]) -> str:
    """All lengths, or the first and last of more than three."""
    if len(lengths) > 3:
        return f"{format_size(lengths[0])} to {format_size(lengths[-1])}"
    return join_words([format_size(length) for length in lengths])


def _notes(facts: Mapping[str, Any]) -> list[str]:
    """Skipped tasks and lengths, with reasons."""
    notes = [f"{TASK_TITLES.get(task, task)}: {reason}" for task, reason in facts["left_out_tasks"].items()]
    if facts["context"] is None:
        notes.append("the model's claimed context is unknown: neither a config nor the server reports it")
    lengths = facts["not_asked"]
    if not lengths:
        return notes
    shown = _lengths(lengths)
    if facts["stop"] == "collapse":
        notes.append(f"{shown} not tested: the score fell below half of the score at the shortest length")
    elif facts["stop"] == "refusal":
        notes.append(f"{shown} not tested: the server refused the first prompt of this length ({facts['refusal']})")
    elif facts["stop"] == "budget":
        needed = facts["needed_seconds"]
        more = f"; {format_size(lengths[0])} needs about {format_duration(needed)} more" if needed else ""
        notes.append(f"{shown} not tested: the budget of {format_duration(facts['budget'])} was used up{more}")
    return notes
