"""Base class of evaluation suites: config class, prompts, scoring and summary cells.

The same config, tokenizer and seed give the same prompts on any machine, in any process and in any order. Context,
question, answer prefix and answer tokens never exceed the length.

Plans, runs, the command line and reports use only `Suite`. A suite that consists of tasks is a
`TaskSuite` (task_suite.py), a suite of generated contexts is a `ContextSuite` (context_suite.py).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unspool.core.errors import ConfigError
from unspool.core.formatting import join_words
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


class TooShortError(ConfigError):
    """A task does not fit a length."""

    def __init__(self, suite: str, length: int, needed: Mapping[str, int]) -> None:
        """`needed` has the number of tokens that each task needs."""
        (task, least), *others = needed.items()
        self.needed = needed
        prompt = "with this tokenizer, the smallest prompt and its answer need about"
        if others:
            each = join_words([f"{count} tokens for {name}" for name, count in needed.items()])
            problem = f"{suite}: length {length} is too short for {len(needed)} tasks: {prompt} {each}. "
        else:
            problem = f"{suite} {task}: length {length} is too short: {prompt} {least} tokens. "
        super().__init__(f"{problem}Use a larger length or remove {'these tasks' if others else 'this task'}.")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Parameters of the question to build."""

    length: int  # tokens, including the answer
    seed: int
    index: int  # from 0, within the task and length
    mode: Mode = "fixed"
    overhead: int = 0  # tokens that a chat template adds around the text
    shots: int = 0  # number of solved examples before this question, in suites that have them


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question as text. The model reads context + question + prefix, and continues."""

    context: str  # the long part; the model reads equal contexts once
    question: str
    prefix: str = ""  # start of the answer; in a chat, the assistant's first words
    references: tuple[str, ...]
    depth: float | None = None  # position of the answer in the context, 0 to 1; None if it has no meaning
    items: tuple[str, ...] = ()  # answers that need no understanding, in context order; for trivial baselines
    meta: Mapping[str, Any] = field(default_factory=dict)  # for scorers and readers: keys, labels, ids


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of a `TaskSuite`: a pure question generator and a pure answer scorer."""

    name: str
    metric: str  # as shown: "recall", "SubEM", "nDCG@10", …
    answer_tokens: int
    build: Callable[[Any, Ask], Question]  # arguments: the suite's sources, and the question to build
    score: Callable[[str, Question], float | None]  # 0 to 1; None if a judge must score the answer
    chat: bool = False  # use the chat template, if the model has one
    size: Callable[[Any], int] | None = None  # number of questions in the sources; None: unlimited
    stratum: Callable[[Any, int], Hashable] | None = None  # depth or label of an index, for balanced subsets
    tokens: Callable[[Any, int, int], int] | None = None
    """Tokens of a question that is never cut. Arguments: sources, index, and the number above which any will do.

    A question is asked at a length if it needs more than half of the length. None: asked at all lengths.
    """
    together: int = 1  # group size: such a group of consecutive indices is used whole or not at all
    judge: Literal["qa", "summary"] | None = None  # the judge's protocol, if `score` returns None


@dataclass(frozen=True, kw_only=True)
class QuestionId:
    """Identifies a question of a `TaskSuite`."""

    task: str
    length: int
    index: int


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Smallest piece of work that survives a kill: prompts that are answered together, or one window."""

    planned: "PlannedEval"
    length: int
    index: int
    num_samples: int = 1
    """Number of its lines in samples.jsonl."""
    tokens: int
    """Tokens to read, by requested length."""
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

    A run calls `ask` in several threads, but `prepare` and `samples` in one: tokenizers are not thread-safe.
    """

    suite: "Suite"
    config: Any
    units: list[Unit]
    question_ids: Sequence[QuestionId] = ()
    """Questions that prompts.jsonl lists, in order."""
    beyond_context: Mapping[int, int] = {}
    """Number of questions beyond the model's context by length, whether run or skipped."""

    def check(self) -> None:
        """Build one prompt of every kind, so that an impossible length fails before a model is loaded."""

    def prepare(self, unit: Unit) -> Any:
        """Build the backend's input: a `Prompt`, or token ids."""
        raise NotImplementedError

    def ask(self, prepared: Any, backend: "Backend") -> Any:
        return backend.answers(prepared)

    def samples(self, unit: Unit, prepared: Any, answers: Any) -> list[Sample]:
        raise NotImplementedError

    def texts(self, unit: Unit) -> Iterator[str]:
        """Texts that must not occur in training data, in addition to the held-out text."""
        return iter(())

    def prompt_line(self, question: QuestionId, cache: "PromptCache | None" = None) -> PromptLine:
        """One line of prompts.jsonl. `cache` keeps the prompt until it is run."""
        raise NotImplementedError

    def group_questions(self, lines: Sequence[PromptLine], row_tokens: int) -> None:
        """Group questions on one context into one unit, and short prompts into rows of `row_tokens` tokens."""

    def pack_contexts(self, row_tokens: int) -> None:
        """Group single-question contexts into rows of `row_tokens` tokens."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    name: str
    title: str  # title in reports
    config: type[EvalConfig]
    measure: Literal["accuracy", "score", "loss"]  # share of correct answers; mean score in [0, 1]; nats per token
    version: int | None = None  # increase it when a prompt or score changes; None: run.SUITE_VERSION applies
    heldout: Callable[[Any], Heldout | None] = lambda config: None
    """Held-out text used in prompts."""
    tasks: Mapping[str, Task] = field(default_factory=dict)
    runs_model: bool = False  # True if the suite loads the model itself, from `Backend.options`
    is_ratio: bool = False  # True if the value is a ratio of sums over samples, of `ratio_of`

    @property
    def needs_losses(self) -> bool:
        """True if the suite needs token losses instead of answers."""
        return self.measure == "loss"

    @property
    def is_bounded(self) -> bool:
        """True if the score of every sample is between 0 and 1."""
        return self.measure != "loss" and not self.is_ratio

    @property
    def by_position(self) -> bool:
        """True if samples have a loss for each range of positions."""
        return self.measure == "loss" and not self.is_ratio

    def ratio_of(self, sample: Sample) -> tuple[float, float]:
        """Return a sample's parts of the two sums whose ratio is the value, if `is_ratio`."""
        raise NotImplementedError

    def lengths(self, config: Any) -> list[int]:
        found: list[int] = config.lengths
        return found

    def chosen_tasks(self, config: Any) -> list[Task]:
        return []

    def labels(self, config: Any) -> list[str]:
        """Labels that must be unique per length among all entries of `evals`."""
        return [self.name]

    def inputs(self, config: Any, root: Path) -> dict[str, dict[str, Any]]:
        """Digests of files that the scores depend on, other than held-out text."""
        return {}

    def plan(self, config: Any, inputs: PlanInputs) -> PlannedEval:
        raise NotImplementedError

    def cells(self, config: Any, samples: Sequence[Sample]) -> list[Cell]:
        raise NotImplementedError

    def summary(self, config: Any, cells: Sequence[Cell], samples: Sequence[Sample]) -> dict[str, Any] | None:
        """Means over the whole suite, for suites with tasks."""
        return None
