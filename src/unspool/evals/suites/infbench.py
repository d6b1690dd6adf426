"""∞Bench's three retrieval tasks, at any length. Its book tasks are part of HELMET's suite.

The depth of the target is spread evenly over indices. `reference` scores like ∞Bench: the first run of digits, or for
KV the value as one of the words, split at spaces and ten punctuation marks. `fixed` accepts a value in upper or lower
case next to any punctuation, but not inside other letters.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from unspool.core.errors import ConfigError
from unspool.core.rng import rng_for
from unspool.evals.benchmark_copy import Reference
from unspool.evals.config import ReferenceEval
from unspool.evals.fill import Meter, fill, room, spread
from unspool.evals.suite import Ask, Question, Task
from unspool.evals.suites.helmet.json_kv import entry, lengthen, uuid_pairs
from unspool.evals.task_suite import TaskSuite

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
# Number of digits. In number_string, some digits are repeated.
DIGITS = {"passkey": 5, "number_string": 10}
NAMES = {"passkey": "pass key", "number_string": "sequence of digits"}
ANSWER_TOKENS = {"passkey": 6, "number_string": 12, "kv_retrieval": 50}


@dataclass(frozen=True)
class Sources:
    meter: Meter


def load(tokenizer: Any, paths: Mapping[str, str]) -> Sources:
    if paths:
        raise ConfigError(f"infbench: all tasks are generated; remove {', '.join(sorted(paths))} from `paths`.")
    return Sources(Meter(tokenizer, [NOISE * 40]))


def draw_number(task: str, ask: Ask) -> str:
    rng = rng_for(ask.seed, "infbench", task, ask.length, ask.index)
    digits = [int(digit) for digit in rng.integers(0, 10, size=DIGITS[task])]
    if task == "number_string":
        # Repeated digits make the number hard to copy.
        digits = [digit for digit in digits[:4] for _ in range(int(rng.integers(1, 4)))] + digits[4:]
        digits = digits[: DIGITS[task]]
    return "".join(map(str, digits))


def build_number(task: str, sources: Sources, ask: Ask) -> Question:
    meter, name, number = sources.meter, NAMES[task], draw_number(task, ask)
    head = f"There is an important info hidden inside a lot of irrelevant text. Find it and memorize the {name}.\n\n"
    needle = f"The {name} is {number}. Remember it. {number} is the {name}.\n"
    question = f"\nWhat is the {name}?\n"
    prefix = f"The {name} is"
    line_tokens = (meter.count(NOISE * 21) - meter.count(NOISE)) / 20
    depth = spread(ask.index, float(rng_for(ask.seed, "infbench depth", task).random()))

    def build_within(budget: int) -> Question:
        free = max(0, budget - meter.count(head + needle + question + prefix))
        lines = int(free / line_tokens)
        words = NOISE.split(" ")[: int((free / line_tokens - lines) * len(NOISE.split(" ")))]
        before = round(depth * lines)
        text = NOISE * before + needle + NOISE * (lines - before) + " ".join(words)
        return Question(
            context=head + text.rstrip(),
            question=question,
            prefix=prefix,
            references=(f" {number}",),
            depth=depth,
            meta={"mode": ask.mode, "generated": True},
        )

    return fill(build_within, meter, room(ask, ANSWER_TOKENS[task]), what=f"infbench {task}", length=ask.length)


def build_kv(sources: Sources, ask: Ask) -> Question:
    meter = sources.meter

    def pairs(count: int) -> list[tuple[str, str]]:
        return uuid_pairs(rng_for(ask.seed, "infbench kv", ask.length, ask.index), count)

    head = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    pair_tokens = meter.count(", ".join(entry(*pair) for pair in pairs(20))) / 20
    prefix = "The value associated with the specified key is:"
    limit, fixed = room(ask, ANSWER_TOKENS["kv_retrieval"]), meter.count(head + prefix) + pair_tokens
    depth = spread(ask.index, float(rng_for(ask.seed, "infbench depth", "kv").random()))

    def build_within(budget: int) -> Question:
        # Use one pair less than fits. A longer value fills the rest, because characters are finer steps.
        free = budget - fixed
        known = pairs(max(2, min(int((limit - fixed) / pair_tokens) - 1, int(free / pair_tokens))))
        at = min(len(known) - 1, int(depth * len(known)))
        key, value = known[at]
        extra_chars = max(0, int((free / pair_tokens - len(known)) * len(entry(key, value))))
        other = -1 if at != len(known) - 1 else 0
        known[other] = known[other][0], lengthen(known[other][1], extra_chars)
        return Question(
            context=f"{head}{{{', '.join(entry(*pair) for pair in known)}}}",
            question=f'\n\nKey: "{key}"\n',
            prefix=prefix,
            references=(f" {value}",),
            depth=at / (len(known) - 1),
            meta={"mode": ask.mode, "generated": True, "keys": len(known)},
        )

    return fill(build_within, meter, limit, what="infbench kv_retrieval", length=ask.length)


def score_number(output: str, question: Question) -> float:
    found = re.search("[0-9]+", output)
    return float(found is not None and found[0] == question.references[0].strip())


def score_kv(output: str, question: Question) -> float:
    value = question.references[0].strip()
    if question.meta["mode"] == "reference":
        return float(value in re.sub(r"[\n:\"',.?!{}]", " ", output).split())
    return float(re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", output.lower()) is not None)


def _task(name: str, build: Callable[[Sources, Ask], Question], score: Callable[[str, Question], float]) -> Task:
    return Task(name=name, metric="accuracy", answer_tokens=ANSWER_TOKENS[name], build=build, score=score)


TASKS = {
    **{name: _task(name, partial(build_number, name), score_number) for name in DIGITS},
    "kv_retrieval": _task("kv_retrieval", build_kv, score_kv),
}


class InfbenchEval(ReferenceEval):
    """∞Bench's retrieval tasks: passkeys, numbers and values anywhere in the context."""

    suite: Literal["infbench"]


def _read_reference(path: Path, config: InfbenchEval) -> Reference:
    from unspool.evals.suites import infbench_clone  # import late: it imports this module

    return infbench_clone.read(path, config)


SUITE = TaskSuite(
    name="infbench",
    title="∞Bench",
    config=InfbenchEval,
    version=2,
    tasks=TASKS,
    load=load,
    reference=_read_reference,
)
