"""True and false claims in pairs: only a pair whose both claims are judged right counts (NoCha).

In: verdicts by pair. Out: the share with n and Wilson's interval; guessing gets a quarter, not a half.
Promise: a pair of which one claim was not scored is left out and counted as missing, never as wrong.
"""

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from unspool.eval.stats import wilson

_VERDICT = re.compile(r"\b(true|false)\b", flags=re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class PairAccuracy:
    value: float | None
    n: int  # whole pairs
    missing: int  # pairs of which a claim was not scored
    low: float | None
    high: float | None


def parse_verdict(output: str) -> bool | None:
    """What was answered: the last "true" or "false" inside <answer> marks, else the first there is, else None."""
    marked = re.search(r"<answer>(.*?)(?:</answer>|$)", output, flags=re.IGNORECASE | re.DOTALL)
    found = _VERDICT.findall(marked[1] if marked else output)
    if not found:
        return None
    return str(found[-1 if marked else 0]).lower() == "true"


def pair_accuracy(scores: Iterable[tuple[Hashable, float | None]]) -> PairAccuracy:
    """From (pair, 1 or 0 or None) of single claims, two for each pair."""
    pairs: dict[Hashable, list[float | None]] = {}
    for pair, score in scores:
        pairs.setdefault(pair, []).append(score)
    whole = [all(claims) for claims in pairs.values() if len(claims) == 2 and None not in claims]
    n, right = len(whole), sum(whole)
    low, high = wilson(right, n) if n else (None, None)
    return PairAccuracy(value=right / n if n else None, n=n, missing=len(pairs) - n, low=low, high=high)
