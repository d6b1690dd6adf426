"""Loss by position on held-out text.

Windows do not overlap and never cross documents, so that more context is always more of the same text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from unspool.core.errors import ConfigError, DataError
from unspool.core.rng import rng_for
from unspool.core.sizes import Size
from unspool.evals.backends.base import Backend
from unspool.evals.config import EvalConfig
from unspool.evals.heldout import Heldout, Materials, PlanInputs
from unspool.evals.prompts import encode, opening_ids, prompt_hash
from unspool.evals.suite import Cell, PlannedEval, Sample, Suite, Unit
from unspool.evals.summary import loss_cells


class PerplexityEval(EvalConfig):
    """Loss by position on held-out text."""

    suite: Literal["perplexity"]
    length: Size = Field(description="Length of each window in tokens.")
    samples: int = Field(8, ge=1, description="Number of windows.")
    text: str | None = Field(
        None, description="JSONL or text files to read windows from. Default: the bundled held-out book."
    )


@dataclass(frozen=True, kw_only=True)
class PerplexitySuite(Suite):
    def lengths(self, config: PerplexityEval) -> list[int]:
        return [config.length]

    def plan(self, config: PerplexityEval, inputs: PlanInputs) -> "PlannedWindows":
        return PlannedWindows(self, config, inputs)

    def cells(self, config: PerplexityEval, samples: Sequence[Sample]) -> list[Cell]:
        return loss_cells(self.name, config.length, samples)


class PlannedWindows(PlannedEval):
    def __init__(self, suite: PerplexitySuite, config: PerplexityEval, inputs: PlanInputs) -> None:
        self.suite, self.config = suite, config
        self.windows = windows(config, inputs.materials(suite.heldout(config)), seed=inputs.seed)
        self.units = [
            Unit(planned=self, length=config.length, index=index, tokens=config.length)
            for index in range(len(self.windows) if config.asked_lengths([config.length], inputs.context) else 0)
        ]
        self._cut_to = config.cut_to(inputs.context)
        limit = inputs.context
        self.beyond_context = {config.length: len(self.windows)} if limit and config.length > limit else {}

    def prepare(self, unit: Unit) -> np.ndarray:
        return self.windows[unit.index][: self._cut_to]

    def ask(self, prepared: np.ndarray, backend: Backend) -> np.ndarray:
        return backend.window_losses(prepared)

    def samples(self, unit: Unit, prepared: np.ndarray, answers: np.ndarray) -> list[Sample]:
        # Import late: recipe checks import this module, and torch needs seconds to load.
        from unspool.models.loss import bucket_losses

        if not np.isfinite(answers).all():
            at = int(np.flatnonzero(~np.isfinite(answers))[0]) + 1
            raise DataError(f"perplexity: the model's loss at position {at} is not finite; its weights are damaged.")
        return [
            {
                "suite": self.suite.name,
                "length": unit.length,
                "depth": None,
                "index": unit.index,
                "hash": prompt_hash(prepared),
                "prompt_tokens": len(prepared),
                "score": float(answers.mean()),
                "losses": bucket_losses(answers),
            }
        ]


def windows(config: PerplexityEval, materials: Materials, *, seed: int) -> list[np.ndarray]:
    """Draw up to `config.samples` windows of exactly `config.length` tokens."""
    opening = opening_ids(materials.tokenizer)
    body = config.length - len(opening)
    if body < 2:
        raise ConfigError(f"perplexity: length {config.length} leaves no tokens to predict; use at least 64.")
    rng = rng_for(seed, "loss", config.length)
    found: list[np.ndarray] = []
    longest = 0
    for text in materials.documents:
        ids = encode(materials.tokenizer, text)
        longest = max(longest, len(ids))
        if len(ids) >= body:
            # Use a random offset, so that windows do not always start with the document.
            first = int(rng.integers(len(ids) % body + 1))
            found += np.split(ids[first : first + len(ids) // body * body], len(ids) // body)
    if not found:
        raise DataError(
            f"perplexity: no document of the held-out text has {config.length} tokens (the longest has {longest}). "
            "Use a shorter length, use longer documents as text (`text`), or remove perplexity."
        )
    chosen = rng.permutation(len(found))[: config.samples]
    return [np.concatenate([opening, found[at]]) for at in chosen]


SUITE = PerplexitySuite(
    name="perplexity",
    title="Loss",
    config=PerplexityEval,
    measure="loss",
    heldout=lambda config: Heldout(config.text, config.samples * config.length),
)
