"""Losses by position: means over ranges that double, since what a model has before it matters by its order of size."""

from itertools import pairwise
from typing import Any

import numpy as np


def bucket_edges(length: int) -> list[int]:
    """0, 64, 128, 256, … length; from 128 on for lengths above 4K."""
    edges = [0, 64 if length <= 4096 else 128]
    while edges[-1] * 2 < length:
        edges.append(edges[-1] * 2)
    return [edge for edge in edges if edge < length] + [length]


def bucket_losses(losses: np.ndarray) -> list[dict[str, Any]]:
    """Mean loss of the tokens at positions [from, to), given the loss at positions 1, 2, …"""
    # The first token has nothing before it and so no loss.
    return bucket_means(losses, np.arange(1, len(losses) + 1), length=len(losses) + 1)


def bucket_means(losses: np.ndarray, positions: np.ndarray, *, length: int) -> list[dict[str, Any]]:
    """Mean loss of the tokens that stand at positions [from, to) of at most `length`; None with n 0 where none does."""
    order = np.argsort(positions, kind="stable")
    losses, places = losses[order], positions[order]
    buckets = []
    for start, stop in pairwise(bucket_edges(length)):
        first, last = np.searchsorted(places, (start, stop))
        part = losses[first:last]
        value = float(part.mean()) if len(part) else None
        buckets.append({"from": start, "to": stop, "value": value, "n": len(part)})
    return buckets
