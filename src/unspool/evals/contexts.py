"""What there is to score: every context of every evaluation, in one fixed order.

In: the `evals` of a recipe, a tokenizer. Out: `Unit`s, the smallest pieces of work that are kept
when a run is killed, and how each becomes samples.
Promise: the order and content of units depend on nothing but settings, text, tokenizer and seed.
Elsewhere: the questions of suites that consist of tasks (questions.py), the cells of a summary (stats.py, summary.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from unspool.core.errors import ConfigError, DataError
from unspool.core.sizes import format_size
from unspool.data.facts import single_token_words, word_list
from unspool.evals.backends.base import Backend
from unspool.evals.config import Eval, KeyValueEval, NiahEval, PerplexityEval, TaskEval
from unspool.evals.heldout import excerpt, heldout_documents
from unspool.evals.prompts import Materials, Prompt, Spool, joined, prompt_hash
from unspool.evals.questions import ROW_TOKENS, Line, Questions, Wanted, chosen_tasks, groups, suite_of
from unspool.evals.scoring.answers import score_answer
from unspool.evals.stats import accuracy_cells, loss_cells
from unspool.evals.suites import key_value, niah, perplexity
from unspool.evals.summary import task_cells
from unspool.models.loss import bucket_losses

Generated = NiahEval | KeyValueEval | PerplexityEval
Runnable = Generated | TaskEval
Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One context with its questions, or one window; or several prompts that are read together."""

    config: Runnable
    length: int
    index: int
    num_samples: int
    """Lines of samples.jsonl it gives."""
    wanted: tuple[Wanted, ...] = ()
    """Of a suite that consists of tasks: the questions that are read together."""
    hashes: tuple[str, ...] = ()
    """Of those, as prompts.jsonl has them."""
    tokens: int
    """What has to be read, by the length asked for."""

    @property
    def num_contexts(self) -> int:
        return max(1, self.tokens // self.length)

    @property
    def name(self) -> str:
        task = f" {self.wanted[0].task}" if self.wanted else ""
        return f"{self.config.suite}{task} {format_size(self.length)}"


def runnable(evals: Sequence[Eval]) -> list[Runnable]:
    """The evals, if all can be run and told apart in the summary."""
    chosen: list[Runnable] = []
    seen: set[tuple[str, int]] = set()
    for entry in evals:
        for name in _names(entry):
            for length in lengths_of(entry):
                if (name, length) in seen:
                    raise ConfigError(
                        f"evals: suite {name} at length {format_size(length)} is asked for twice, and their scores "
                        "would be mixed. Keep one of them, or score the other into another folder."
                    )
                seen.add((name, length))
        chosen.append(entry)
    return chosen


def _names(config: Runnable) -> list[str]:
    if isinstance(config, TaskEval):
        return [f"{config.suite} ({task.name})" for task in chosen_tasks(config)]
    return [config.suite]


def lengths_of(config: Runnable) -> list[int]:
    return [config.length] if isinstance(config, PerplexityEval) else config.lengths


class Plan:
    """Everything needed to turn a unit into samples."""

    def __init__(self, evals: Sequence[Runnable], tokenizer: Any, *, seed: int, root: Path) -> None:
        self.seed, self._tokenizer = seed, tokenizer
        generated = [config for config in evals if not isinstance(config, TaskEval)]
        words = single_token_words(tokenizer, word_list()) if generated else []
        self._materials = {
            text: Materials(tokenizer=tokenizer, words=words, documents=_documents(generated, text, root))
            for text in {_text_of(config) for config in generated}
        }
        self._windows = {
            config.length: perplexity.windows(config, self._materials[_text_of(config)], seed=seed)
            for config in generated
            if isinstance(config, PerplexityEval)
        }
        self.questions = {
            id(config): Questions(config, tokenizer, seed=seed, root=root)
            for config in evals
            if isinstance(config, TaskEval)
        }
        self._listed = False
        self.units = [unit for config in evals for unit in self._units(config)]

    @property
    def num_contexts(self) -> int:
        return sum(unit.num_contexts for unit in self.units)

    @property
    def prompt_tokens(self) -> int:
        """What models have to read, counted by the lengths asked for."""
        return sum(unit.tokens for unit in self.units)

    def check(self) -> None:
        """Build one prompt of every kind, so that a length that cannot work is found before a model is loaded."""
        for unit in self.units:
            if unit.index == 0 and not isinstance(unit.config, PerplexityEval | TaskEval):
                self._generated(unit.config, unit.length, 0)
        if not self._listed:
            for questions in self.questions.values():
                questions.check()

    def listing(self, *, skip: int = 0) -> Iterator[Line]:
        """The lines of prompts.jsonl, all but the first: every question of every suite that consists of tasks."""
        every = [(questions, wanted) for questions in self.questions.values() for wanted in questions.wanted]
        return (questions.line(wanted) for questions, wanted in every[skip:])

    @property
    def num_listed(self) -> int:
        return sum(len(questions.wanted) for questions in self.questions.values())

    def keep(self, spool: Spool) -> None:
        """What is listed from now on is kept until it is asked, so that it is made once."""
        for questions in self.questions.values():
            questions.spool = spool

    def arrange(self, lines: Sequence[Line], *, row_tokens: int = ROW_TOKENS) -> None:
        """Put questions on one context together, and short ones in rows, as prompts.jsonl tells which these are."""
        by_place = {(line["suite"], line["task"], line["length"], line["index"]): line for line in lines}
        arranged: list[Unit] = []
        for (_, length, task), units in groupby(self.units, key=_block):
            block = list(units)
            if task is None:
                arranged += block
                continue
            found = [
                by_place[(unit.config.suite, task, length, wanted.index)] for unit in block for wanted in unit.wanted
            ]
            contexts = [line["context"] for line in found]
            for places in groups(contexts, [line["prompt_tokens"] for line in found], row_tokens):
                distinct = len({contexts[at] for at in places})
                arranged.append(
                    replace(
                        block[places[0]],
                        num_samples=len(places),
                        wanted=tuple(block[at].wanted[0] for at in places),
                        hashes=tuple(found[at]["hash"] for at in places),
                        tokens=length * distinct,
                    )
                )
        self.units = arranged
        self._listed = True

    def put_in_rows(self, row_tokens: int) -> None:
        """Put contexts together that are asked for one thing each, as `arrange` does with short questions."""
        found: list[Unit] = []
        for _, units in groupby(self.units, key=_block):
            block = list(units)
            if not _asks_once(block[0].config):
                found += block
                continue
            contexts = [str(unit.index) for unit in block]
            for places in groups(contexts, [unit.length for unit in block], row_tokens):
                first, count = block[places[0]], len(places)
                found.append(replace(first, num_samples=count, tokens=count * first.length))
        self.units = found

    def prompt(self, unit: Unit) -> Prompt:
        config = unit.config
        if isinstance(config, TaskEval):
            return self.questions[id(config)].prompt(unit.wanted)
        count = unit.num_samples if _asks_once(config) else 1
        made = [self._generated(config, unit.length, unit.index + at) for at in range(count)]
        return made[0] if count == 1 else joined(made)

    def _generated(self, config: Generated, length: int, index: int) -> Prompt:
        materials = self._materials[_text_of(config)]
        if isinstance(config, NiahEval):
            return niah.prompt(config, materials, length=length, seed=self.seed, index=index)
        assert isinstance(config, KeyValueEval)
        return key_value.prompt(config, materials, length=length, seed=self.seed, index=index)

    def score(self, unit: Unit, backend: Backend) -> list[Sample]:
        if isinstance(unit.config, PerplexityEval):
            return [self.window_sample(unit, backend.window_losses(self.window(unit)))]
        prompt = self.prompt(unit)
        return self.samples(unit, prompt, backend.answers(prompt))

    def samples(self, unit: Unit, prompt: Prompt, outputs: Sequence[str]) -> list[Sample]:
        config = unit.config
        if isinstance(config, TaskEval):
            return self.questions[id(config)].samples(unit.wanted, prompt, outputs)
        assert not isinstance(config, PerplexityEval), "windows have no outputs"
        first = unit.index * _per_context(config)
        samples = []
        for at, (asked, output) in enumerate(zip(prompt.questions, outputs, strict=True)):
            sample = _sample(unit, first + at, asked.depth, prompt.context_ids, asked.ids)
            score = score_answer(output, asked.reference, prompt.match)
            words = excerpt(self._tokenizer, unit.length, config.lengths, prompt.context_ids, asked.ids)
            samples.append({**sample, "reference": asked.reference, "output": output, "score": score, **words})
        return samples

    def window(self, unit: Unit) -> np.ndarray:
        return self._windows[unit.length][unit.index]

    def window_sample(self, unit: Unit, losses: np.ndarray) -> Sample:
        if not np.isfinite(losses).all():
            at = int(np.flatnonzero(~np.isfinite(losses))[0]) + 1
            raise DataError(f"loss: the model gives no finite loss at position {at}; its weights are damaged.")
        buckets = bucket_losses(losses)
        return {**_sample(unit, unit.index, None, self.window(unit)), "score": float(losses.mean()), "losses": buckets}

    def _units(self, config: Runnable) -> list[Unit]:
        def unit(length: int, index: int, num_samples: int = 1, wanted: tuple[Wanted, ...] = ()) -> Unit:
            return Unit(
                config=config, length=length, index=index, num_samples=num_samples, wanted=wanted, tokens=length
            )

        if isinstance(config, TaskEval):
            return [unit(one.length, one.index, 1, (one,)) for one in self.questions[id(config)].wanted]
        if isinstance(config, PerplexityEval):
            return [unit(config.length, at) for at in range(len(self._windows[config.length]))]
        contexts = niah.num_contexts(config) if isinstance(config, NiahEval) else key_value.num_contexts(config)
        per_context = _per_context(config)
        return [
            unit(length, at, min(per_context, config.samples - at * per_context))
            for length in config.lengths
            for at in range(contexts)
        ]


def summarize(evals: Sequence[Runnable], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The cells of summary.json."""
    cells: list[dict[str, Any]] = []
    for config in evals:
        if isinstance(config, TaskEval):
            every = len(suite_of(config).tasks)
            cells += task_cells(config, chosen_tasks(config), samples, of_tasks=every)
            continue
        if isinstance(config, PerplexityEval):
            cells += loss_cells(config.length, samples)
            continue
        depths = niah.depth_grid(config) if isinstance(config, NiahEval) else []
        for length in config.lengths:
            cells += accuracy_cells(config.suite, length, depths, samples)
    return cells


def _block(unit: Unit) -> tuple[int, int, str | None]:
    """Units that may be put together."""
    return id(unit.config), unit.length, unit.wanted[0].task if unit.wanted else None


def _sample(unit: Unit, index: int, depth: float | None, *ids: np.ndarray) -> Sample:
    return {
        "suite": unit.config.suite,
        "length": unit.length,
        "depth": depth,
        "index": index,
        "hash": prompt_hash(*ids),
        "prompt_tokens": sum(map(len, ids)),
    }


def _asks_once(config: Runnable) -> bool:
    """Whether every context of this suite has one question."""
    return isinstance(config, NiahEval | KeyValueEval) and _per_context(config) == 1


def _per_context(config: NiahEval | KeyValueEval) -> int:
    return config.needles if isinstance(config, NiahEval) else config.questions


def _text_of(config: Generated) -> str | None:
    return None if isinstance(config, KeyValueEval) else config.text


def _documents(evals: Sequence[Generated], text: str | None, root: Path) -> list[str]:
    tokens = [
        config.samples * config.length if isinstance(config, PerplexityEval) else max(config.lengths)
        for config in evals
        if not isinstance(config, KeyValueEval) and config.text == text
    ]
    # Key-value recall needs no text.
    return heldout_documents(text, root, tokens=max(tokens)) if tokens else []
