"""Suites of generated contexts with one or more questions each, such as niah and key_value."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from queue import SimpleQueue
from typing import Any

from unspool.evals.heldout import Materials, PlanInputs
from unspool.evals.prompt_encoder import PromptEncoder
from unspool.evals.prompts import Prompt, group_prompts, merge_prompts
from unspool.evals.scoring.answers import score_answer
from unspool.evals.suite import Cell, PlannedEval, Sample, Suite, Unit
from unspool.evals.summary import accuracy_cells

# With fewer prompts, copying the tokenizer costs more than threads save.
FEWEST_IN_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class ContextSuite(Suite):
    build: Callable[..., Prompt]
    """Arguments: config and materials, and the keywords length, seed and index."""
    questions_per_context: Callable[[Any], int]
    depths: Callable[[Any], list[float]] = lambda config: []
    """The depth grid; empty if depth is not measured."""
    labels_of: Callable[[Any, int], dict[str, Any]] = lambda config, index: {}
    """Further fields of the sample with this index, such as its wording."""
    cells_of: Callable[[Any, Sequence[Sample]], list[Cell]] | None = None
    """Cells of the summary. Default: one per length and one per depth."""

    def plan(self, config: Any, inputs: PlanInputs) -> "PlannedContexts":
        return PlannedContexts(self, config, inputs)

    def cells(self, config: Any, samples: Sequence[Sample]) -> list[Cell]:
        if self.cells_of is not None:
            return self.cells_of(config, samples)
        return [
            cell
            for length in config.lengths
            for cell in accuracy_cells(self.name, length, self.depths(config), samples)
        ]


class PlannedContexts(PlannedEval):
    def __init__(self, suite: ContextSuite, config: Any, inputs: PlanInputs) -> None:
        self.suite: ContextSuite = suite
        self.config, self._inputs = config, inputs
        self._encoder = PromptEncoder(inputs.tokenizer, inputs.form)
        self._cut_to = config.cut_to(inputs.context)
        self._materials = inputs.materials(suite.heldout(config))
        self._per_context = suite.questions_per_context(config)
        self.units = [
            Unit(
                planned=self,
                length=length,
                index=index,
                num_samples=min(self._per_context, config.samples - index * self._per_context),
                tokens=length,
            )
            for length in config.asked_lengths(config.lengths, inputs.context)
            for index in range(-(-config.samples // self._per_context))
        ]
        limit = inputs.context
        self.beyond_context = {length: config.samples for length in config.lengths if limit and length > limit}

    def check(self) -> None:
        for length in dict.fromkeys(unit.length for unit in self.units):
            self._cut(self._build(length, 0, self._materials))

    def prepare(self, unit: Unit) -> Prompt:
        count = unit.num_samples if self._per_context == 1 else 1
        prompts = self._build_all(unit.length, range(unit.index, unit.index + count))
        return prompts[0] if count == 1 else merge_prompts(prompts)

    def _build_all(self, length: int, indices: range) -> list[Prompt]:
        """Build in threads: nearly all the time is spent in the tokenizer, outside Python's lock."""
        if len(indices) < FEWEST_IN_THREADS:
            return [self._cut(self._build(length, index, self._materials)) for index in indices]
        idle: SimpleQueue[Materials] = SimpleQueue()
        for tokenizer in self._inputs.tokenizer_copies:
            idle.put(replace(self._materials, tokenizer=tokenizer))

        def build(index: int) -> Prompt:
            materials = idle.get()
            try:
                return self._build(length, index, materials)
            finally:
                idle.put(materials)

        with ThreadPoolExecutor(idle.qsize()) as pool:
            return [self._cut(prompt) for prompt in pool.map(build, indices)]

    def _build(self, length: int, index: int, materials: Materials) -> Prompt:
        return self.suite.build(self.config, materials, length=length, seed=self._inputs.seed, index=index)

    def _cut(self, prompt: Prompt) -> Prompt:
        return prompt if self._cut_to is None else self._encoder.cut(prompt, self._cut_to)

    def samples(self, unit: Unit, prepared: Prompt, answers: Sequence[str]) -> list[Sample]:
        first = unit.index * self._per_context
        encoder = self._encoder
        return [
            {
                "suite": self.suite.name,
                "length": unit.length,
                "depth": question.depth,
                "index": first + at,
                **self.suite.labels_of(self.config, first + at),
                "hash": prepared.hash(question),
                "prompt_tokens": prepared.prompt_tokens(question),
                "reference": question.reference,
                "output": output,
                "score": score_answer(encoder.answer(output, question.prefix), question.reference, prepared.match),
                **({"cut_tokens": question.cut_tokens} if question.cut_tokens else {}),
                **prepared.excerpt(encoder.tokenizer, question, self.config.lengths),
            }
            for at, (question, output) in enumerate(zip(prepared.questions, answers, strict=True))
        ]

    def texts(self, unit: Unit) -> Iterator[str]:
        for question in self.prepare(unit).questions:
            yield str(self._inputs.tokenizer.decode(question.ids, skip_special_tokens=True))
            yield question.reference

    def pack_contexts(self, row_tokens: int) -> None:
        if self._per_context > 1:
            return
        packed: list[Unit] = []
        for length, group in groupby(self.units, key=lambda unit: unit.length):
            units = list(group)
            for row in group_prompts([str(unit.index) for unit in units], [length] * len(units), row_tokens):
                packed.append(replace(units[row[0]], num_samples=len(row), tokens=len(row) * length))
        self.units = packed
