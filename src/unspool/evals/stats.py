"""From samples to the cells of a summary, each with `n` and a 95% interval.

In: samples as written to samples.jsonl. Out: cells as written to summary.json.
Promise: what was not scored is null with n 0, never zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

Z = 1.96  # of a 95% interval


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Wilson's score interval, which stays within 0 and 1 and has width even at 0 or n successes."""
    share = successes / n
    center = share + Z**2 / (2 * n)
    spread = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    scale = 1 + Z**2 / n
    # The formula holds the share; its rounding may not, by a last digit, at 0 and 1.
    return max(0.0, min(share, (center - spread) / scale)), min(1.0, max(share, (center + spread) / scale))


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


def bootstrap(scores: Sequence[float], *, draws: int = 2000) -> tuple[float, float]:
    """The middle 95% of means of samples drawn again from these, by a fixed seed."""
    values = np.asarray(scores, dtype=np.float64)
    rng = np.random.default_rng(len(values))
    means = values[rng.integers(len(values), size=(draws, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    mean = float(values.mean())
    return min(mean, float(low)), max(mean, float(high))


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Wilson's where every score is right or wrong, else by bootstrap; one graded score tells nothing of others."""
    if all(score in (0.0, 1.0) for score in scores):
        return wilson(sum(scores), len(scores))
    return bootstrap(scores) if len(scores) > 1 else (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """By how much the second of two models is better, on the prompts that both answered."""

    value: float | None
    low: float | None
    high: float | None
    n: int


def paired_difference(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> Difference:
    """From the samples of two models; prompts are equal where their hashes are."""
    known = {sample["hash"]: sample["score"] for sample in before if sample["score"] is not None}
    gains = [
        sample["score"] - known[sample["hash"]]
        for sample in after
        if sample["score"] is not None and sample["hash"] in known
    ]
    if not gains:
        return Difference(value=None, low=None, high=None, n=0)
    low, high = bootstrap(gains) if len(gains) > 1 else (-1.0, 1.0)
    return Difference(value=fmean(gains), low=low, high=high, n=len(gains))
