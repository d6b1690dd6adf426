"""Suites that consist of tasks: selection of questions, prompts and samples."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np

from unspool.core.artifacts import digest, file_digest, folder_digest
from unspool.core.config import lookup
from unspool.core.errors import ConfigError, DataError
from unspool.core.rng import rng_for
from unspool.core.sizes import format_size
from unspool.evals.baselines import baseline_scores
from unspool.evals.benchmark_copy import Reader, Reference, comparability
from unspool.evals.config import TaskEval
from unspool.evals.heldout import PlanInputs
from unspool.evals.prompt_encoder import PromptEncoder
from unspool.evals.prompts import (
    EncodedQuestion,
    Prompt,
    PromptCache,
    PromptQuestion,
    PromptText,
    cut_middle,
    group_prompts,
    prompt_hash,
)
from unspool.evals.question_choice import choose_by_length, strata_of, stratified_subset
from unspool.evals.suite import (
    Ask,
    Cell,
    PlannedEval,
    PromptLine,
    Question,
    QuestionId,
    Sample,
    Suite,
    Task,
    TooShortError,
    Unit,
)
from unspool.evals.summary import suite_summary, task_cells
from unspool.evals.wording import Forms, Wording, read_wording

BORDERS = 4  # tokens that may merge differently where text and question meet
CUT_TOKENS = "cut_tokens"  # in a question's `meta`


@dataclass(frozen=True, kw_only=True)
class TaskSuite(Suite):
    """A suite of tasks. prompts.jsonl lists the hash of every question before the first one is run.

    The default mode `fixed` avoids known defects. `reference` follows the suite's own code, including defects that
    change scores, to reproduce published numbers. Results record the mode.
    """

    measure: Literal["accuracy", "score", "loss"] = "score"
    load: Callable[..., Any]
    """Load the tasks' sources. Arguments: tokenizer, the user's paths by name and an optional wording."""
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names of tasks
    has_overall: bool = True  # whether the suite defines the mean over categories
    wording: Forms = field(default_factory=dict)  # texts that users may replace
    reference: Reader | None = None  # reads a user's copy of the benchmark

    def chosen_tasks(self, config: TaskEval) -> list[Task]:
        names = list(dict.fromkeys(config.tasks)) or list(self.tasks)
        return [lookup(self.tasks, name, kind=f"evals: task of {self.name}") for name in names]

    def protocol(self, config: TaskEval) -> list[str]:
        """Task names of a complete run: those of the preset, else all."""
        preset = config.presets.get(config.preset or "", {})
        return list(preset.get("tasks", self.tasks))

    def labels(self, config: TaskEval) -> list[str]:
        return [f"{self.name} ({task.name})" for task in self.chosen_tasks(config)]

    def chosen_wording(self, config: TaskEval, root: Path) -> Wording | None:
        """Read and check the entry's wording file. None if the entry has none."""
        path: str | None = getattr(config, "wording", None)
        return None if path is None else read_wording(resolve_path(path, root), self.name, self.wording)

    def chosen_reference(self, config: TaskEval, root: Path) -> Reference | None:
        """Read and check the user's copy of the benchmark. None if the entry has none."""
        path: str | None = getattr(config, "reference", None)
        if path is None:
            return None
        if self.reference is None:
            raise ConfigError(f"reference: suite {self.name} cannot read a copy of its benchmark; remove `reference`.")
        if not (root / path).exists():
            raise ConfigError(
                f"reference {path}: no such file or folder; pass your clone of the benchmark's public repository, or "
                "the prompt files that its scripts wrote."
            )
        found = {
            "paths": {name: resolve_path(given, root) for name, given in config.paths.items()},
            "tasks": [task.name for task in self.chosen_tasks(config)],
        }
        return self.reference(root / path, config.model_copy(update=found))

    def inputs(self, config: TaskEval, root: Path) -> dict[str, dict[str, Any]]:
        wording, reference = self.chosen_wording(config, root), self.chosen_reference(config, root)
        return {
            "paths": {name: path_digest(root / path) for name, path in config.paths.items()},
            "wording": {} if wording is None else {self.name: wording.hash},
            "reference": {} if reference is None else {self.name: reference.hash},
        }

    def plan(self, config: TaskEval, inputs: PlanInputs) -> "PlannedTasks":
        return PlannedTasks(self, config, inputs)

    def cells(self, config: TaskEval, samples: Sequence[Sample]) -> list[Cell]:
        return task_cells(config, self.chosen_tasks(config), samples, of_tasks=len(self.protocol(config)))

    def summary(self, config: TaskEval, cells: Sequence[Cell], samples: Sequence[Sample]) -> dict[str, Any]:
        tasks = self.protocol(config)
        within = {name: tuple(task for task in each if task in tasks) for name, each in self.categories.items()}
        categories = {name: each for name, each in within.items() if each}
        found = suite_summary(config, categories, cells, samples, has_overall=self.has_overall)
        return found if self.reference is None else {**found, **_comparability(config, samples)}


class PlannedTasks(PlannedEval):
    def __init__(self, suite: TaskSuite, config: TaskEval, inputs: PlanInputs) -> None:
        self.suite: TaskSuite = suite
        self.config, self.seed = config, inputs.seed
        self.tasks = {task.name: task for task in suite.chosen_tasks(config)}
        self.encoder = PromptEncoder(inputs.tokenizer, inputs.form)
        self.chat = {name: self.encoder.uses_chat(task, config.chat) for name, task in self.tasks.items()}
        self.reference = suite.chosen_reference(config, inputs.root)
        own = suite.chosen_wording(config, inputs.root)
        self.wording = own if self.reference is None else self.reference.wording
        paths = dict(self.reference.paths) if self.reference is not None else {}
        paths |= {name: resolve_path(path, inputs.root) for name, path in config.paths.items()}
        self.sources = suite.load(inputs.tokenizer, paths, *([] if self.wording is None else [self.wording]))
        indices = {name: self._indices_by_length(task) for name, task in self.tasks.items()}
        limit = inputs.context
        self.beyond_context = {
            length: sum(len(by_length[length]) for by_length in indices.values())
            for length in config.lengths
            if limit and length > limit
        }
        self._cut_to = config.cut_to(limit)
        # Short lengths first, to get results early. Questions of a task stay together.
        self.question_ids = [
            QuestionId(task=name, length=length, index=index)
            for length in sorted(config.asked_lengths(config.lengths, limit))
            for name in self.tasks
            for index in indices[name][length]
        ]
        self.units = [
            Unit(planned=self, length=one.length, index=one.index, tokens=one.length, questions=(one,))
            for one in self.question_ids
        ]
        self._cache: PromptCache | None = None
        self._is_listed = False

    def answer_tokens(self, task: Task) -> int:
        worded = None if self.wording is None else self.wording.answer_tokens.get(task.name)
        return self.config.answer_tokens or (worded or task.answer_tokens) + self.encoder.extra_answer_tokens

    def question(self, question: QuestionId) -> Question:
        task = self.tasks[question.task]
        if self.reference is not None and (question.task, question.length) in self.reference.prompts:
            return self.reference.prompts[question.task, question.length][question.index]
        # A task reserves its own number of answer tokens, so subtract only the difference.
        overhead = self.encoder.overhead(chat=self.chat[task.name]) + self.answer_tokens(task) - task.answer_tokens
        if not self.chat[task.name] and self.reference is not None and not self.reference.counts_opening:
            overhead -= len(self.encoder.opening)
        ask = Ask(
            length=question.length,
            seed=self.seed,
            index=question.index,
            mode=self.config.mode,
            overhead=overhead,
            shots=getattr(self.config, "shots", 0),
        )
        return task.build(self.sources, ask)

    def prompt_line(self, question: QuestionId, cache: PromptCache | None = None) -> PromptLine:
        try:
            asked, ids = encoded = self._encode(question)
        except TooShortError as error:
            raise self._all_too_short(question, error) from error
        if cache is not None:
            self._cache = cache
            cache.put((id(self), question), encoded)
        return {
            "suite": self.suite.name,
            "task": question.task,
            "length": question.length,
            "index": question.index,
            "hash": prompt_hash(ids, payload=self.encoder.payload(asked, chat=self.chat[question.task])),
            "context": hashlib.sha256(asked.context.encode()).hexdigest()[:16],
            "prompt_tokens": self.encoder.template_tokens + len(ids),
            "answer_tokens": self.answer_tokens(self.tasks[question.task]),
            "depth": asked.depth,
            **self._wording_hash,
        }

    def _all_too_short(self, failed: QuestionId, error: TooShortError) -> TooShortError:
        """The error with all other tasks that do not fit this length."""
        needed = {failed.task: max(error.needed.values())}
        firsts = {one.task: one for one in reversed(self.question_ids) if one.length == failed.length}
        for name in self.tasks:
            try:
                if name not in needed and name in firsts:
                    self._encode(firsts[name])
            except TooShortError as other:
                needed[name] = max(other.needed.values())
            except (ConfigError, DataError):
                continue  # another problem, which appears once this one is solved
        return TooShortError(self.suite.name, failed.length, needed)

    def group_questions(self, lines: Sequence[PromptLine], row_tokens: int) -> None:
        by_id = {
            QuestionId(task=line["task"], length=line["length"], index=line["index"]): line
            for line in lines
            if line["suite"] == self.suite.name
        }
        self.units = []
        for (length, _), group in groupby(self.question_ids, key=_block):
            questions = list(group)
            found = [by_id[question] for question in questions]
            contexts = [line["context"] for line in found]
            for places in group_prompts(contexts, [line["prompt_tokens"] for line in found], row_tokens):
                self.units.append(
                    Unit(
                        planned=self,
                        length=length,
                        index=questions[places[0]].index,
                        num_samples=len(places),
                        tokens=length * len({contexts[at] for at in places}),
                        questions=tuple(questions[at] for at in places),
                        hashes=tuple(found[at]["hash"] for at in places),
                    )
                )
        self._is_listed = True

    def check(self) -> None:
        """Build the first prompt of every task and length, unless prompts.jsonl already lists all of them."""
        for _, questions in () if self._is_listed else groupby(self.question_ids, key=_block):
            self._encode(next(questions))

    def prepare(self, unit: Unit) -> Prompt:
        """One prompt with all questions of the unit. Its context is their common ids."""
        task = self.tasks[unit.questions[0].task]
        encoded = [self._cached(question) or self._encode(question) for question in unit.questions]
        # Short prompts share only a row, not a context.
        has_one_context = len({asked.context for asked, _ in encoded}) == 1
        shared = common_prefix([ids for _, ids in encoded]) if has_one_context else 0
        return Prompt(
            suite=self.suite.name,
            length=unit.length,
            index=unit.index,
            context_ids=encoded[0][1][:shared],
            questions=[
                PromptQuestion(
                    ids=ids[shared:],
                    reference="; ".join(asked.references),
                    depth=asked.depth,
                    text=PromptText(question=asked),
                    payload=self.encoder.payload(asked, chat=self.chat[task.name]),
                    cut_tokens=asked.meta.get(CUT_TOKENS, 0),
                )
                for asked, ids in encoded
            ],
            answer_tokens=self.answer_tokens(task),
            match="contains",
            template_tokens=self.encoder.template_tokens,
        )

    def samples(self, unit: Unit, prepared: Prompt, answers: Sequence[str]) -> list[Sample]:
        return [
            self._sample(question_id, prepared, question, output)
            for question_id, question, output in zip(unit.questions, prepared.questions, answers, strict=True)
        ]

    def texts(self, unit: Unit) -> Iterator[str]:
        for question in unit.questions:
            asked = self.question(question)
            yield asked.context
            yield asked.question
            yield from asked.references

    def _sample(self, question_id: QuestionId, prompt: Prompt, question: PromptQuestion, output: str) -> Sample:
        assert question.text is not None
        asked, task = question.text.question, self.tasks[question_id.task]
        score = task.score(self.encoder.answer(output, asked.prefix), asked)
        sample: Sample = {
            "suite": self.suite.name,
            "task": task.name,
            "length": question_id.length,
            "depth": asked.depth,
            "index": question_id.index,
            "hash": prompt.hash(question),
            "prompt_tokens": prompt.prompt_tokens(question),
            "reference": question.reference,
            "output": output,
            "score": None if score is None else float(score),
            **({"cut_tokens": question.cut_tokens} if question.cut_tokens else {}),
            **prompt.excerpt(self.encoder.tokenizer, question, self.config.lengths),
            **self._wording_hash,
            **({} if self.reference is None else {"benchmark": self.reference.facts}),
        }
        rng = rng_for(self.seed, "baseline", self.suite.name, task.name, question_id.length, question_id.index)
        sample |= baseline_scores(asked.items, lambda item: task.score(item, asked), rng)
        sample |= {key: asked.meta[key] for key in ("pair", "groups") if key in asked.meta}
        if score is None:
            # Everything a judge needs, so that it can run later without the sources.
            sample["judge"] = {
                "protocol": task.judge or "qa",
                "question": str(asked.meta.get("question") or asked.question),
                "references": list(asked.references),
                "key_points": [str(point) for point in asked.meta.get("key_points") or []],
            }
        return sample

    @property
    def _wording_hash(self) -> dict[str, Any]:
        return {} if self.wording is None else {"wording": self.wording.hash}

    def _cached(self, question: QuestionId) -> EncodedQuestion | None:
        return None if self._cache is None else self._cache.take((id(self), question))

    def _encode(self, question: QuestionId) -> EncodedQuestion:
        asked, chat = self.question(question), self.chat[question.task]
        answer = self.encoder.template_tokens + self.answer_tokens(self.tasks[question.task])
        fit = None if self.reference is None else self.reference.fit
        if fit is not None:
            asked = fit(asked, self.encoder, chat=chat, limit=question.length - answer)
        ids = self.encoder.ids(asked, chat=chat)
        if self._cut_to is not None and len(ids) + answer > self._cut_to:
            asked, ids = self._cut(asked, ids, len(ids) + answer - self._cut_to, chat=chat)
        used = len(ids) + answer
        # Benchmark prompts ignore the model's template, and benchmarks' own cuts may leave one extra token.
        allowed = 0 if self.reference is None else self.encoder.overhead(chat=chat)
        if used > question.length + allowed and fit is None:
            raise DataError(
                f"{self.suite.name} {question.task}: question {question.index} needs {used} tokens of "
                f"{format_size(question.length)}, including its answer. Use a larger length or remove the task."
            )
        return asked, ids

    def _cut(self, asked: Question, ids: np.ndarray, excess: int, *, chat: bool) -> EncodedQuestion:
        """Cut `excess` tokens from the middle of the context."""

        def build(context: str) -> EncodedQuestion:
            shorter = replace(asked, context=context)
            return shorter, self.encoder.ids(shorter, chat=chat)

        shorter, found = cut_middle(self.encoder.tokenizer, asked.context, excess, build)
        if len(found) > len(ids) - excess:
            raise ConfigError(
                f"{self.suite.name}: a question and its answer do not fit a context of {self._cut_to} tokens; "
                "remove the suite."
            )
        return replace(shorter, meta={**asked.meta, CUT_TOKENS: len(ids) - len(found)}), found

    def _indices_by_length(self, task: Task) -> dict[int, list[int]]:
        if task.tokens is None:
            return dict.fromkeys(self.config.lengths, self._indices(task))
        around = self.encoder.overhead(chat=self.chat[task.name]) + self.answer_tokens(task) + BORDERS
        return choose_by_length(task, self.sources, self.config, seed=self.seed, around=around)

    def _indices(self, task: Task) -> list[int]:
        prompts = {} if self.reference is None else self.reference.prompts
        counts = [len(prompts[task.name, length]) for length in self.config.lengths if (task.name, length) in prompts]
        if counts:
            # Keep the order of the files. Take as many as every length has.
            return list(range(min(self.config.samples, *counts)))
        size = None if task.size is None else task.size(self.sources)
        if size == 0:
            raise ConfigError(f"{self.suite.name}: task {task.name} has no questions in the given data; remove it.")
        if size is None:
            return list(range(max(1, self.config.samples // task.together) * task.together))
        strata = strata_of(task, self.sources, range(size))
        return stratified_subset(strata, self.config.samples, self.seed, together=task.together)


def _comparability(config: TaskEval, samples: Sequence[Sample]) -> dict[str, Any]:
    of_suite = [sample for sample in samples if sample["suite"] == config.suite]
    changes = ["answer_tokens is set"] if config.answer_tokens else []
    if any("cut_tokens" in sample for sample in of_suite):
        changes.append("prompts were cut to the model's context")
    return comparability(next((sample["benchmark"] for sample in of_suite if "benchmark" in sample), None), changes)


def _block(question: QuestionId) -> tuple[int, str]:
    """Key of questions that may be answered together."""
    return question.length, question.task


def common_prefix(rows: Sequence[np.ndarray]) -> int:
    """Length of the common prefix of all rows, leaving each row at least one id of its own."""
    shortest = min(map(len, rows)) - 1
    first = rows[0][:shortest]
    same = np.ones(shortest, dtype=bool)
    for row in rows[1:]:
        same &= row[:shortest] == first
    return int(np.argmin(same)) if not same.all() else shortest


def resolve_path(path: str, root: Path) -> str:
    """Resolve a path relative to the recipe's folder. A path that does not exist may be a Hub id."""
    return str(root / path) if (root / path).exists() else path


def path_digest(path: Path) -> str:
    """Digest a file or folder. If neither exists, digest its name."""
    if path.is_dir():
        return folder_digest(path)
    return file_digest(path) if path.is_file() else digest(str(path))
