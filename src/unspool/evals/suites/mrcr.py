"""MRCR recovery: the share of an oracle context's benefit that a model gets from a long conversation.

In multi-round co-reference resolution (MRCR), a conversation has several almost equal requests, each with its own
reply. The last message asks for the reply to one of them. Base models rarely write the whole reply, so nothing is
generated here. Instead, the model reads the right reply as its answer, and the answer's loss is compared in three
contexts.

- full: the whole conversation, then the question
- query: only the question
- oracle: only the right request with its reply, then the question

recovery = (query − full) / (query − oracle). 0: the conversation does not help. 1: it helps as much as the right
request and reply alone. The trivial baselines are the recovery with only the first, the last or a random request and
its reply as context.

Conversations are generated, or come from the user's file in the format of OpenAI's data set (mrcr_data.py). There, the
string that the reply begins with belongs to the context, because the question contains it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from unspool.core.errors import ConfigError, DataError
from unspool.core.rng import rng_for
from unspool.data.facts import distinct_keys
from unspool.evals.backends.base import Backend
from unspool.evals.baselines import BASELINES, KEY, pick_items
from unspool.evals.config import EvalConfig, Lengths
from unspool.evals.heldout import Heldout, Materials, PlanInputs
from unspool.evals.prompts import encode, opening_ids, prompt_hash
from unspool.evals.suite import Cell, PlannedEval, Sample, Suite, Unit
from unspool.evals.suites.mrcr_data import Dialog, choose_dialogs
from unspool.evals.task_suite import path_digest, resolve_path

FORMS = ("letter", "poem", "speech", "story", "diary entry", "news report")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_SENTENCE = re.compile(r"(?<=[.!?])[\"'”’)]*\s+")
DRAWS = 2000  # bootstrap draws over conversations
SLACK = 50  # prompts are at most 1/50 shorter than their length


class MRCREval(EvalConfig):
    """How much of a reply's predictability a model recovers from a long conversation with similar requests."""

    suite: Literal["mrcr"]
    lengths: Lengths = Field(description="Context lengths to score; conversation, question and reply fit the length.")
    samples: int = Field(
        24, ge=1, description="Conversations per length, spread evenly over the numbers of similar requests."
    )
    needles: list[Annotated[int, Field(ge=1, le=len(ORDINALS))]] = Field(
        [2, 4, 8], min_length=1, description="Numbers of similar requests in a conversation."
    )
    reply_words: int = Field(60, ge=8, description="Approximate number of words of each reply.")
    text: str | None = Field(
        None, description="JSONL or text files that replies are taken from. Default: the bundled held-out book."
    )
    paths: dict[str, str] = Field(
        {},
        description="`data`: a file in the format of OpenAI's MRCR, or hub:openai/mrcr. A conversation is scored at a "
        "length if it has more than half of its tokens. Default: conversations are generated.",
    )

    @model_validator(mode="after")
    def _data_decides(self) -> Self:
        if unknown := sorted(set(self.paths) - {"data"}):
            raise ValueError(
                f"path {unknown[0]} is not known; the only one is data, a file in the format of OpenAI's MRCR"
            )
        given = [name for name in ("reply_words", "text") if name in self.model_fields_set]
        if self.data is not None and given:
            raise ValueError(f"{' and '.join(given)} only for generated conversations; remove it, or remove paths")
        return self

    @property
    def data(self) -> str | None:
        return self.paths.get("data")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One question as token ids. All contexts end in the same answer."""

    full: np.ndarray
    query: np.ndarray
    oracle: np.ndarray
    single: Mapping[str, np.ndarray]
    """Contexts with one request and its reply, by baseline."""
    answer_tokens: int
    needles: int
    depth: float
    reply: str


def turn(form: str, topic: str, reply: str) -> str:
    return f"User: Write a {form} about {topic}.\nAssistant: {reply}\n\n"


def question(ordinal: int, form: str, topic: str) -> str:
    return f"User: Write down again, word for word, the {ORDINALS[ordinal]} {form} about {topic}.\nAssistant:"


def split_replies(documents: Sequence[str], words: int) -> list[str]:
    """Split text into replies of whole sentences with about `words` words each."""
    replies: list[str] = []
    for document in documents:
        parts: list[str] = []
        for sentence in _SENTENCE.split(document):
            parts += sentence.split()
            if len(parts) >= words:
                replies.append(" ".join(parts[: 2 * words]))
                parts = []
    return replies


def conversation(
    config: MRCREval, materials: Materials, replies: Sequence[str], *, length: int, seed: int, index: int
) -> Conversation:
    """Generate a conversation."""
    rng = rng_for(seed, "mrcr", length, index)
    tokenizer = materials.tokenizer
    needles = config.needles[index % len(config.needles)]
    wanted = index // len(config.needles) % needles
    form = FORMS[int(rng.integers(len(FORMS)))]
    topic, *others = distinct_keys(materials.words, 1 + len(FORMS) * 8, rng)
    order = iter(rng.permutation(len(replies)).tolist())
    right = [turn(form, topic, replies[next(order)]) for _ in range(needles)]
    reply = right[wanted].partition("Assistant: ")[2].strip()
    ask, answer = encode(tokenizer, question(wanted, form, topic)), encode(tokenizer, f" {reply}")
    room = length - len(opening_ids(tokenizer)) - len(ask) - len(answer)
    room -= sum(len(encode(tokenizer, each)) for each in right)
    if room < 0:
        raise ConfigError(
            f"mrcr: length {length} is too short for {needles} replies of {config.reply_words} words; use at least "
            f"{length - room} tokens, fewer needles or fewer reply_words."
        )
    # Other requests differ in form, topic or both.
    turns: list[str] = []
    for number, at in enumerate(order):
        other = FORMS[(FORMS.index(form) + 1 + int(rng.integers(len(FORMS) - 1))) % len(FORMS)]
        kinds = ((other, topic), (form, others[number % len(others)]), (other, others[number % len(others)]))
        made = turn(*kinds[number % len(kinds)], replies[at])
        size = len(encode(tokenizer, made))
        if size > room:
            more = [replies[at], *(replies[other] for other in islice(order, 1))]
            turns = _fill(tokenizer, turns, made.removesuffix(f"{replies[at]}\n\n"), more, room, slack=length // SLACK)
            break
        turns.append(made)
        room -= size
    else:
        raise DataError(
            f"mrcr: the held-out text has only {len(replies)} replies of {config.reply_words} words, too few for "
            f"{length} tokens; use a longer text or a shorter length."
        )
    places = np.sort(rng.choice(len(turns) + needles, size=needles, replace=False)).tolist()
    rest, hidden = iter(rng.permutation(np.array(turns, dtype=object)).tolist()), iter(right)
    ordered = [next(hidden) if place in places else next(rest) for place in range(len(turns) + needles)]
    asked = Asked(turns=ordered, right=places[wanted], ask=ask, answer=answer, reply=reply, needles=needles)
    return as_contexts(tokenizer, asked, rng_for(seed, "baseline", "mrcr", length, index))


def _fill(tokenizer: Any, turns: list[str], begun: str, more: Sequence[str], room: int, *, slack: int) -> list[str]:
    """Append words to the last turn, or to a begun one, so that at most `slack` of `room` tokens are left."""
    if room <= slack:
        return turns
    begun = f"{turns[-1].rstrip()} " if turns else begun
    room += len(encode(tokenizer, turns[-1])) if turns else 0
    words = " ".join(more).split()
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(encode(tokenizer, f"{begun}{' '.join(words[:middle])}\n\n")) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return [*turns[:-1], f"{begun}{' '.join(words[:low])}\n\n"] if low else turns


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A conversation as text, and its question and answer as token ids."""

    turns: Sequence[str]
    right: int  # number of the turn with the wanted reply
    ask: np.ndarray
    answer: np.ndarray
    reply: str
    needles: int
    head: str = ""


def as_contexts(tokenizer: Any, asked: Asked, rng: np.random.Generator) -> Conversation:
    opening, tail = opening_ids(tokenizer), np.concatenate([asked.ask, asked.answer])
    parts = [encode(tokenizer, each) for each in asked.turns]
    before = sum(map(len, parts[: asked.right]))
    head = [encode(tokenizer, asked.head)] if asked.head else []
    return Conversation(
        full=np.concatenate([opening, *head, *parts, tail]),
        query=np.concatenate([opening, tail]),
        oracle=np.concatenate([opening, parts[asked.right], tail]),
        single={name: np.concatenate([opening, part, tail]) for name, part in pick_items(parts, rng).items()},
        answer_tokens=len(asked.answer),
        needles=asked.needles,
        depth=before / max(1, sum(map(len, parts))),
        reply=asked.reply,
    )


def given_conversation(tokenizer: Any, dialog: Dialog, *, seed: int, length: int, index: int) -> Conversation:
    """Encode a conversation of the user's data."""
    asked = Asked(
        turns=[f"User: {request}\nAssistant: {reply}\n\n" for request, reply in dialog.turns],
        right=dialog.right,
        ask=encode(tokenizer, f"User: {dialog.question}\nAssistant: {dialog.begin}"),
        answer=encode(tokenizer, dialog.reply),
        reply=dialog.reply,
        needles=dialog.needles,
        head=dialog.head,
    )
    return as_contexts(tokenizer, asked, rng_for(seed, "baseline", "mrcr", length, index))


@dataclass(frozen=True, kw_only=True)
class MRCRSuite(Suite):
    @property
    def needs_losses(self) -> bool:
        return True

    def inputs(self, config: MRCREval, root: Path) -> dict[str, dict[str, Any]]:
        return {"paths": {} if config.data is None else {"mrcr data": path_digest(root / config.data)}}

    def ratio_of(self, sample: Sample) -> tuple[float, float]:
        losses = sample["losses_by_context"]
        return losses["query"] - losses["full"], losses["query"] - losses["oracle"]

    def plan(self, config: MRCREval, inputs: PlanInputs) -> "PlannedConversations":
        return PlannedConversations(self, config, inputs)

    def cells(self, config: MRCREval, samples: Sequence[Sample]) -> list[Cell]:
        return [cell for length in config.lengths for cell in self._cells(config, length, samples)]

    def _cells(self, config: MRCREval, length: int, samples: Sequence[Sample]) -> Iterator[Cell]:
        here = [one for one in samples if one["suite"] == self.name and one["length"] == length]
        yield self._cell(length, None, here)
        if len(config.needles) > 1:
            for count in config.needles:
                yield self._cell(length, f"{count} needles", [one for one in here if one["needles"] == count])

    def _cell(self, length: int, task: str | None, samples: Sequence[Sample]) -> Cell:
        head = {"suite": self.name, "metric": "recovery", "length": length, "depth": None}
        head |= {"task": task} if task else {}
        losses = [one["losses_by_context"] for one in samples]
        found = recovery(losses)
        if found["value"] is None or not all(name in one for one in losses for name in BASELINES):
            return {**head, **found}
        singles = {name: recovery([{**one, "full": one[name]} for one in losses])["value"] for name in BASELINES}
        return {**head, **found, KEY: singles}


def recovery(losses: Sequence[dict[str, float]]) -> Cell:
    """Return the ratio of mean gains with a bootstrap interval over conversations. None without any gain."""
    n = len(losses)
    empty = {"value": None, "n": n, "low": None, "high": None}
    if not n:
        return empty
    gained = np.array([one["query"] - one["full"] for one in losses])
    possible = np.array([one["query"] - one["oracle"] for one in losses])
    means = {name: fmean(one[name] for one in losses) for name in ("full", "query", "oracle")}
    if possible.mean() <= 0:
        return {**empty, **means}
    drawn = np.random.default_rng(n).integers(n, size=(DRAWS, n))
    below = possible[drawn].mean(axis=1)
    ratios = gained[drawn].mean(axis=1)[below > 0] / below[below > 0]
    value = float(gained.mean() / possible.mean())
    low, high = np.quantile(ratios, [0.025, 0.975]) if n > 1 else (None, None)
    interval = {
        "low": None if low is None else min(value, float(low)),
        "high": None if high is None else max(value, float(high)),
    }
    return {"value": value, "n": n, **interval, **means}


class PlannedConversations(PlannedEval):
    def __init__(self, suite: MRCRSuite, config: MRCREval, inputs: PlanInputs) -> None:
        self.suite: MRCRSuite = suite
        self.config, self._seed = config, inputs.seed
        self._tokenizer = inputs.tokenizer
        self._given: dict[int, list[Dialog]] = {}
        lengths = config.asked_lengths(config.lengths, inputs.context)
        if config.cut_to(inputs.context) is not None:
            raise ConfigError("mrcr: beyond_context: truncate would drop the conversation; use skip or ask.")
        if config.data is None:
            self._materials = inputs.materials(suite.heldout(config))
            self._replies = split_replies(self._materials.documents, config.reply_words)
        else:
            path = resolve_path(config.data, inputs.root)
            self._given = choose_dialogs(path, lengths, config.needles, config.samples, self._count_tokens)
        self.units = [
            Unit(planned=self, length=length, index=index, tokens=length)
            for length in lengths
            for index in range(len(self._given[length]) if self._given else config.samples)
        ]
        limit = inputs.context
        self.beyond_context = {length: config.samples for length in config.lengths if limit and length > limit}

    def check(self) -> None:
        for length in () if self._given else dict.fromkeys(unit.length for unit in self.units):
            self._build(length, int(np.argmax(self.config.needles)))

    def _count_tokens(self, dialog: Dialog) -> int:
        return len(given_conversation(self._tokenizer, dialog, seed=0, length=0, index=0).full)

    def _build(self, length: int, index: int) -> Conversation:
        if self._given:
            dialog = self._given[length][index]
            return given_conversation(self._tokenizer, dialog, seed=self._seed, length=length, index=index)
        return conversation(self.config, self._materials, self._replies, length=length, seed=self._seed, index=index)

    def prepare(self, unit: Unit) -> Conversation:
        return self._build(unit.length, unit.index)

    def ask(self, prepared: Conversation, backend: Backend) -> dict[str, float]:
        """Return the mean loss of the answer's tokens in each context."""
        contexts = {"full": prepared.full, "query": prepared.query, "oracle": prepared.oracle, **prepared.single}
        return {
            name: float(backend.window_losses(ids)[-prepared.answer_tokens :].mean()) for name, ids in contexts.items()
        }

    def samples(self, unit: Unit, prepared: Conversation, answers: dict[str, float]) -> list[Sample]:
        if not np.isfinite(list(answers.values())).all():
            raise DataError("mrcr: the model's loss is not finite; its weights are damaged.")
        possible = answers["query"] - answers["oracle"]
        return [
            {
                "suite": self.suite.name,
                "length": unit.length,
                "depth": round(prepared.depth, 4),
                "index": unit.index,
                "needles": prepared.needles,
                "hash": prompt_hash(prepared.full),
                "prompt_tokens": len(prepared.full) - prepared.answer_tokens,
                "answer_tokens": prepared.answer_tokens,
                "reference": prepared.reply,
                "output": "",
                "score": (answers["query"] - answers["full"]) / possible if possible > 0 else None,
                "losses_by_context": answers,
            }
        ]

    def texts(self, unit: Unit) -> Iterator[str]:
        yield self.prepare(unit).reply


SUITE = MRCRSuite(
    name="mrcr",
    title="MRCR recovery",
    config=MRCREval,
    measure="score",
    is_ratio=True,
    version=2,
    heldout=lambda config: Heldout(config.text, 2 * max(config.lengths)) if config.data is None else None,
)
