"""Scores of rankings such as "3 > 1 > 2" (nDCG), and of true and false claims in pairs (NoCha)."""

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unspool.core.stats import wilson

_CHAIN = re.compile(r"(\d+)(?:\s*>\s*(\d+))*")


def parse_ranking(output: str) -> list[str]:
    """Return the longest chain of numbers, without duplicates. Ignores brackets, colons and "ID".

    An output without numbers gives the whole text, which is not a document id.
    """
    text = re.sub(r"[\[\]:]", "", output).lower().replace("id", "")
    longest = max((match[0] for match in _CHAIN.finditer(text)), key=len, default="")
    if not longest:
        return [text]
    return list(dict.fromkeys(number.strip() for number in longest.split(">")))


def ndcg(ranking: Sequence[str], relevance: Mapping[str, int], k: int = 10) -> float:
    """Return nDCG@k as in trec_eval (gain = relevance). 0 if nothing is relevant; unknown ids have no gain."""
    ideal = _gain(sorted((grade for grade in relevance.values() if grade > 0), reverse=True)[:k])
    found = _gain([max(0, relevance.get(document, 0)) for document in ranking[:k]])
    return found / ideal if ideal else 0.0


def _gain(grades: Sequence[int]) -> float:
    return math.fsum(grade / math.log2(place + 2) for place, grade in enumerate(grades))


_VERDICT = re.compile(r"\b(true|false)\b", flags=re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class PairAccuracy:
    value: float | None
    n: int  # complete pairs
    missing: int  # pairs with an unscored claim
    low: float | None
    high: float | None


def parse_verdict(output: str) -> bool | None:
    """Return the last "true" or "false" inside <answer> tags, else the first in the output, else None."""
    marked = re.search(r"<answer>(.*?)(?:</answer>|$)", output, flags=re.IGNORECASE | re.DOTALL)
    found = _VERDICT.findall(marked[1] if marked else output)
    if not found:
        return None
    return str(found[-1 if marked else 0]).lower() == "true"


def pair_accuracy(scores: Iterable[tuple[Hashable, float | None]]) -> PairAccuracy:
    """Count pairs with two correct claims, from (pair, score) of single claims."""
    pairs: dict[Hashable, list[float | None]] = {}
    for pair, score in scores:
        pairs.setdefault(pair, []).append(score)
    whole = [all(claims) for claims in pairs.values() if len(claims) == 2 and None not in claims]
    n, right = len(whole), sum(whole)
    low, high = wilson(right, n) if n else (None, None)
    return PairAccuracy(value=right / n if n else None, n=n, missing=len(pairs) - n, low=low, high=high)
