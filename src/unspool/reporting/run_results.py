"""The results of one run as plain values. `gather` reads them; all charts, tables and sentences use them.

A number that was not measured is None, never 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unspool.evals.suites import SUITES, perplexity
from unspool.reporting.suite_titles import measure_of

BASE = "base"
LOSS = perplexity.SUITE.name
SHORT = "short"  # lm-eval tasks; they have short prompts and no length
_SEPARATOR = ": "  # between a suite and its task


def task_suite(suite: str, task: str) -> str:
    return f"{suite}{_SEPARATOR}{task}"


def task_of(suite: str) -> tuple[str, str]:
    """Split a name from `task_suite` into (suite, task). The task is empty for a whole suite."""
    name, _, task = suite.partition(_SEPARATOR)
    return name, task


def is_part(suite: str) -> bool:
    """Whether a name stands for some questions of a task, such as `graphwalks: bfs, depth 1`."""
    return ", " in task_of(suite)[1]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One mean with its n and 95% interval: a recall at (length, depth), or a loss over positions [start, stop)."""

    suite: str
    metric: str
    length: int
    value: float | None
    n: int
    low: float | None = None
    high: float | None = None
    depth: float | None = None  # None: mean over all depths
    start: int | None = None
    stop: int | None = None
    tasks: int | None = None  # for a mean over tasks: number of tasks with a score
    of_tasks: int | None = None  # number of tasks of the suite
    unscored: int = 0  # answers without a readable judge verdict
    beyond_context: str | None = None  # policy for questions longer than the model's context
    baselines: dict[str, float] = field(default_factory=dict)  # scores of trivial baselines on the same questions

    @property
    def is_loss(self) -> bool:
        return measure_of(self.suite) == "loss"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt. Long prompts are cut in the middle."""

    start: str
    end: str = ""
    cut_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One scored question."""

    suite: str
    length: int
    depth: float | None
    index: int
    hash: str
    prompt_tokens: int | None
    reference: str
    output: str
    score: float | None
    prompt: Prompt | None = None


Answers = dict[str, float]  # hash of a prompt: score
Windows = dict[str, dict[tuple[int, int], tuple[float, int]]]  # hash of a window: span of positions: (loss, tokens)


@dataclass(frozen=True, kw_only=True)
class ModelScores:
    """One scored model: `base` or a stage."""

    name: str
    cells: tuple[Cell, ...]
    samples: tuple[Sample, ...] = ()  # a few per suite, at the longest length
    question_sets: dict[str, str] = field(default_factory=dict)  # suite: hash over all prompts
    answers: dict[tuple[str, int], Answers] = field(default_factory=dict)  # by suite (or task) and length
    windows: dict[int, Windows] = field(default_factory=dict)  # by length
    short: tuple[Cell, ...] = ()  # one per task of lm-eval
    holds_until: dict[str, int | None] = field(default_factory=dict)  # suite: its effective length
    asked: dict[str, str] = field(default_factory=dict)  # backend settings: backend, endpoint, …
    mixed_averages: dict[str, tuple[float, tuple[int, ...]]] = field(default_factory=dict)
    """By suite, if some tasks use other lengths: the average and all lengths."""
    rates: dict[str, tuple[int, int]] = field(default_factory=dict)  # suite: target and reference of its rate
    comparability: dict[str, str] = field(
        default_factory=dict
    )  # suite: whether it is comparable with published numbers, and why
    effective_length: str | None = None  # sentence with the result of `unspool eval MODEL`

    def recall(self, suite: str, length: int, depth: float | None = None) -> Cell | None:
        wanted = (suite, length, depth)
        return next((cell for cell in self.cells if (cell.suite, cell.length, cell.depth) == wanted), None)

    def losses(self) -> tuple[Cell, ...]:
        """Loss by position in the longest windows this model was scored on."""
        found = [cell for cell in self.cells if cell.is_loss and cell.stop is not None]
        longest = max((cell.length for cell in found), default=0)
        return tuple(sorted((cell for cell in found if cell.length == longest), key=lambda cell: cell.start or 0))


def recall_suites(models: Iterable[ModelScores]) -> list[str]:
    """All scored suites except perplexity, in page order."""
    found = {cell.suite for model in models for cell in model.cells if not cell.is_loss}
    right_or_wrong = [suite for suite in SUITES if measure_of(suite) == "accuracy"]
    order = {suite: position for position, suite in enumerate(right_or_wrong)}
    return sorted(found, key=lambda suite: (order.get(suite, len(order)), suite))


def main_suites(models: Iterable[ModelScores]) -> list[str]:
    """Whole suites, without their tasks."""
    return [suite for suite in recall_suites(models) if _SEPARATOR not in suite]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step; `tokens` counts from the start of the stage."""

    step: int
    tokens: int
    loss: float | None
    lr: float | None
    tokens_per_second: float | None
    losses: dict[str, float | None]
    grad_norm: float | None = None
    mfu: float | None = None  # share of the device's peak
    memory_gib: float | None = None
    skipped: bool = False  # the weights were not changed
    wrong: str = ""  # error message


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Held-out loss at one step of a stage."""

    step: int
    tokens: int
    loss: float | None
    farthest: float | None  # loss at positions `span`, the last positions that any document reaches
    span: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class Stage:
    name: str
    parent: str | None  # the stage it starts from; None means the base model
    context_length: int | None
    planned_tokens: int | None
    finished: bool
    steps: tuple[Step, ...]
    validation: tuple[Validation, ...] = ()
    mix: dict[str, float] = field(default_factory=dict)  # dataset: requested share of tokens
    drawn: dict[str, int] = field(default_factory=dict)  # dataset: rows trained on
    rope: dict[str, Any] = field(default_factory=dict)  # as in the recipe
    config: dict[str, Any] | None = None  # config.json of its model

    @property
    def tokens(self) -> int:
        return self.steps[-1].tokens if self.steps else 0


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A published folder, as its manifest describes it."""

    path: str  # relative to the run, such as datasets/books-2k
    kind: str
    version: str
    counts: dict[str, Any]
    inputs: dict[str, Any]
    content_hash: str
    num_files: int
    num_bytes: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Token pairs of one document in a row by distance, before and after a strategy moved chunks."""

    edges: list[int]  # lower edges of the bins
    before: list[int]
    after: list[int]
    rows: int
    counted: int  # sampled rows
    row_len: int


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An unreadable record, or a part of a document that was removed."""

    corpus: str
    kind: str  # "not read" or "left out"
    place: str
    reason: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class RunResults:
    run_dir: Path
    name: str
    recipe_text: str | None
    base_model: str | None
    original_context: int | None
    versions: dict[str, str]
    seconds: dict[str, float]
    models: tuple[ModelScores, ...]  # base first, then stages as in the recipe
    stages: tuple[Stage, ...]
    artifacts: tuple[Artifact, ...]
    problems: tuple[Problem, ...] = ()  # the first few of each corpus
    base_config: dict[str, Any] | None = None  # config.json of the model before training
    curves: dict[str, dict[int, ModelScores]] = field(default_factory=dict)  # stage: scores by tokens trained in it
    distances: dict[str, Distances] = field(default_factory=dict)  # by dataset name
    attention_maps: dict[str, str] = field(default_factory=dict)  # name: SVG
    is_run: bool = True  # False: the scores of one model, without a run

    @property
    def before(self) -> ModelScores | None:
        return next((model for model in self.models if model.name == BASE), None)

    @property
    def after(self) -> tuple[ModelScores, ...]:
        return tuple(model for model in self.models if model.name != BASE)

    @property
    def arms(self) -> tuple[ModelScores, ...]:
        """Scored models from which no other stage starts. They can be compared with each other."""
        continued = {stage.parent for stage in self.stages}
        return tuple(model for model in self.after if model.name not in continued) or self.after

    @property
    def target_context(self) -> int | None:
        return max((stage.context_length for stage in self.stages if stage.context_length), default=None)

    @property
    def model_names(self) -> list[str]:
        """All model names in a fixed order, so that a model has the same color in all charts."""
        names = [BASE, *(stage.name for stage in self.stages), *(model.name for model in self.models)]
        return list(dict.fromkeys(names))

    @property
    def recall_suites(self) -> list[str]:
        return recall_suites(self.models)

    def context_of(self, name: str) -> int | None:
        """The context length that a model was trained for."""
        if name == BASE:
            return self.original_context
        return next((stage.context_length for stage in self.stages if stage.name == name), None)

    @property
    def main_suites(self) -> list[str]:
        return main_suites(self.models)

    def lengths(self, suite: str) -> list[int]:
        return sorted({cell.length for model in self.models for cell in model.cells if cell.suite == suite})

    def depths(self, suite: str) -> list[float]:
        cells = [cell for model in self.models for cell in model.cells if cell.suite == suite]
        return sorted({cell.depth for cell in cells if cell.depth is not None})

    def trained_tokens(self, name: str) -> int:
        """Tokens trained from the base model to the end of this stage."""
        stages = {stage.name: stage for stage in self.stages}
        total, seen = 0, set[str]()
        at: str | None = name
        while at in stages and at not in seen:
            seen.add(at)
            total += stages[at].tokens
            at = stages[at].parent
        return total
