"""RULER's eight needle tasks: facts hidden in noise, in essays or among other facts.

`fixed`: all keys and values are distinct, including those of the haystack. A single gold fact takes every depth of the
grid by index. Several gold facts take one depth in each equal part. Essays start at a random sentence. The last line of
a haystack may be cut to fit the length.
`reference` reproduces RULER's random draws. Keys and values are drawn with repetition, and depths are drawn for every
sample. Essays start at their beginning, and needles are shuffled with a constant seed.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np

from unspool.evals.suite import Ask, Question
from unspool.evals.suites.ruler import fitting, published
from unspool.evals.suites.ruler.fitting import Builder, Draft, TaskSpec, fill_prompt
from unspool.evals.suites.ruler.haystacks import NOISE, PER_LINE, Sources, insert, noise_lines
from unspool.evals.suites.ruler.published import Draws, Script
from unspool.evals.wording import PREFIX, TEMPLATE, Form, Text, Wording

_NEEDLE = "One special magic {type} for {key} is {value}."
_ONE = (
    "One special magic {type_needle_v} is hidden somewhere in the text below. Keep it in mind: a question about it "
    "comes at the end.\n{context}\n"
    "Which is the special magic {type_needle_v} for {query} that the text above gives?",
    " The special magic {type_needle_v} for {query} that the text above gives is",
)
_SEVERAL = (
    "Several special magic {type_needle_v} are hidden somewhere in the text below. Keep them in mind: a question "
    "about them comes at the end.\n{context}\n"
    "Which are all the special magic {type_needle_v} for {query} that the text above gives?",
    " The special magic {type_needle_v} for {query} that the text above gives are",
)


def _form(texts: tuple[str, str], *, noise: bool = False) -> Form:
    template, prefix = texts
    return {
        TEMPLATE: Text(own=template, needs=("context", "query"), may=("type_needle_v",)),
        PREFIX: Text(own=prefix, may=("query", "type_needle_v")),
        "needle": Text(own=_NEEDLE, needs=("key", "value"), may=("type_needle_v", "type")),
        **({"noise": Text(own=NOISE)} if noise else {}),
    }


# Placeholders have RULER's names, so that a wording file can use RULER's texts.
FORMS: dict[str, Form] = {
    "niah_single_1": _form(_ONE, noise=True),
    **{name: _form(_ONE) for name in ("niah_single_2", "niah_single_3")},
    **{f"niah_multikey_{number}": _form(_ONE) for number in (1, 2, 3)},
    **{name: _form(_SEVERAL) for name in ("niah_multivalue", "niah_multiquery")},
}
ANSWER_TOKENS = 128
# Minimum tokens of a needle's line, for any tokenizer.
_FEWEST_LINE_TOKENS = 12
_ESSAY_STEP = 500
Values = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True, kw_only=True)
class NeedleTask:
    name: str
    haystack: Literal["noise", "essay", "needle"]
    key: Values = "words"
    value: Values = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec(task=self.name, answer_tokens=ANSWER_TOKENS)

    def build(self, sources: Sources, ask: Ask) -> Question:
        if ask.mode == "reference":
            return published.build(sources, ask, self.spec, partial(_reference, self))
        builder, fewest, guess = _lines, PER_LINE, ask.length * PER_LINE // 32
        if self.haystack == "essay":
            builder, fewest, guess = _essay, 40, ask.length // 2
        return fitting.build_fixed(sources, ask, self.spec, partial(builder, self), fewest=fewest, guess=guess)

    def needle_writer(self, wording: Wording) -> Callable[[str, str], str]:
        """Return a function that writes the fact for a key and a value."""
        text, singular = wording.text(self.name, "needle"), self.value.removesuffix("s")
        return lambda key, value: text.format(key=key, value=value, type_needle_v=self.value, type=singular)

    def noise(self, sources: Sources) -> str:
        return sources.wording.fill(self.name, "noise") if self.haystack == "noise" else ""


@dataclass(frozen=True)
class Hidden:
    """Facts in text order, and the question about them."""

    facts: list[str]
    gold: list[int]  # indices of the facts that the answer needs
    queries: list[str]
    answers: tuple[str, ...]

    def draft(self, task: NeedleTask, wording: Wording, haystack: str, depths: Sequence[float]) -> Draft:
        keys, singular = self.queries, len(self.answers) == 1
        query = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
        kind = task.value.removesuffix("s") if singular else task.value
        prompt = fill_prompt(wording, task.name, haystack, query=query, type_needle_v=kind)
        return Draft(
            prompt=prompt,
            references=self.answers,
            depths=tuple(depths[at] for at in self.gold),
            meta={"keys": keys, "answer_char": prompt.context.find(self.answers[0])},
        )


class UniqueFacts:
    """Facts with distinct keys and values, as many as a haystack may need. Built on access."""

    def __init__(self, task: NeedleTask, sources: Sources, count: int, rng: np.random.Generator) -> None:
        self._task, self._words = task, sources.words
        self._needle = task.needle_writer(sources.wording)
        self._keys = self._draw(task.key, count, rng)
        self._values = self._draw(task.value, count * task.num_values, rng)

    def key(self, at: int) -> str:
        return self._write(self._task.key, self._keys, at)

    def value(self, at: int) -> str:
        return self._write(self._task.value, self._values, at)

    def fact(self, key: int, value: int) -> str:
        return self._needle(self.key(key), self.value(value))

    def _draw(self, kind: Values, count: int, rng: np.random.Generator) -> np.ndarray | bytes:
        if kind == "uuids":
            return rng.bytes(16 * count)  # 122 random bits, so all are distinct
        pool = len(self._words) ** 2 if kind == "words" else 9_000_000
        return rng.choice(pool, size=count, replace=False)

    def _write(self, kind: Values, drawn: np.ndarray | bytes, at: int) -> str:
        if isinstance(drawn, bytes):
            return str(uuid.UUID(bytes=drawn[16 * at : 16 * at + 16], version=4))
        if kind == "numbers":
            return str(1_000_000 + int(drawn[at]))
        first, second = divmod(int(drawn[at]), len(self._words))
        return f"{self._words[first]}-{self._words[second]}"


def _hide(task: NeedleTask, facts: UniqueFacts, rng: np.random.Generator) -> Hidden:
    """Put facts in random order. The question uses the first `num_queries` keys."""
    num_keys = max(task.num_keys, task.num_queries)
    pairs = [(key, key * task.num_values + at) for key in range(num_keys) for at in range(task.num_values)]
    order = rng.permutation(len(pairs)).tolist()
    return Hidden(
        facts=[facts.fact(*pairs[at]) for at in order],
        gold=[place for place, at in enumerate(order) if pairs[at][0] < task.num_queries],
        queries=[facts.key(at) for at in range(task.num_queries)],
        answers=tuple(facts.value(at) for key, at in pairs if key < task.num_queries),
    )


def _essay(task: NeedleTask, sources: Sources, ask: Ask) -> Builder:
    rng = task.spec.rng(ask)
    hidden = _hide(task, UniqueFacts(task, sources, max(task.num_keys, task.num_queries), rng), rng)
    targets = _target_depths(hidden, ask.index, rng)
    essay = sources.essay
    first = int(rng.choice(essay.ends)) % len(essay.words)

    def build(size: int) -> Draft:
        ends = essay.sentence_ends(first, size)
        positions = [int(ends[np.abs(ends - target * size).argmin()]) for target in targets]
        text = insert(essay.excerpt(first, size), positions, hidden.facts, " ")
        return hidden.draft(task, sources.wording, text, [position / size for position in positions])

    return build


def _lines(task: NeedleTask, sources: Sources, ask: Ask) -> Builder:
    rng = task.spec.rng(ask)
    most = max(1, ask.length // _FEWEST_LINE_TOKENS) if task.haystack == "needle" else 0
    facts = UniqueFacts(task, sources, most + task.num_keys, rng)
    hidden = _hide(task, facts, rng)
    noise = task.noise(sources)
    targets = _target_depths(hidden, ask.index, rng)

    def haystack(size: int) -> list[str]:
        if task.haystack == "noise":
            return noise_lines(noise, size)
        count, rest = divmod(size, PER_LINE)
        numbers = range(task.num_keys, task.num_keys + min(count + 1, most))
        lines = [facts.fact(number, number) for number in numbers]
        last = lines[count] if count < len(lines) else ""
        cut = last[: len(last) * rest // PER_LINE].rstrip()
        return lines[:count] + ([cut] if cut else [])

    def build(size: int) -> Draft:
        lines = haystack(size)
        positions = [round(target * len(lines)) for target in targets]
        text = insert(lines, positions, hidden.facts, "\n")
        return hidden.draft(task, sources.wording, text, [position / len(lines) for position in positions])

    return build


def _target_depths(hidden: Hidden, index: int, rng: np.random.Generator) -> list[float]:
    """Choose sorted depths, one per fact."""
    if len(hidden.gold) > 1:
        return fitting.stratified_depths(len(hidden.facts), rng)
    gold, others = fitting.grid_depth(index), np.sort(rng.random(len(hidden.facts) - 1))
    # Keep the order of the facts: facts before the gold fact get smaller depths.
    before, after = others[: hidden.gold[0]], others[hidden.gold[0] :]
    low = sorted(float(depth * gold) for depth in before)
    return [*low, gold, *sorted(float(gold + depth * (1 - gold)) for depth in after)]


def _reference(task: NeedleTask, sources: Sources, ask: Ask, draws: Draws) -> Script:
    write, num_keys = task.needle_writer(sources.wording), max(task.num_keys, task.num_queries)
    owners = [key for key in range(num_keys) for _ in range(task.num_values)]
    order = draws.shuffled(range(len(owners)))

    def generate(index: int, size: int) -> Draft:
        keys, values = [], []
        for _ in range(num_keys):
            keys.append(_draw_one(task.key, sources, draws))
            values.append([_draw_one(task.value, sources, draws) for _ in range(task.num_values)])
        facts = [write(key, value) for key, own in zip(keys, values, strict=True) for value in own]
        facts = [facts[at] for at in order]
        place = _place_in_essay if task.haystack == "essay" else _place_in_lines
        text, depths = place(task, facts, sources, size, draws)
        asked = draws.random.sample(range(num_keys), task.num_queries)
        hidden = Hidden(
            facts=facts,
            gold=[at for at, fact in enumerate(order) if owners[fact] in asked],
            queries=[keys[at] for at in asked],
            answers=tuple(value for at in asked for value in values[at]),
        )
        return hidden.draft(task, sources.wording, text, depths)

    line_step = 5 if ask.length < fitting.SHORT else 25
    return Script(generate=generate, step=_ESSAY_STEP if task.haystack == "essay" else line_step)


def _draw_one(kind: Values, sources: Sources, draws: Draws) -> str:
    if kind == "uuids":
        return str(uuid.UUID(int=draws.random.getrandbits(128), version=4))
    if kind == "numbers":
        return str(draws.random.randint(10**6, 10**7 - 1))
    pair: str = draws.random.choice(sources.word_pairs)
    return pair


def _place_in_essay(
    task: NeedleTask, facts: list[str], sources: Sources, size: int, draws: Draws
) -> tuple[str, list[float]]:
    sentences = sources.sentences(size)
    percents = np.round(np.linspace(0, 100, fitting.GRID)).astype(int).tolist()
    drawn = sorted(int(len(sentences) * (percent / 100)) for percent in draws.random.sample(percents, len(facts)))
    # Two needles at the same place have an empty part between them, which leaves two spaces.
    parts = [" ".join(sentences[start:end]) for start, end in pairwise([0, *drawn, len(sentences)])]
    pieces = [piece for pair in zip(parts, facts, strict=False) for piece in pair]
    return " ".join([*pieces, parts[-1]]), [at / len(sentences) for at in drawn]


def _place_in_lines(
    task: NeedleTask, facts: list[str], sources: Sources, size: int, draws: Draws
) -> tuple[str, list[float]]:
    if task.haystack == "noise":
        lines = [task.noise(sources)] * size
    else:
        write = task.needle_writer(sources.wording)
        lines = [write(*(_draw_one(kind, sources, draws) for kind in (task.key, task.value))) for _ in range(size)]
    places = sorted(draws.random.sample(range(size), len(facts)), reverse=True)
    for place, fact in zip(places, facts, strict=True):
        lines.insert(place, fact)
    return "\n".join(lines), [place / size for place in places]


TASKS = (
    NeedleTask(name="niah_single_1", haystack="noise"),
    NeedleTask(name="niah_single_2", haystack="essay"),
    NeedleTask(name="niah_single_3", haystack="essay", value="uuids"),
    NeedleTask(name="niah_multikey_1", haystack="essay", num_keys=4),
    NeedleTask(name="niah_multikey_2", haystack="needle"),
    NeedleTask(name="niah_multikey_3", haystack="needle", key="uuids", value="uuids"),
    NeedleTask(name="niah_multivalue", haystack="essay", num_values=4),
    NeedleTask(name="niah_multiquery", haystack="essay", num_queries=4),
)
