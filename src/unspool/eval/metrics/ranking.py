"""Rankings written as "3 > 1 > 2", and how good they are.

In: an output; relevance by id. Out: ids, best first; nDCG@k as trec_eval computes it (gain = relevance).
"""

import math
import re
from collections.abc import Mapping, Sequence

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
