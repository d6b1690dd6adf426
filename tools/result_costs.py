"""What a measure costs: prompt tokens from the committed answers, and the rate at which runs were scored."""

import json
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from unspool.studies.arm_scores import Measure
from unspool.studies.raw_results import FACTS, Run, Sample
from unspool.studies.raw_scores import OLD_NAMES


def prompt_tokens(runs: Sequence[Run], measure: Measure) -> float | None:
    """Return the prompt tokens of a measure, the mean over the runs that have it; None if they were not kept."""
    wanted = {(part.suite, part.task, part.length) for _, part in measure.parts}
    found = []
    for run in runs:
        tokens = _tokens([one for one in run.samples if _place(one) in wanted])
        if tokens:
            found.append(tokens)
    return fmean(found) if found else None


def scoring_rate(runs: Sequence[Run]) -> float | None:
    """Return prompt tokens per second of all runs whose seconds were kept; None if there are none.

    Suites that were scored later, in a call of their own, have no seconds and do not count.
    """
    tokens, seconds = 0.0, 0.0
    for run in runs:
        path = run.folder / FACTS
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        took = facts.get("seconds", {}).get(f"scores/{facts.get('stage')}")
        later = facts.get("scored_later", [])
        counted = _tokens([one for one in run.samples if one["suite"] not in later])
        if took and counted:
            tokens, seconds = tokens + counted, seconds + took
    return tokens / seconds if seconds else None


def _place(sample: Sample) -> tuple[str, str | None, int]:
    return OLD_NAMES.get(sample["suite"], sample["suite"]), sample.get("task"), sample["length"]


def _tokens(samples: Sequence[Sample]) -> int:
    """Return the tokens of all prompts; questions on one context share theirs."""
    asked = [one for one in samples if "hash" in one]  # short tasks have no questions
    prompts = {(*_place(one), one.get("context") or one["hash"]): one.get("prompt_tokens") or 0 for one in asked}
    return sum(prompts.values())
