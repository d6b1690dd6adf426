"""All units of work of an evaluation, in a fixed order."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size
from unspool.evals.backends.base import TOKEN_IDS, PromptForm
from unspool.evals.config import EvalConfig
from unspool.evals.heldout import PlanInputs
from unspool.evals.prompts import PromptCache
from unspool.evals.suite import PromptLine, Unit
from unspool.evals.suites import suite_of


class EvalPlan:
    """The units of all entries of `evals`. Raises ConfigError if two entries score the same task and length.

    Order and content depend only on settings, text, tokenizer and seed.
    """

    def __init__(
        self,
        evals: Sequence[EvalConfig],
        tokenizer: Any,
        *,
        seed: int,
        root: Path,
        context: int | None = None,
        form: PromptForm = TOKEN_IDS,
    ) -> None:
        _check_distinct(evals)
        requests = [found for config in evals if (found := suite_of(config).heldout(config)) is not None]
        tokens = {text: max(one.tokens for one in requests if one.text == text) for text, _ in requests}
        inputs = PlanInputs(
            tokenizer=tokenizer, seed=seed, root=root, heldout_tokens=tokens, context=context, form=form
        )
        self.evals = [suite_of(config).plan(config, inputs) for config in evals]
        self._questions = [(planned, question) for planned in self.evals for question in planned.question_ids]

    @property
    def units(self) -> list[Unit]:
        return [unit for planned in self.evals for unit in planned.units]

    @property
    def num_contexts(self) -> int:
        return sum(unit.num_contexts for unit in self.units)

    @property
    def num_samples(self) -> int:
        return sum(unit.num_samples for unit in self.units)

    @property
    def num_questions(self) -> int:
        """Samples and skipped questions."""
        skipping = [planned for planned in self.evals if planned.config.beyond_context == "skip"]
        return self.num_samples + sum(sum(planned.beyond_context.values()) for planned in skipping)

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the model reads, counted by the requested lengths."""
        return sum(unit.tokens for unit in self.units)

    @property
    def num_listed(self) -> int:
        return len(self._questions)

    @property
    def beyond_context(self) -> dict[int, int]:
        """Number of questions beyond the model's context by length, whether run or skipped."""
        found: Counter[int] = Counter()
        for planned in self.evals:
            found.update(planned.beyond_context)
        return dict(sorted(found.items()))

    def check(self) -> None:
        for planned in self.evals:
            planned.check()

    def prompt_lines(self, *, skip: int = 0, cache: PromptCache | None = None) -> Iterator[PromptLine]:
        """Lines of prompts.jsonl: every question of every suite with tasks."""
        return (planned.prompt_line(question, cache) for planned, question in self._questions[skip:])

    def group_questions(self, lines: Sequence[PromptLine], *, row_tokens: int) -> None:
        for planned in self.evals:
            planned.group_questions(lines, row_tokens)

    def pack_contexts(self, row_tokens: int) -> None:
        for planned in self.evals:
            planned.pack_contexts(row_tokens)


def _check_distinct(evals: Sequence[EvalConfig]) -> None:
    seen: set[tuple[str, int]] = set()
    for config in evals:
        suite = suite_of(config)
        for label in suite.labels(config):
            for length in suite.lengths(config):
                if (label, length) in seen:
                    raise ConfigError(
                        f"evals: suite {label} at length {format_size(length)} appears twice, and the scores "
                        "would be mixed. Remove one of them, or score it into another folder."
                    )
                seen.add((label, length))
