"""What each run of a study was found to do, question by question.

In: the scores folder of a run's stage. Out: `Answers`: for every `Part`, each question's score and the prompt that it
belongs to.
Promise: what was not scored is left out, never 0; a folder without a manifest does not count.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unspool.base.artefact import read_manifest
from unspool.base.errors import DataError
from unspool.eval.run import PROMPTS, SAMPLES
from unspool.recipes.study_compare import LOSS, Measure, Part
from unspool.recipes.study_stats import Contributions


class Answer(NamedTuple):
    prompt: str
    """Questions on one context are one prompt: they fail together."""
    score: float


Answers = dict[Part, dict[str, Answer]]
"""Part: hash of a question: its answer."""


def read_answers(folder: Path) -> Answers | None:
    """None if nothing was published there."""
    manifest = read_manifest(folder)
    if manifest is None or not (folder / SAMPLES).is_file():
        return None
    together = _per_context(manifest.get("settings", {}).get("evals", []))
    contexts = {line["hash"]: line["context"] for line in _lines(folder / PROMPTS)}
    samples = list(_lines(folder / SAMPLES))
    firsts: dict[tuple[Any, ...], str] = {}
    for sample in samples:
        group = _group(sample, together)
        firsts[group] = min(firsts.get(group, sample["hash"]), sample["hash"])
    answers: Answers = {}
    for sample in samples:
        prompt = contexts.get(sample["hash"]) or firsts[_group(sample, together)]
        for part, score in _scores(sample):
            answers.setdefault(part, {})[sample["hash"]] = Answer(f"{sample['suite']} {prompt}", score)
    return answers


def _scores(sample: dict[str, Any]) -> Iterator[tuple[Part, float]]:
    suite, task, length = sample["suite"], sample.get("task"), sample["length"]
    if suite == LOSS:
        for bucket in sample["losses"]:
            if bucket["value"] is not None:
                yield Part(LOSS, None, length, bucket["from"], bucket["to"]), bucket["value"]
    elif sample["score"] is not None:
        yield Part(suite, task, length), sample["score"]


def _per_context(evals: Sequence[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """Suite and length: how many questions in a row are about one context."""
    return {
        (entry["suite"], length): int(entry.get("questions") or entry.get("needles") or 1)
        for entry in evals
        for length in entry.get("lengths") or [entry.get("length")]
    }


def _group(sample: dict[str, Any], together: dict[tuple[str, int], int]) -> tuple[Any, ...]:
    size = together.get((sample["suite"], sample["length"]), 1)
    return sample["suite"], sample.get("task"), sample["length"], sample["index"] // size


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    # Not splitlines(): outputs may hold separators that it takes for the ends of lines.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}: line {number} is not JSON ({error}); score this model again.") from None


def value_of(answers: Answers, measure: Measure) -> float | None:
    """The measure's value; None where one of its parts was not measured."""
    total = 0.0
    for weight, part in measure.parts:
        found = answers.get(part)
        if not found:
            return None
        total += weight * sum(answer.score for answer in found.values()) / len(found)
    return total


def count_of(answers: Answers, measure: Measure) -> int:
    """Questions, or windows of text."""
    return len({key for _, part in measure.parts for key in answers.get(part, {})})


def contributions_of(first: dict[int, Answers], second: dict[int, Answers], measure: Measure) -> Contributions:
    """By how much the first arm is above the second: seed by seed, on the questions that both answered.

    A seed in which a part has no question in common says nothing, and is left out.
    """
    found: dict[int, dict[str, float]] = {}
    for seed in sorted(first.keys() & second.keys()):
        prompts: dict[str, float] = {}
        for weight, part in measure.parts:
            ours, theirs = first[seed].get(part, {}), second[seed].get(part, {})
            both = sorted(ours.keys() & theirs.keys())
            if not both:
                prompts = {}
                break
            for key in both:
                gain = weight * (ours[key].score - theirs[key].score) / len(both)
                prompts[ours[key].prompt] = prompts.get(ours[key].prompt, 0.0) + gain
        if prompts:
            found[seed] = prompts
    return found


def common_questions(
    first: dict[int, Answers], second: dict[int, Answers], measure: Measure, seeds: Sequence[int]
) -> int:
    return sum(
        len({key for _, part in measure.parts for key in first[seed].get(part, {}).keys() & second[seed].get(part, {})})
        for seed in seeds
    )
