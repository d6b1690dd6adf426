"""The questions of one entry of `evals` whose suite consists of tasks.

In: the entry, a tokenizer, a seed. Out: `Wanted` questions in one fixed order, the line of each in `prompts.jsonl`,
prompts as token ids, samples.
Promise: all of it depends on settings, sources, tokenizer and seed only. Context, question, template and answer
together never exceed the length: a suite that does not keep to it is stopped before a model is loaded.
Price: without a spool every prompt is made twice, once for its hash and once to be asked.
Elsewhere: what is asked and how it is scored (task.py and the suites), order over all entries (plan.py), prompts that
wait to be asked (spool.py).
"""

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unspool.core.config import lookup
from unspool.core.errors import ConfigError, DataError
from unspool.core.rng import rng_for
from unspool.core.sizes import format_size
from unspool.evals.config import TaskEval, WordedEval
from unspool.evals.heldout import excerpt
from unspool.evals.prompts import Asker, Made, Prompt, PromptQuestion, Spool, Words, prompt_hash
from unspool.evals.suite import Ask, Question, Suite, Task
from unspool.evals.suites import SUITES
from unspool.evals.wording import Wording, read_wording
from unspool.models.generation.generate import MAX_PROMPTS

# Which questions of a set are asked, and which of them are read together.


# Questions on one context that are decoded side by side.
MOST_TOGETHER = 16
# Prompts without a context in common are answered together too, up to so many tokens in all: a row. Small, since a row
# is what is lost when a run is killed; a GPU reads longer rows in seconds and says so (`row_tokens` of a backend).
ROW_TOKENS = 8192
# And so many prompts, where rows are longer than that.
MOST_UNRELATED = MAX_PROMPTS
# A prompt longer than this share of a row stays alone.
_SHARE = 4


def subset(strata: Sequence[Hashable], count: int, seed: int) -> list[int]:
    """`count` indices, as equally from all strata as their sizes allow, in rising order."""
    if count >= len(strata):
        return list(range(len(strata)))
    order = rng_for(seed, "subset", len(strata)).permutation(len(strata)).tolist()
    seen: dict[Hashable, int] = {}
    rank = []
    for at in order:
        # The how-manieth of its stratum: all firsts come before any second.
        rank.append((seen.setdefault(strata[at], 0), at))
        seen[strata[at]] += 1
    rank.sort(key=lambda one: one[0])
    return sorted(at for _, at in rank[:count])


def whole_subset(strata: Sequence[Hashable], count: int, seed: int, *, together: int) -> list[int]:
    """The same where `together` indices in a row are one whole: as many wholes as `count` holds, at least one.

    The stratum of a whole is that of its first index.
    """
    wholes = subset(strata[::together], max(1, count // together), seed)
    return [at for whole in wholes for at in range(whole * together, min((whole + 1) * together, len(strata)))]


def groups(contexts: Sequence[str], tokens: Sequence[int], row_tokens: int = ROW_TOKENS) -> list[list[int]]:
    """Places of questions: those with equal contexts together, then short ones in rows, the others alone."""
    by_context: dict[str, list[int]] = {}
    for place, context in enumerate(contexts):
        by_context.setdefault(context, []).append(place)
    found: list[list[int]] = []
    row: list[int] = []
    most = MOST_TOGETHER if row_tokens <= ROW_TOKENS else MOST_UNRELATED
    for places in by_context.values():
        if len(places) > 1:
            found += [places[at : at + MOST_TOGETHER] for at in range(0, len(places), MOST_TOGETHER)]
        elif tokens[places[0]] > row_tokens // _SHARE:
            found.append(places)
        else:
            if len(row) >= most or sum(tokens[at] for at in [*row, *places]) > row_tokens:
                found.append(row)
                row = []
            row = [*row, *places]
    found += [row] if row else []
    return sorted(found)


def common_prefix(rows: Sequence[np.ndarray]) -> int:
    """How many ids all rows begin with, leaving each at least one of its own."""
    shortest = min(map(len, rows)) - 1
    first = rows[0][:shortest]
    same = np.ones(shortest, dtype=bool)
    for row in rows[1:]:
        same &= row[:shortest] == first
    return int(np.argmin(same)) if not same.all() else shortest


Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One question that is to be asked."""

    task: str
    length: int
    index: int


def suite_of(config: TaskEval) -> Suite:
    return lookup(SUITES, config.suite, kind="suite")


def chosen_tasks(config: TaskEval) -> list[Task]:
    suite = suite_of(config)
    names = list(dict.fromkeys(config.tasks)) or list(suite.tasks)
    return [lookup(suite.tasks, name, kind=f"evals: task of {suite.name}") for name in names]


def wording_of(config: TaskEval, root: Path) -> Wording | None:
    """What the entry's file says, checked whole; None where our own words are used."""
    if not isinstance(config, WordedEval) or config.wording is None:
        return None
    suite = suite_of(config)
    return read_wording(_found(config.wording, root), suite.name, suite.wording)


class Questions:
    """All questions of one entry."""

    def __init__(self, config: TaskEval, tokenizer: Any, *, seed: int, root: Path) -> None:
        self.config, self.seed = config, seed
        self.spool: Spool | None = None
        self.suite = suite_of(config)
        self.tasks = {task.name: task for task in chosen_tasks(config)}
        self.asker = Asker(tokenizer)
        self.chat = {name: self.asker.uses_chat(task, config.chat) for name, task in self.tasks.items()}
        self.wording = wording_of(config, root)
        paths = {name: _found(path, root) for name, path in config.paths.items()}
        self.sources = self.suite.load(tokenizer, paths, *([] if self.wording is None else [self.wording]))
        indices = {name: self._indices(task) for name, task in self.tasks.items()}
        # Short ones first, so that something is known early; a task's questions stay together.
        self.wanted = [
            Wanted(task=name, length=length, index=index)
            for length in sorted(config.lengths)
            for name in self.tasks
            for index in indices[name]
        ]

    def answer_tokens(self, task: Task) -> int:
        theirs = None if self.wording is None else self.wording.answer_tokens.get(task.name)
        return self.config.answer_tokens or theirs or task.answer_tokens

    def asked(self, wanted: Wanted) -> Question:
        task = self.tasks[wanted.task]
        # A task leaves room for its own number of answer tokens; what else is wanted is taken off the length.
        overhead = self.asker.overhead(chat=self.chat[task.name]) + self.answer_tokens(task) - task.answer_tokens
        ask = Ask(length=wanted.length, seed=self.seed, index=wanted.index, mode=self.config.mode, overhead=overhead)
        return task.build(self.sources, ask)

    def line(self, wanted: Wanted) -> Line:
        """What prompts.jsonl says of a question."""
        asked, ids = made = self._made(wanted)
        if self.spool is not None:
            self.spool.put((id(self), wanted), made)
        return {
            "suite": self.suite.name,
            "task": wanted.task,
            "length": wanted.length,
            "index": wanted.index,
            "hash": prompt_hash(ids),
            "context": hashlib.sha256(asked.context.encode()).hexdigest()[:16],
            "prompt_tokens": len(ids),
            "answer_tokens": self.answer_tokens(self.tasks[wanted.task]),
            "depth": asked.depth,
            **self._worded,
        }

    def check(self) -> None:
        """Make the first prompt of every task and length."""
        seen = set()
        for wanted in self.wanted:
            if (wanted.task, wanted.length) not in seen:
                seen.add((wanted.task, wanted.length))
                self._made(wanted)

    def prompt(self, together: Sequence[Wanted]) -> Prompt:
        """One prompt of all these, which are of one task and length; what their ids have in common is its context."""
        task = self.tasks[together[0].task]
        made = [self._waiting(wanted) or self._made(wanted) for wanted in together]
        shared = common_prefix([ids for _, ids in made]) if self._shares(made) else 0
        return Prompt(
            suite=self.suite.name,
            length=together[0].length,
            index=together[0].index,
            context_ids=made[0][1][:shared],
            questions=[
                PromptQuestion(
                    ids=ids[shared:],
                    reference="; ".join(asked.references),
                    depth=asked.depth,
                    words=Words(asked=asked, chat=self.chat[task.name]),
                )
                for asked, ids in made
            ],
            answer_tokens=self.answer_tokens(task),
            match="contains",
        )

    def samples(self, together: Sequence[Wanted], prompt: Prompt, outputs: Sequence[str]) -> list[Line]:
        return [
            self._sample(wanted, prompt, question, output)
            for wanted, question, output in zip(together, prompt.questions, outputs, strict=True)
        ]

    def _sample(self, wanted: Wanted, prompt: Prompt, question: PromptQuestion, output: str) -> Line:
        assert question.words is not None
        asked, task = question.words.asked, self.tasks[wanted.task]
        score = task.score(output, asked)
        sample: Line = {
            "suite": self.suite.name,
            "task": wanted.task,
            "length": wanted.length,
            "depth": asked.depth,
            "index": wanted.index,
            "hash": prompt_hash(prompt.context_ids, question.ids),
            "prompt_tokens": len(prompt.context_ids) + len(question.ids),
            "reference": question.reference,
            "output": output,
            "score": None if score is None else float(score),
            **excerpt(self.asker.tokenizer, wanted.length, self.config.lengths, prompt.context_ids, question.ids),
        }
        sample |= self._worded
        if "pair" in asked.meta:
            sample["pair"] = asked.meta["pair"]
        if score is None:
            # What a judge needs, so that it can be asked later without the sources.
            sample["judge"] = {
                "protocol": task.judge or "qa",
                "question": str(asked.meta.get("question") or asked.question),
                "references": list(asked.references),
                "key_points": [str(point) for point in asked.meta.get("key_points") or []],
            }
        return sample

    @property
    def _worded(self) -> Line:
        """Which words were used, if not our own."""
        return {} if self.wording is None else {"wording": self.wording.hash}

    def _waiting(self, wanted: Wanted) -> Made | None:
        return None if self.spool is None else self.spool.take((id(self), wanted))

    def _made(self, wanted: Wanted) -> Made:
        asked = self.asked(wanted)
        ids = self.asker.ids(asked, chat=self.chat[wanted.task])
        used = len(ids) + self.answer_tokens(self.tasks[wanted.task])
        if used > wanted.length:
            raise DataError(
                f"{self.suite.name} {wanted.task}: question {wanted.index} takes {used} tokens of "
                f"{format_size(wanted.length)}, its answer included. Use a greater length or leave the task out."
            )
        return asked, ids

    def _indices(self, task: Task) -> list[int]:
        size = None if task.size is None else task.size(self.sources)
        if size == 0:
            raise ConfigError(f"{self.suite.name}: task {task.name} has no questions in the data given; leave it out.")
        if size is None:
            return list(range(max(1, self.config.samples // task.together) * task.together))
        strata = [None if task.stratum is None else task.stratum(self.sources, at) for at in range(size)]
        return whole_subset(strata, self.config.samples, self.seed, together=task.together)

    def _shares(self, made: Sequence[tuple[Question, np.ndarray]]) -> bool:
        """Whether these stand together for their context; short ones only share a row."""
        return len({asked.context for asked, _ in made}) == 1


def _found(path: str, root: Path) -> str:
    """A path from where the recipe stands; what is not there may be a name that the suite knows, such as a Hub id."""
    return str(root / path) if (root / path).exists() else path
