"""∞Bench's three retrieval tasks as a `Suite`, at any length.

In: sources (a tokenizer is all), an `Ask`. Out: `Question`; the depth of what is sought is spread evenly over indices.
`reference` scores as ∞Bench does: the first run of digits, or for KV the value anywhere in the output. `fixed` wants
digits and value whole: a longer number or a value inside other letters does not count.
Elsewhere: ∞Bench's questions and summaries of books (helmet/books.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from unspool.core.errors import ConfigError
from unspool.core.rng import rng_for
from unspool.evals.config import TaskEval
from unspool.evals.fill import Meter, fill, room, spread
from unspool.evals.suite import Ask, Question, Task
from unspool.evals.suites.helmet.json_kv import uuids
from unspool.evals.task_suite import TaskSuite

VERSION = 1
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
# Digits of the passkey, and of the number of which some digits come several times in a row.
DIGITS = {"passkey": 5, "number_string": 10}
NAMED = {"passkey": "pass key", "number_string": "sequence of digits"}
ANSWER_TOKENS = {"passkey": 6, "number_string": 12, "kv_retrieval": 50}


@dataclass(frozen=True)
class Sources:
    meter: Meter


def load(tokenizer: Any, paths: Mapping[str, str]) -> Sources:
    if paths:
        raise ConfigError(f"infbench: its tasks are generated and read no files; leave out {', '.join(sorted(paths))}.")
    return Sources(Meter(tokenizer, [NOISE * 40]))


def number_for(task: str, ask: Ask) -> str:
    rng = rng_for(ask.seed, "infbench", task, ask.length, ask.index)
    digits = [int(digit) for digit in rng.integers(0, 10, size=DIGITS[task])]
    if task == "number_string":
        # Repeats are what makes it hard to copy.
        digits = [digit for digit in digits[:4] for _ in range(int(rng.integers(1, 4)))] + digits[4:]
        digits = digits[: DIGITS[task]]
    return "".join(map(str, digits))


def build_number(task: str, sources: Sources, ask: Ask) -> Question:
    meter, named, number = sources.meter, NAMED[task], number_for(task, ask)
    head = f"There is an important info hidden inside a lot of irrelevant text. Find it and memorize the {named}.\n\n"
    needle = f"The {named} is {number}. Remember it. {number} is the {named}.\n"
    question = f"\nWhat is the {named}?\n"
    cue = f"The {named} is"
    size = (meter.count(NOISE * 21) - meter.count(NOISE)) / 20
    depth = spread(ask.index, float(rng_for(ask.seed, "infbench depth", task).random()))

    def asked(budget: int) -> Question:
        free = max(0, budget - meter.count(head + needle + question + cue))
        lines = int(free / size)
        words = NOISE.split(" ")[: int((free / size - lines) * len(NOISE.split(" ")))]
        place = round(depth * lines)
        text = NOISE * place + needle + NOISE * (lines - place) + " ".join(words)
        return Question(
            context=head + text.rstrip(),
            question=question,
            prefix=cue,
            references=(f" {number}",),
            depth=depth,
            meta={"mode": ask.mode, "generated": True},
        )

    return fill(asked, meter, room(ask, ANSWER_TOKENS[task]), what=f"infbench {task}", length=ask.length)


def build_kv(sources: Sources, ask: Ask) -> Question:
    meter = sources.meter
    head = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    size = meter.count(", ".join(_pair(*pair) for pair in _pairs(ask, 20))) / 20
    cue = "The value associated with the specified key is:"
    limit, fixed = room(ask, ANSWER_TOKENS["kv_retrieval"]), meter.count(head + cue) + size
    depth = spread(ask.index, float(rng_for(ask.seed, "infbench depth", "kv").random()))

    def asked(budget: int) -> Question:
        # One pair less than would fit, and a value longer by what that leaves: letters come in smaller steps.
        free = budget - fixed
        known = _pairs(ask, max(2, min(int((limit - fixed) / size) - 1, int(free / size))))
        at = min(len(known) - 1, int(depth * len(known)))
        key, value = known[at]
        longer = max(0, int((free / size - len(known)) * len(_pair(key, value))))
        other = -1 if at != len(known) - 1 else 0
        known[other] = known[other][0], known[other][1] + (known[other][1] * (1 + longer // 36))[:longer]
        return Question(
            context=f"{head}{{{', '.join(_pair(*pair) for pair in known)}}}",
            question=f'\n\nKey: "{key}"\n',
            prefix=cue,
            references=(f" {value}",),
            depth=at / (len(known) - 1),
            meta={"mode": ask.mode, "generated": True, "keys": len(known)},
        )

    return fill(asked, meter, limit, what="infbench kv_retrieval", length=ask.length)


def _pairs(ask: Ask, count: int) -> list[tuple[str, str]]:
    drawn = uuids(rng_for(ask.seed, "infbench kv", ask.length, ask.index), 2 * count)
    return list(zip(drawn[::2], drawn[1::2], strict=True))


def _pair(key: str, value: str) -> str:
    return f'"{key}": "{value}"'


def score_number(output: str, asked: Question) -> float:
    found = re.search(r"\d+", output)
    return float(found is not None and found[0] == asked.references[0].strip())


def score_kv(output: str, asked: Question) -> float:
    value = asked.references[0].strip()
    if asked.meta["mode"] == "reference":
        return float(value in re.sub(r"[\n:\"',.?!{}]", " ", output).split() or value in output)
    return float(re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", output.lower()) is not None)


def _number(name: str) -> Task:
    return Task(
        name=name,
        metric="accuracy",
        answer_tokens=ANSWER_TOKENS[name],
        build=partial(build_number, name),
        score=score_number,
    )


TASKS = {
    "passkey": _number("passkey"),
    "number_string": _number("number_string"),
    "kv_retrieval": Task(
        name="kv_retrieval",
        metric="accuracy",
        answer_tokens=ANSWER_TOKENS["kv_retrieval"],
        build=build_kv,
        score=score_kv,
    ),
}


class InfbenchEval(TaskEval):
    """∞Bench's key tasks: passkeys, numbers and values far into the context."""

    suite: Literal["infbench"]


SUITE = TaskSuite(name="infbench", title="∞Bench", config=InfbenchEval, version=VERSION, tasks=TASKS, load=load)
