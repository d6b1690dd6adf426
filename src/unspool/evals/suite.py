"""What a suite is: its config class, its prompts, and how answers become scores and cells of a summary.

The same config, tokenizer and seed give the same prompts on any machine, in any process and in any order. Context,
question, answer prefix and room for the answer never exceed the length.

`Suite` is all that plans, runs, the command line and reports know of a suite. A suite that consists of tasks is a
`TaskSuite` (task_suite.py), a suite of generated contexts is a `ContextSuite` (context_suite.py).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unspool.core.sizes import format_size
from unspool.evals.config import EvalConfig
from unspool.evals.heldout import Heldout, PlanInputs

if TYPE_CHECKING:
    from unspool.evals.backends.base import Backend
    from unspool.evals.prompts import PromptCache

Mode = Literal["fixed", "reference"]
Sample = dict[str, Any]
"""One line of samples.jsonl."""
Cell = dict[str, Any]
"""One number of summary.json, with its n and interval."""
PromptLine = dict[str, Any]
"""One line of prompts.jsonl."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Which question a task shall build."""

    length: int  # tokens, room for the answer included
    seed: int
    index: int  # from 0, within the task and length
    mode: Mode = "fixed"
    overhead: int = 0  # tokens that a chat template puts around the text
    shots: int = 0  # solved questions before this one, in suites that have them


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question as text: the model reads context + question + prefix and continues."""

    context: str  # the long part; equal contexts are read once
    question: str
    prefix: str = ""  # how the answer begins; in a chat the assistant's first words
    references: tuple[str, ...]
    depth: float | None = None  # position of the answer in the context, 0 to 1; None where it has no meaning
    meta: Mapping[str, Any] = field(default_factory=dict)  # for scorers and readers: keys, labels, ids


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of a `TaskSuite`: a pure generator of questions and a pure scorer of answers."""

    name: str
    metric: str  # as shown: "recall", "SubEM", "nDCG@10", …
    answer_tokens: int
    build: Callable[[Any, Ask], Question]  # from the suite's sources
    score: Callable[[str, Question], float | None]  # 0 to 1; None where a judge has to score
    chat: bool = False  # whether the suite asks through the chat template, if the model has one
    size: Callable[[Any], int] | None = None  # number of questions in the sources; None: any number can be generated
    stratum: Callable[[Any, int], Hashable] | None = None  # depth or label of an index, for even subsets
    together: int = 1  # this many consecutive indices are asked all or not at all, such as both claims of a pair
    judge: Literal["qa", "summary"] | None = None  # the judge's protocol, where `score` gives None


@dataclass(frozen=True, kw_only=True)
class QuestionId:
    """Which question of a `TaskSuite`."""

    task: str
    length: int
    index: int


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The smallest piece of work that survives a killed run: prompts that are answered together, or one window."""

    planned: "PlannedEval"
    length: int
    index: int
    num_samples: int = 1
    """Lines of samples.jsonl that it gives."""
    tokens: int
    """Tokens to read, counted by the requested length."""
    questions: tuple[QuestionId, ...] = ()
    hashes: tuple[str, ...] = ()
    """Prompt hashes of `questions`, from prompts.jsonl."""

    @property
    def num_contexts(self) -> int:
        return max(1, self.tokens // max(1, self.length))

    @property
    def name(self) -> str:
        task = f" {self.questions[0].task}" if self.questions else ""
        return f"{self.planned.suite.name}{task}" + (f" {format_size(self.length)}" if self.length else "")

    def score(self, backend: "Backend") -> list[Sample]:
        prepared = self.planned.prepare(self)
        return self.planned.samples(self, prepared, self.planned.ask(prepared, backend))


class PlannedEval:
    """One entry of `evals` with everything needed to turn its units into samples.

    A run calls `prepare` and `samples` in one thread, since tokenizers are not thread-safe, and `ask` in several.
    """

    suite: "Suite"
    config: Any
    units: list[Unit]
    question_ids: Sequence[QuestionId] = ()
    """Questions that prompts.jsonl lists, in order."""
    beyond_context: Mapping[int, int] = {}
    """Number of questions by length that are longer than the model's context, asked or not."""

    def check(self) -> None:
        """Build one prompt of every kind, so that an impossible length fails before a model is loaded."""

    def prepare(self, unit: Unit) -> Any:
        """Build what the backend needs: a `Prompt`, or token ids."""
        raise NotImplementedError

    def ask(self, prepared: Any, backend: "Backend") -> Any:
        return backend.answers(prepared)

    def samples(self, unit: Unit, prepared: Any, answers: Any) -> list[Sample]:
        raise NotImplementedError

    def texts(self, unit: Unit) -> Iterator[str]:
        """Texts that must not occur in training data, besides the held-out text."""
        return iter(())

    def prompt_line(self, question: QuestionId, cache: "PromptCache | None" = None) -> PromptLine:
        """One line of prompts.jsonl. `cache` keeps the prompt until it is asked."""
        raise NotImplementedError

    def group_questions(self, lines: Sequence[PromptLine], row_tokens: int) -> None:
        """Put questions on one context into one unit, and short prompts into rows of `row_tokens` tokens."""

    def pack_contexts(self, row_tokens: int) -> None:
        """Put contexts that have one question each into rows of `row_tokens` tokens."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    name: str
    title: str  # in reports
    config: type[EvalConfig]
    measure: Literal["accuracy", "score", "loss"]  # share of right answers; mean of scores from 0 to 1; nats per token
    version: int | None = None  # raised when any prompt or score changes; None: covered by run.SUITE_VERSION
    heldout: Callable[[Any], Heldout | None] = lambda config: None
    """The held-out text that prompts are made of."""
    tasks: Mapping[str, Task] = field(default_factory=dict)
    runs_model: bool = False  # it loads the model itself, from `Backend.options`

    @property
    def needs_losses(self) -> bool:
        """Whether the backend has to compute token losses instead of answers."""
        return self.measure == "loss"

    def lengths(self, config: Any) -> list[int]:
        found: list[int] = config.lengths
        return found

    def chosen_tasks(self, config: Any) -> list[Task]:
        return []

    def labels(self, config: Any) -> list[str]:
        """What no second entry of `evals` may score at the same length."""
        return [self.name]

    def inputs(self, config: Any, root: Path) -> dict[str, dict[str, Any]]:
        """Digests of files that the scores depend on, besides held-out text."""
        return {}

    def plan(self, config: Any, inputs: PlanInputs) -> PlannedEval:
        raise NotImplementedError

    def cells(self, config: Any, samples: Sequence[Sample]) -> list[Cell]:
        raise NotImplementedError

    def summary(self, config: Any, cells: Sequence[Cell], samples: Sequence[Sample]) -> dict[str, Any] | None:
        """Means over the whole suite, for suites that have tasks."""
        return None
