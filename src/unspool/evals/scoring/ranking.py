"""Rankings written as "3 > 1 > 2", and how good they are.

In: an output; relevance by id. Out: ids, best first; nDCG@k as trec_eval computes it (gain = relevance).
"""

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unspool.core.stats import wilson

_CHAIN = re.compile(r"(\d+)(?:\s*>\s*(\d+))*")


def parse_ranking(output: str) -> list[str]:
    """The longest chain of numbers, each where it stands first; brackets, colons and "ID" are not read.

    Without any number it is the whole text, which is no document's id.
    """
    text = re.sub(r"[\[\]:]", "", output).lower().replace("id", "")
    longest = max((match[0] for match in _CHAIN.finditer(text)), key=len, default="")
    if not longest:
        return [text]
    return list(dict.fromkeys(number.strip() for number in longest.split(">")))


def ndcg(ranking: Sequence[str], relevance: Mapping[str, int], k: int = 10) -> float:
    """0 where nothing is relevant; an id that nobody judged takes up its place and gains nothing."""
    ideal = _gain(sorted((grade for grade in relevance.values() if grade > 0), reverse=True)[:k])
    found = _gain([max(0, relevance.get(document, 0)) for document in ranking[:k]])
    return found / ideal if ideal else 0.0


def _gain(grades: Sequence[int]) -> float:
    return math.fsum(grade / math.log2(place + 2) for place, grade in enumerate(grades))


# True and false claims in pairs: only a pair whose both claims are judged right counts (NoCha).


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
