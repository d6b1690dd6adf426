"""RULER's variable tracing (vt): one chain of assignments hidden in noise, after a worked example.

The references are all names that hold the value. `fixed`: all names are distinct, also in the example; one assignment
is in each fifth of the noise; every question has its own example.
`reference` reproduces RULER's random draws. A run has one example, in which only names and value change, so its
assignments are on the same lines in every sample. Every prompt ends in a space.
"""

import string
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from unspool.evals.suite import Ask, Question
from unspool.evals.suites.ruler import fitting, published
from unspool.evals.suites.ruler.fitting import Builder, Draft, PromptText, TaskSpec, fill_prompt
from unspool.evals.suites.ruler.haystacks import NOISE, PER_LINE, Sources, insert, noise_lines
from unspool.evals.suites.ruler.published import Draws, Script
from unspool.evals.wording import PREFIX, TEMPLATE, Form, Text

VT = TaskSpec(task="vt", answer_tokens=30)
FORMS: dict[str, Form] = {
    "vt": {
        TEMPLATE: Text(
            own="The text below gives values to variables, to some by way of others. Keep track of what each of them "
            "holds.\n\n{context}\nQuestion: Which variables hold the value {query} after all that the text above "
            "assigns?",
            needs=("context", "query"),
            may=("num_v",),
        ),
        PREFIX: Text(
            own=" Answer: After all that the text above assigns, {num_v} variables hold the value {query}, namely: ",
            may=("query", "num_v"),
        ),
        "noise": Text(own=NOISE),
    },
}
NUM_NAMES = 5  # four hops
_NAME_LEN, _EXAMPLE_NAME_LEN = 5, 3
# Tokens of the worked example.
_EXAMPLE_TOKENS = 500
_EXAMPLE_STEP = 5
# Value in RULER's example before renaming.
_EXAMPLE_VALUE = "12345"
# Names that every tokenizer splits into many tokens. They determine the size of the example, so that it depends only on
# the length, not on the first question.
_LONG_NAMES = ("XQJ", "ZKW", "QXV", "JZB", "WQG")
_LETTERS = list(string.ascii_uppercase)


def build(sources: Sources, ask: Ask) -> Question:
    if ask.mode == "reference":
        return published.build(sources, ask, VT, _reference)
    fewest, guess = NUM_NAMES * PER_LINE, ask.length * PER_LINE // 32
    return fitting.build_fixed(sources, ask, VT, _fixed, fewest=fewest, guess=guess)


def _fixed(sources: Sources, ask: Ask) -> Builder:
    rng = VT.rng(ask)
    drawn = _draw_names(2 * NUM_NAMES, _NAME_LEN, rng)
    names, value = drawn[:NUM_NAMES], _draw_value(rng)
    targets = fitting.stratified_depths(NUM_NAMES, rng)
    noise = sources.wording.fill("vt", "noise")
    example = _example(sources, ask, [name[:_EXAMPLE_NAME_LEN] for name in drawn[NUM_NAMES:]], rng)

    def build(size: int) -> Draft:
        lines = noise_lines(noise, size)
        positions = [round(target * len(lines)) for target in targets]
        text = insert(lines, positions, _chain(names, value, end=""), "\n")
        depths = [position / len(lines) for position in positions]
        return _draft(example, _prompt(sources, text, value), names, depths)

    return build


def _example(sources: Sources, ask: Ask, names: list[str], rng: np.random.Generator) -> str:
    """Write a worked example of at most `_EXAMPLE_TOKENS` tokens, or half of a short length."""
    line = sources.wording.fill("vt", "noise")

    def text(lines: int, positions: Sequence[int], names: Sequence[str], value: str) -> str:
        noise = insert([line] * lines, positions, _chain(names, value, end=""), "\n")
        return f"{_prompt(sources, noise, value).text} {' '.join(names)}\n\n"

    def most_lines() -> int:
        limit = min(_EXAMPLE_TOKENS, ask.length // 2)
        counts = range(NUM_NAMES, _EXAMPLE_TOKENS // 8)
        fits = (n for n in counts if sources.count(text(n, range(NUM_NAMES), _LONG_NAMES, _EXAMPLE_VALUE)) <= limit)
        return max(fits, default=NUM_NAMES)

    lines = sources.cached(("vt example", ask.length), most_lines)
    return text(lines, sorted(rng.choice(lines, size=NUM_NAMES, replace=False).tolist()), names, _draw_value(rng))


def _reference(sources: Sources, ask: Ask, draws: Draws) -> Script:
    line = sources.wording.fill("vt", "noise")

    def write(size: int, name_len: int, value: str | None = None) -> Draft:
        names = [draws.letters(string.ascii_uppercase, name_len) for _ in range(NUM_NAMES)]
        if len(set(names)) < NUM_NAMES:
            raise ValueError("two names of the chain are equal")
        value = value or str(draws.numpy.randint(10_000, 99_999))
        positions = sorted(draws.random.sample(range(size), NUM_NAMES))
        text = insert([line] * size, positions, _chain(names, value, end=" "), "\n").replace(". \n", ".\n")
        prompt = _prompt(sources, text, value, trailing_space=True)
        return Draft(prompt=prompt, references=tuple(names), depths=tuple(position / size for position in positions))

    # The example is a separate run with one sample. With RULER's words it always fits.
    own = Script(
        generate=lambda index, size: write(size, _EXAMPLE_NAME_LEN, _EXAMPLE_VALUE), step=_EXAMPLE_STEP, may_exceed=True
    )
    spec, short = replace(VT, answer_tokens=0), replace(ask, length=_EXAMPLE_TOKENS)
    shown, _ = published.start_run(sources, short, spec, own, draws).sample(0)
    example = f"{shown.prompt.text} {' '.join(shown.references)}\n"

    def finish(draft: Draft) -> Draft:
        renamed = example
        for name in shown.references:
            # RULER does not check that the new name is unused.
            renamed = renamed.replace(name, draws.letters(string.ascii_uppercase, len(name)))
        renamed = renamed.replace(_EXAMPLE_VALUE, str(draws.numpy.randint(10_000, 99_999))) + "\n"
        return replace(draft, prompt=replace(draft.prompt, example=renamed), meta={"example": renamed})

    return Script(
        generate=lambda index, size: write(size, _NAME_LEN),
        step=5 if ask.length < fitting.SHORT else 10,
        finish=finish,
        example_tokens=sources.count(example),
    )


def _prompt(sources: Sources, text: str, value: str, *, trailing_space: bool = False) -> PromptText:
    return fill_prompt(sources.wording, "vt", text, query=value, num_v=str(NUM_NAMES), trailing_space=trailing_space)


def _draft(example: str, prompt: PromptText, names: list[str], depths: list[float]) -> Draft:
    whole = replace(prompt, example=example)
    return Draft(prompt=whole, references=tuple(names), depths=tuple(depths), meta={"example": example})


def _chain(names: Sequence[str], value: str, *, end: str) -> list[str]:
    first = f"VAR {names[0]} = {value}"
    return [first, *(f"VAR {name} = VAR {before}{end}" for before, name in pairwise(names))]


def _draw_names(count: int, length: int, rng: np.random.Generator) -> list[str]:
    """Draw names with distinct first letters. None starts with VAR."""
    names: dict[str, str] = {}
    while len(names) < count:
        name = "".join(rng.choice(_LETTERS, size=length))
        if not name.startswith("VAR"):
            names.setdefault(name[:_EXAMPLE_NAME_LEN], name)
    return list(names.values())


def _draw_value(rng: np.random.Generator) -> str:
    return str(rng.integers(10_000, 100_000))
