"""Trivial baselines of generated suites: the score of always taking the first, the last or a random item.

The items of a question are the answers that a reader could pick without understanding it, in the order of the context.
A score means something only above these baselines.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from unspool.core.formatting import format_percent
from unspool.core.sizes import format_size

RANDOM, FIRST, LAST = "random", "first", "last"
BASELINES = (RANDOM, FIRST, LAST)
KEY = "baselines"
"""Of samples and cells: scores by baseline."""

Item = TypeVar("Item")


def pick_items(items: Sequence[Item], rng: np.random.Generator) -> dict[str, Item]:
    """Return the item that each baseline takes."""
    return {RANDOM: items[int(rng.integers(len(items)))], FIRST: items[0], LAST: items[-1]}


def baseline_scores(
    items: Sequence[str], score: Callable[[str], float | None], rng: np.random.Generator
) -> dict[str, Any]:
    """Return the `baselines` entry of a sample. Empty if the question has no items, or if a judge scores it."""
    found = {name: score(item) for name, item in pick_items(items, rng).items()} if items else {}
    return {} if None in found.values() else _entry(found)


def baseline_means(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the `baselines` entry of a cell: means over samples or cells. Empty if one of them has no baselines."""
    known = [part.get(KEY) for part in parts]
    if not known or not all(known):
        return {}
    return _entry({name: fmean(part[name] for part in known if part) for name in BASELINES})


def describe_baselines(by_length: Mapping[int, Mapping[str, float]]) -> str:
    """List the baselines of a suite by length, as printed beside its scores."""
    parts = [
        f"{format_size(length)}: {', '.join(format_percent(found[name]) for name in BASELINES)}"
        for length, found in sorted(by_length.items())
    ]
    return f"trivial baselines (random, first, last item): {'; '.join(parts)}"


def _entry(scores: Mapping[str, Any]) -> dict[str, Any]:
    return {KEY: dict(scores)} if scores else {}
