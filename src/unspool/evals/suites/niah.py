"""Needle in a haystack: facts hidden in prose, with a question about each fact at the end.

A fact is inserted between sentences if that keeps its depth, else between lines or words. The recorded depth is the
fact's actual position. The prose is cut where the length ends, sometimes within a word.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from unspool.core.errors import ConfigError, DataError
from unspool.core.rng import rng_for
from unspool.core.stats import stratified_wilson
from unspool.data.facts import distinct_keys
from unspool.evals.config import EvalConfig, Lengths
from unspool.evals.context_suite import ContextSuite
from unspool.evals.heldout import Heldout, Materials
from unspool.evals.prompt_encoder import PromptEncoder
from unspool.evals.prompts import Prompt, answer_room, encode, token_starts
from unspool.evals.suite import Cell, Question, Sample
from unspool.evals.suites.needle_wordings import WORDINGS, NeedleWording, expand_wordings
from unspool.evals.summary import accuracy_cells

# Minimum tokens of prose per fact; with less, the fact would not be hidden.
PROSE_PER_NEEDLE = 8
# Maximum distance of a fact from its stratum's center, as a share of the stratum's width.
STRATUM_JITTER = 0.3
# Strata of intervals, finest first. Use the finest whose smallest stratum has enough scores to estimate its variation.
STRATA = (("depth", "needle_wording", "distractors"), ("depth", "needle_wording"), ("depth",), ())
FEWEST_IN_STRATUM = 5
# Inserting facts changes tokens at their borders. This many corrections were always enough.
CORRECTIONS = 8
_SENTENCE_END = re.compile(r"[.!?][\"'”’)]*\s+|\n\s*\n\s*")
# Insertion points, best first: after a sentence or paragraph, after a line, after a word.
_BORDERS = (_SENTENCE_END, re.compile(r"\n+"), re.compile(r"\s+"))


class NiahEval(EvalConfig):
    """Needle in a haystack: facts hidden in prose at all depths, with questions at the end."""

    suite: Literal["niah"]
    lengths: Lengths = Field(
        description="Context lengths to score; prompt and answer together never exceed the length."
    )
    samples: int = Field(20, ge=1, description="Questions per length, spread evenly over the depths.")
    depths: int = Field(5, ge=1, description="Number of depths between the start and the end of the context.")
    needles: int = Field(1, ge=1, description="Facts hidden in each context, each with a question.")
    value: Literal["numbers", "words"] = Field(
        "numbers",
        description="Type of the hidden values: seven-digit numbers or single words. Words suit small models.",
    )
    wordings: list[str] = Field(
        ["magic"],
        min_length=1,
        description="Wordings of facts and questions: names, or the sets development (magic, record, parcel), heldout "
        "(locker, password, ship), all (both) and heldout-2 (patent, horse, museum). Questions are spread evenly over "
        "them.",
    )
    distractors: list[Annotated[int, Field(ge=0)]] = Field(
        [0],
        min_length=1,
        description="Numbers of further facts in the same wording, without a question. Questions are spread "
        "evenly over the numbers.",
    )
    placement: Literal["grid", "strata"] = Field(
        "grid",
        description="Positions of the facts. grid: at depths from the start to the end of the context. strata: at "
        "random positions inside equal parts of it, never at the start or next to the question.",
    )
    text: str | None = Field(
        None, description="JSONL or text files for the text around the facts. Default: the bundled held-out book."
    )

    @field_validator("wordings")
    @classmethod
    def _expand_sets(cls, names: list[str]) -> list[str]:
        return expand_wordings(names)

    @property
    def reach(self) -> float:
        """Maximum distance of a fact from its target depth, so that it can be placed between sentences."""
        if self.placement == "strata":
            return (0.5 - STRATUM_JITTER) / self.depths
        return 0.5 / max(1, self.depths - 1)


@dataclass(frozen=True, kw_only=True)
class Needle:
    key: str
    value: str
    target: float
    """The requested depth, from 0 (start) to 1 (end)."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """What one context tests. Depths vary fastest, then wordings, then numbers of distractors."""

    depth: float
    wording: str
    distractors: int

    @classmethod
    def of(cls, config: NiahEval, index: int) -> "Design":
        grid = depth_grid(config)
        # Several needles are spread over all depths of each context.
        at = index if config.needles > 1 else index // len(grid)
        at, wording = divmod(at, len(config.wordings))
        return cls(
            depth=grid[index % len(grid)],
            wording=config.wordings[wording],
            distractors=config.distractors[at % len(config.distractors)],
        )


class Prose:
    """Text with insertion points for facts, in characters and tokens."""

    def __init__(self, text: str, starts: np.ndarray) -> None:
        self.text = text
        self.starts = starts  # start character of every token
        self.borders = [
            np.array([match.end() for match in pattern.finditer(text)], dtype=np.int64) for pattern in _BORDERS
        ]

    def place(self, num_tokens: int, target: float, reach: float) -> tuple[int, float]:
        """Find the best border near depth `target` in the first `num_tokens` tokens. Returns (character, depth)."""
        tokens = np.append(self.starts[:num_tokens], self.end(num_tokens))
        for borders in self.borders:
            known = borders[borders < tokens[-1]]
            candidates = np.concatenate([[0], known, tokens[-1:]])
            depths = np.searchsorted(tokens, candidates) / num_tokens
            best = int(np.argmin(np.abs(depths - target)))
            if abs(depths[best] - target) < reach:
                return int(candidates[best]), float(depths[best])
        exact = round(target * num_tokens)
        return int(tokens[exact]), exact / num_tokens

    def end(self, num_tokens: int) -> int:
        cut = int(self.starts[num_tokens]) if num_tokens < len(self.starts) else len(self.text)
        return len(self.text[:cut].rstrip())


def depth_grid(config: NiahEval) -> list[float]:
    """Return the depths in results: points of the grid, or centers of the strata."""
    if config.depths == 1:
        return [0.5]
    if config.placement == "strata":
        return [round((part + 0.5) / config.depths, 4) for part in range(config.depths)]
    return [round(depth, 4) for depth in np.linspace(0, 1, config.depths).tolist()]


def prompt(config: NiahEval, materials: Materials, *, length: int, seed: int, index: int) -> Prompt:
    rng = rng_for(seed, "niah", length, index)
    tokenizer, encoder = materials.tokenizer, PromptEncoder(materials.tokenizer, materials.form)
    kind = "number" if config.value == "numbers" else "word"
    design = Design.of(config, index)
    wording = WORDINGS[design.wording]
    needles = _needles(config, materials.words, design, rng)
    # The last context may have fewer facts, so that there are exactly `samples` questions.
    count = min(config.needles, config.samples - index * config.needles)
    asked = sorted(rng.permutation(config.needles)[:count].tolist())
    questions = [_question(needles[at], wording, kind) for at in asked]
    answer_tokens = answer_room(tokenizer, [needles[at].value for at in asked]) + encoder.extra_answer_tokens
    room = length - encoder.overhead(chat=False) - answer_tokens
    room -= max(len(encoder.ending_ids(question)) for question in questions)

    facts = [wording.state(needle.key, needle.value, kind) for needle in needles]
    least = length - room + len(encode(tokenizer, " ".join(facts) + "\n")) + PROSE_PER_NEEDLE * len(needles)
    if length < least:
        raise ConfigError(
            f"niah: length {length} is too short: with this tokenizer, {len(needles)} needle(s), a question and "
            f"its answer need {least} tokens. Use a larger length or fewer needles."
        )
    prose = _prose(materials, room, rng)
    text, context, depths = _fit(prose, [*zip(facts, needles, strict=True)], config, tokenizer, room)
    return Prompt(
        suite="niah",
        length=length,
        index=index,
        context_ids=np.concatenate([encoder.opening, context]),
        questions=[
            encoder.after_context(replace(question, context=text, depth=depths[at]))
            for at, question in zip(asked, questions, strict=True)
        ],
        answer_tokens=answer_tokens,
        match=encoder.match("contains" if config.value == "numbers" else "start"),
        template_tokens=encoder.template_tokens,
    )


def _question(needle: Needle, wording: NeedleWording, kind: str) -> Question:
    question, prefix = wording.ask(needle.key, kind)
    meta = {"oracle": f" {needle.value}."}
    return Question(context="", question=question, prefix=prefix, references=(needle.value,), meta=meta)


def _labels(config: NiahEval, index: int) -> dict[str, Any]:
    """Return design fields that a sample records. Empty if the entry has only one design."""
    design = Design.of(config, index // config.needles)
    labels: dict[str, Any] = {}
    if config.wordings != ["magic"]:
        labels["needle_wording"] = design.wording
    if config.distractors != [0]:
        labels["distractors"] = design.distractors
    return labels


def _cells(config: NiahEval, samples: Sequence[Sample]) -> Iterator[Cell]:
    """Yield cells by length: all and by depth, then by wording and by number of distractors.

    Intervals over several depths, wordings or distractor counts are stratified. These are fixed by design, so only
    the variation inside each stratum is uncertain.
    """
    for length in config.lengths:
        found = accuracy_cells("niah", length, depth_grid(config), samples)
        chosen = [sample for sample in samples if sample["suite"] == "niah" and sample["length"] == length]
        if len(config.wordings) > 1 or len(config.distractors) > 1:
            found[0] |= _interval(chosen)
        yield from found
        names = config.wordings if len(config.wordings) > 1 else []
        counts = config.distractors if len(config.distractors) > 1 else []
        groups: list[tuple[str, str, Any]] = [(f"wording {name}", "needle_wording", name) for name in names]
        groups += [(f"{count} distractors", "distractors", count) for count in counts]
        for task, key, value in groups:
            members = [sample for sample in chosen if sample[key] == value]
            scores = [sample["score"] for sample in members]
            cell = {"suite": "niah", "task": task, "metric": "accuracy", "length": length, "depth": None}
            mean = {"value": fmean(scores) if scores else None, "n": len(scores)}
            yield {**cell, **mean, **_interval(members)}


def _interval(samples: Sequence[Sample]) -> dict[str, float | None]:
    if not samples:
        return {"low": None, "high": None}
    for keys in STRATA:
        strata: dict[Any, list[float]] = {}
        for sample in samples:
            strata.setdefault(tuple(sample.get(key) for key in keys), []).append(sample["score"])
        if min(map(len, strata.values())) >= FEWEST_IN_STRATUM:
            break
    low, high = stratified_wilson(list(strata.values()))
    return {"low": low, "high": high}


def _needles(config: NiahEval, words: list[str], design: Design, rng: np.random.Generator) -> list[Needle]:
    """Draw the queried needles, then the distractors, all with distinct keys and values."""
    count = config.needles
    targets = _targets(config, design.depth, rng)
    num = count + design.distractors
    if config.value == "numbers":
        keys = distinct_keys(words, num, rng)
        values = [str(1_000_000 + number) for number in rng.choice(9_000_000, size=num, replace=False)]
    else:
        drawn = distinct_keys(words, 2 * num, rng)
        keys, values = drawn[:num], drawn[num:]
    others = design.distractors
    # Distractors stay away from the start and the end, like needles in strata.
    targets += (0.02 + 0.96 * (np.arange(others) + rng.random(others)) / max(1, others)).tolist()
    return [Needle(key=key, value=value, target=at) for key, value, at in zip(keys, values, targets, strict=True)]


def _targets(config: NiahEval, depth: float, rng: np.random.Generator) -> list[float]:
    count = config.needles
    if count > 1:
        # Several needles share each context, one in each equal part.
        return ((np.arange(count) + rng.random(count)) / count).tolist()  # type: ignore[no-any-return]
    if config.placement == "strata":
        return [depth + STRATUM_JITTER * float(rng.uniform(-1, 1)) / config.depths]
    return [depth]


def _prose(materials: Materials, num_tokens: int, rng: np.random.Generator) -> Prose:
    """At least `num_tokens` tokens of text, starting at a random sentence. Repeats the text if it ends."""
    source = "\n\n".join(text.strip() for text in materials.documents)
    if not source.strip():
        raise DataError("niah: the haystack text is empty; use files that contain text.")
    offset = int(rng.integers(len(source)))
    sentence = _SENTENCE_END.search(source, offset)
    offset = sentence.end() if sentence and sentence.end() < len(source) else 0
    chars = 5 * num_tokens
    while True:
        repeats = 1 + (offset + chars) // len(source)
        text = "\n\n".join([source] * repeats)[offset : offset + chars]
        starts = token_starts(materials.tokenizer, text)
        if len(starts) > num_tokens:
            return Prose(text, starts)
        chars *= 2


def _fit(
    prose: Prose, hidden: list[tuple[str, Needle]], config: NiahEval, tokenizer: Any, room: int
) -> tuple[str, np.ndarray, list[float]]:
    """Fit the facts and as much prose as possible into `room` tokens. Returns (text, ids, depth of each fact)."""
    best: tuple[str, np.ndarray, list[float]] | None = None
    fits, too_long = 0, room + 1
    num_tokens = room - len(encode(tokenizer, " ".join(text for text, _ in hidden)))
    corrections = 0
    while fits < num_tokens < too_long and (best is None or corrections < CORRECTIONS):
        text, depths = _hide(prose, hidden, config, num_tokens)
        ids = encode(tokenizer, text)
        spare = room - len(ids)
        if spare < 0:
            too_long = num_tokens
        else:
            fits = num_tokens
            if best is None or len(ids) > len(best[1]):
                best = text, ids, depths
        if spare == 0:
            break
        # Stay between the bounds, so that the loop ends.
        num_tokens = min(max(num_tokens + spare, fits + 1), too_long - 1)
        corrections += 1
    assert best is not None, "the caller checks that the facts fit"
    return best


def _hide(prose: Prose, hidden: list[tuple[str, Needle]], config: NiahEval, num_tokens: int) -> tuple[str, list[float]]:
    """Insert the facts into the first `num_tokens` tokens of prose. The result ends in a newline."""
    places = [prose.place(num_tokens, needle.target, config.reach) for _, needle in hidden]
    text, done = "", 0
    for at in sorted(range(len(hidden)), key=lambda at: places[at][0]):
        char = places[at][0]
        text = _joined(_joined(text, prose.text[done:char]), hidden[at][0])
        done = char
    text = _joined(text, prose.text[done : prose.end(num_tokens)])
    grid = np.array(depth_grid(config))
    return text + "\n", [float(grid[np.argmin(np.abs(grid - depth))]) for _, depth in places]


def _joined(before: str, after: str) -> str:
    needs_space = before and after and not before[-1].isspace() and not after[0].isspace()
    return f"{before} {after}" if needs_space else before + after


SUITE = ContextSuite(
    name="niah",
    title="Needle recall",
    config=NiahEval,
    measure="accuracy",
    build=prompt,
    questions_per_context=lambda config: config.needles,
    depths=depth_grid,
    labels_of=_labels,
    cells_of=lambda config, samples: list(_cells(config, samples)),
    heldout=lambda config: Heldout(config.text, max(config.lengths)),
)
