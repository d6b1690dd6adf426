"""From samples to the cells of a summary, each with `n` and a 95% interval.

In: samples as written to samples.jsonl. Out: cells as written to summary.json.
Promise: what was not scored is null with n 0, never zero.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from unspool.core.stats import Z, wilson


def accuracy_cell(suite: str, length: int, depth: float | None, scores: Sequence[float]) -> dict[str, Any]:
    value = fmean(scores) if scores else None
    low, high = wilson(sum(scores), len(scores)) if scores else (None, None)
    cell = {"suite": suite, "metric": "accuracy", "length": length, "depth": depth}
    return {**cell, "value": value, "n": len(scores), "low": low, "high": high}


def accuracy_cells(
    suite: str, length: int, depths: Sequence[float], samples: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """All depths together (depth null), then each depth of the grid."""
    chosen = [sample for sample in samples if sample["suite"] == suite and sample["length"] == length]
    cells = [accuracy_cell(suite, length, None, [sample["score"] for sample in chosen])]
    for depth in depths:
        scores = [sample["score"] for sample in chosen if sample["depth"] == depth]
        cells.append(accuracy_cell(suite, length, depth, scores))
    return cells


def loss_cells(length: int, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One cell per range of positions: the mean over tokens, its interval from the spread over windows."""
    windows = [sample["losses"] for sample in samples if sample["suite"] == "perplexity" and sample["length"] == length]
    return [_loss_cell(length, buckets) for buckets in zip(*windows, strict=True)]


def _loss_cell(length: int, buckets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    n = sum(bucket["n"] for bucket in buckets)
    value = sum(bucket["value"] * bucket["n"] for bucket in buckets) / n
    means = [bucket["value"] for bucket in buckets]
    # One window says nothing about how windows differ.
    half = Z * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return {
        "suite": "perplexity",
        "metric": "loss",
        "length": length,
        "from": buckets[0]["from"],
        "to": buckets[0]["to"],
        "value": value,
        "n": n,
        "low": None if half is None else value - half,
        "high": None if half is None else value + half,
    }
