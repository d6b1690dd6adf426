"""Variable tracing: one chain of assignments hidden in noise, after a worked example.

In: sources, `Ask`. Out: `Question`; the references are all names that hold the value.
Promise (`fixed`): names are all different, in the example too; one assignment in each fifth of the noise; the
example is made anew for every question.
`reference` follows RULER: its example is made once per run and only renamed, so that its assignments stand at the
same lines in every sample; every prompt ends in a space.
"""

import string
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from unspool.evals.suite import Ask, Question
from unspool.evals.suites.ruler import fitting
from unspool.evals.suites.ruler.fitting import Room, reference_size
from unspool.evals.suites.ruler.haystacks import Sources
from unspool.evals.suites.ruler.needles import PER_LINE, SHORT
from unspool.evals.suites.ruler.question import Builder, Draft, Place, RandomBuilder, fixed, reference
from unspool.evals.suites.ruler.task_texts import Parts, parts

PLACE = Place(task="vt", answer_tokens=30)
NUM_NAMES = 5  # four hops
_NAME_LEN, _EXAMPLE_NAME_LEN = 5, 3
# Tokens of the worked example.
_EXAMPLE_TOKENS = 500
_EXAMPLE_STEP = 5
# RULER's example has this value before it is renamed.
_EXAMPLE_VALUE = "12345"
# Names that no tokenizer joins into few tokens. The example's size is found with them, so that it depends on the length
# alone and not on the question that was built first.
_LONG_NAMES = ("XQJ", "ZKW", "QXV", "JZB", "WQG")
_LETTERS = list(string.ascii_uppercase)


def build(sources: Sources, ask: Ask) -> Question:
    if ask.mode == "reference":
        step = 5 if ask.length < SHORT else 10
        return reference(sources, ask, PLACE, lambda ask: _reference(sources, ask), step=step)
    fewest = NUM_NAMES * PER_LINE
    return fixed(
        sources, ask, PLACE, lambda ask: _fixed(sources, ask), fewest=fewest, guess=ask.length * PER_LINE // 32
    )


def _fixed(sources: Sources, ask: Ask) -> Builder:
    rng = PLACE.rng(ask)
    drawn = _names(2 * NUM_NAMES, _NAME_LEN, rng)
    names, value = drawn[:NUM_NAMES], _value(rng)
    targets = fitting.parts(NUM_NAMES, rng)
    noise = sources.wording.fill("vt", "noise")
    example = _example(sources, ask, [name[:_EXAMPLE_NAME_LEN] for name in drawn[NUM_NAMES:]], rng)

    def build(size: int) -> Draft:
        count, rest = divmod(size, PER_LINE)
        words = noise.split()
        cut = " ".join(words[: len(words) * rest // PER_LINE])
        lines = [noise] * count + ([cut] if cut else [])
        places = [fitting.place(target, len(lines)) for target in targets]
        text = _inserted(lines, places, _chain(names, value, end=""))
        return _draft(example, _parts(sources, text, value), names, [place / len(lines) for place in places])

    return build


def _example(sources: Sources, ask: Ask, names: list[str], rng: np.random.Generator) -> str:
    """A worked example of its own; as many lines as `_EXAMPLE_TOKENS` or half of a short length allow."""
    line = sources.wording.fill("vt", "noise")

    def text(lines: int, places: Sequence[int], names: Sequence[str], value: str) -> str:
        noise = _inserted([line] * lines, places, _chain(names, value, end=""))
        return f"{_parts(sources, noise, value).text} {' '.join(names)}\n\n"

    def most_lines() -> int:
        limit = min(_EXAMPLE_TOKENS, ask.length // 2)
        counts = range(NUM_NAMES, _EXAMPLE_TOKENS // 8)
        fits = (n for n in counts if sources.count(text(n, range(NUM_NAMES), _LONG_NAMES, _EXAMPLE_VALUE)) <= limit)
        return max(fits, default=NUM_NAMES)

    lines = sources.remembered(("vt example", ask.length), most_lines)
    return text(lines, sorted(rng.choice(lines, size=NUM_NAMES, replace=False).tolist()), names, _value(rng))


def _reference(sources: Sources, ask: Ask) -> RandomBuilder:
    line = sources.wording.fill("vt", "noise")

    def example(lines: int) -> tuple[str, list[str]]:
        """The same for all samples of a run but for names and value."""
        rng = PLACE.rng(Ask(length=_EXAMPLE_TOKENS, seed=ask.seed, index=0, mode="reference"), "example")
        names = _names(NUM_NAMES, _EXAMPLE_NAME_LEN, rng)
        places = sorted(rng.choice(lines, size=NUM_NAMES, replace=False).tolist())
        noise = _inserted([line] * lines, places, _chain(names, _EXAMPLE_VALUE, end=" "))
        return _parts(sources, noise, _EXAMPLE_VALUE, trailing_space=True).text, names

    room = Room(task="vt", length=_EXAMPLE_TOKENS, budget=_EXAMPLE_TOKENS)
    lines = sources.remembered(
        ("vt reference example", ask.seed),
        lambda: reference_size(
            lambda size, _: sources.count(example(size)[0]), room, step=_EXAMPLE_STEP, trial=_EXAMPLE_STEP
        ),
    )
    text, answers = example(lines)
    shown = f"{text} {' '.join(answers)}"

    def build(size: int, rng: np.random.Generator) -> Draft:
        names = _names(NUM_NAMES, _NAME_LEN, rng)
        value = str(rng.integers(10_000, 99_999))
        places = sorted(rng.choice(size, size=NUM_NAMES, replace=False).tolist())
        text = _inserted([line] * size, places, _chain(names, value, end=" "))
        asked = _parts(sources, text, value, trailing_space=True)
        return _draft(_renamed(shown, rng) + "\n\n", asked, names, [place / size for place in places])

    return build


def _parts(sources: Sources, text: str, value: str, *, trailing_space: bool = False) -> Parts:
    return parts(sources.wording, "vt", text, query=value, num_v=str(NUM_NAMES), trailing_space=trailing_space)


def _renamed(example: str, rng: np.random.Generator) -> str:
    """RULER's way: one name after the other, by search and replace, without looking whether the new name is free."""
    for name in example.split()[-NUM_NAMES:]:
        example = example.replace(name, "".join(rng.choice(_LETTERS, size=len(name))))
    return example.replace(_EXAMPLE_VALUE, str(rng.integers(10_000, 99_999)))


def _draft(example: str, asked: Parts, names: list[str], places: list[float]) -> Draft:
    whole = Parts(example + asked.context, asked.question, asked.prefix)
    return Draft(parts=whole, references=tuple(names), depths=tuple(places), meta={"example": example})


def _chain(names: Sequence[str], value: str, *, end: str) -> list[str]:
    first = f"VAR {names[0]} = {value}"
    return [first, *(f"VAR {name} = VAR {before}{end}" for before, name in pairwise(names))]


def _inserted(lines: list[str], places: Sequence[int], statements: Sequence[str]) -> str:
    """Statements before the lines of their places, which rise."""
    found: list[str] = []
    done = 0
    for place, statement in zip(places, statements, strict=True):
        found += [*lines[done:place], statement]
        done = place
    return "\n".join([*found, *lines[done:]])


def _names(count: int, length: int, rng: np.random.Generator) -> list[str]:
    """Different in their first letters, and none of them VAR."""
    names: dict[str, str] = {}
    while len(names) < count:
        name = "".join(rng.choice(_LETTERS, size=length))
        if not name.startswith("VAR"):
            names.setdefault(name[:_EXAMPLE_NAME_LEN], name)
    return list(names.values())


def _value(rng: np.random.Generator) -> str:
    return str(rng.integers(10_000, 100_000))
