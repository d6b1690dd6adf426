"""Two models compared answer with answer, where both answered the same prompts.

In: the scores of two models by the hash of each prompt. Out: by how much the second is better, with a 95% interval.
Promise: only prompts that both have count. The interval is of the difference itself, so what makes a prompt hard for
both does not widen it: it decides more than the intervals of the two models apart. Of right and wrong answers it
never has width zero, however few and however alike they are.
Price: questions on one context count as independent, as they do in summary.json.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from unspool.eval.stats import Z, bootstrap
from unspool.report.measures import Measure, winner
from unspool.report.results import ModelScores

# Quantiles of Student's t, two-sided 95%, for 1 to 4 degrees of freedom, where the expansion below is too coarse.
_T_SMALL = (12.706, 4.303, 3.182, 2.776)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Second minus first; None where no prompt was answered by both."""

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


NONE = Difference(value=None)


def difference(measure: Measure, first: ModelScores, second: ModelScores) -> Difference:
    """Of one measure; of a suite that consists of tasks, the mean over the tasks that both have."""
    if measure.spans:
        return _loss_difference(measure, first, second)
    parts = [
        answer_difference(_gains(first, second, suite, length))
        for suite in _parts(measure.suite, first, second)
        for length in measure.lengths
    ]
    return mean_difference([part for part in parts if part.n])


def ahead_of_all(measure: Measure, models: Mapping[str, ModelScores]) -> tuple[str | None, bool]:
    """(the model that beats each other one, or None; whether that was found answer by answer)."""
    pairs = {
        (one, other): difference(measure, models[other], models[one])
        for one in models
        for other in models
        if one != other
    }
    if any(pair.low is None for pair in pairs.values()):
        return winner(measure, list(models)), False
    sign = 1 if measure.higher_is_better else -1
    for one in models:
        beaten = [pairs[one, other] for other in models if other != one]
        if all(pair.decided and sign * (pair.value or 0.0) > 0 for pair in beaten):
            return one, True
    return None, True


def _parts(suite: str, first: ModelScores, second: ModelScores) -> list[str]:
    """The suite itself, or its tasks where it has any."""
    named = {name for name, _ in first.answers} & {name for name, _ in second.answers}
    tasks = sorted(name for name in named if name.startswith(f"{suite}: "))
    return tasks or ([suite] if suite in named else [])


def _gains(first: ModelScores, second: ModelScores, suite: str, length: int) -> list[tuple[float, float]]:
    before, after = first.answers.get((suite, length), {}), second.answers.get((suite, length), {})
    return [(before[key], after[key]) for key in sorted(before.keys() & after.keys())]


def answer_difference(pairs: Sequence[tuple[float, float]]) -> Difference:
    """From (first, second) scores of the same prompts, each between 0 and 1."""
    n = len(pairs)
    if not n:
        return NONE
    gains = [after - before for before, after in pairs]
    if all(score in (0.0, 1.0) for pair in pairs for score in pair):
        low, high = _right_or_wrong(sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains), n)
    else:
        low, high = bootstrap(gains) if n > 1 else (-1.0, 1.0)
    return Difference(value=fmean(gains), low=low, high=high, n=n)


def _right_or_wrong(gained: int, lost: int, n: int) -> tuple[float, float]:
    """Agresti and Min's interval: Wald's after half an answer is added to each of the four outcomes.

    A bootstrap of all-equal differences would claim to know them exactly, however few they are.
    """
    up, down, total = gained + 0.5, lost + 0.5, n + 2
    middle = (up - down) / total
    half = Z * math.sqrt(up + down - (up - down) ** 2 / total) / total
    value = (gained - lost) / n
    return max(-1.0, min(value, middle - half)), min(1.0, max(value, middle + half))


def mean_difference(parts: Sequence[Difference]) -> Difference:
    """The mean over tasks or lengths: prompts of different ones are independent, so squares of half intervals add."""
    known = [
        (part.value, part.low, part.high, part.n)
        for part in parts
        if part.value is not None and part.low is not None and part.high is not None
    ]
    if not known:
        return NONE
    value = fmean(middle for middle, *_ in known)
    below = math.hypot(*(middle - low for middle, low, _, _ in known)) / len(known)
    above = math.hypot(*(high - middle for middle, _, high, _ in known)) / len(known)
    return Difference(value=value, low=value - below, high=value + above, n=sum(n for *_, n in known))


def _loss_difference(measure: Measure, first: ModelScores, second: ModelScores) -> Difference:
    """The mean over windows; its interval from how much windows differ in their difference."""
    gains = []
    for length in measure.lengths:
        before, after = first.windows.get(length, {}), second.windows.get(length, {})
        for key in sorted(before.keys() & after.keys()):
            pair = [_within(windows[key], measure.spans) for windows in (before, after)]
            if pair[0] is not None and pair[1] is not None:
                gains.append(pair[1] - pair[0])
    if not gains:
        return NONE
    if len(gains) == 1:
        return Difference(value=gains[0], n=1)
    half = t_quantile(len(gains) - 1) * stdev(gains) / math.sqrt(len(gains))
    value = fmean(gains)
    return Difference(value=value, low=value - half, high=value + half, n=len(gains))


def _within(window: dict[tuple[int, int], tuple[float, int]], spans: Sequence[tuple[int, int]]) -> float | None:
    """The mean loss of one window over some spans of positions, by tokens; None where one of them is missing."""
    if not all(span in window for span in spans):
        return None
    found = [window[span] for span in spans]
    return sum(value * n for value, n in found) / sum(n for _, n in found)


def t_quantile(freedom: int) -> float:
    """Of Student's t, two-sided 95%: windows are few, and the normal's 1.96 would be too sure of them."""
    if freedom <= len(_T_SMALL):
        return _T_SMALL[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    # Cornish and Fisher's expansion; from 5 degrees on it is right to two decimals.
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))
