"""What there is to score: every context of every evaluation, in one fixed order.

In: the `evals` of a recipe, a tokenizer. Out: `Unit`s, the smallest pieces of work that are kept
when a run is killed, and how each becomes samples.
Promise: the order and content of units depend on nothing but settings, text, tokenizer and seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unspool.base.errors import ConfigError, DataError
from unspool.base.sizes import format_size
from unspool.data.wording import single_token_words, word_list
from unspool.eval.backend import Backend
from unspool.eval.config import NOT_RUN_YET, Eval, KvEval, LossEval, NiahEval
from unspool.eval.prompt import Materials, Prompt, prompt_hash
from unspool.eval.score import score_answer
from unspool.eval.stats import accuracy_cells, loss_cells
from unspool.eval.tasks import kv, loss, niah
from unspool.eval.text import heldout_documents
from unspool.model.buckets import bucket_losses

Runnable = NiahEval | KvEval | LossEval
Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One context with its questions, or one window."""

    config: Runnable
    length: int
    index: int
    num_samples: int
    """Lines of samples.jsonl it gives."""


def runnable(evals: Sequence[Eval]) -> list[Runnable]:
    """The evals, if all can be run and told apart in the summary."""
    chosen: list[Runnable] = []
    seen: set[tuple[str, int]] = set()
    for entry in evals:
        if not isinstance(entry, NiahEval | KvEval | LossEval):
            raise ConfigError(f"evals: suite {entry.suite} cannot be run yet. {NOT_RUN_YET[entry.suite]}")
        for length in lengths_of(entry):
            if (entry.suite, length) in seen:
                raise ConfigError(
                    f"evals: suite {entry.suite} at length {format_size(length)} is asked for twice, and their scores "
                    "would be mixed. Keep one of them, or score the other into another folder."
                )
            seen.add((entry.suite, length))
        chosen.append(entry)
    return chosen


def lengths_of(config: Runnable) -> list[int]:
    return [config.length] if isinstance(config, LossEval) else config.lengths


class Plan:
    """Everything needed to turn a unit into samples."""

    def __init__(self, evals: Sequence[Runnable], tokenizer: Any, *, seed: int, root: Path) -> None:
        self.seed = seed
        words = single_token_words(tokenizer, word_list())
        self._materials = {
            text: Materials(tokenizer=tokenizer, words=words, documents=_documents(evals, text, root))
            for text in {_text_of(config) for config in evals}
        }
        self._windows = {
            config.length: loss.windows(config, self._materials[_text_of(config)], seed=seed)
            for config in evals
            if isinstance(config, LossEval)
        }
        self.units = [unit for config in evals for unit in self._units(config)]

    @property
    def prompt_tokens(self) -> int:
        """What models have to read, counted by the lengths asked for."""
        return sum(unit.length for unit in self.units)

    def check(self) -> None:
        """Build one prompt of every kind, so that a length that cannot work is found before a model is loaded."""
        for unit in self.units:
            if unit.index == 0 and not isinstance(unit.config, LossEval):
                self.prompt(unit)

    def prompt(self, unit: Unit) -> Prompt:
        config, materials = unit.config, self._materials[_text_of(unit.config)]
        if isinstance(config, NiahEval):
            return niah.prompt(config, materials, length=unit.length, seed=self.seed, index=unit.index)
        assert isinstance(config, KvEval)
        return kv.prompt(config, materials, length=unit.length, seed=self.seed, index=unit.index)

    def score(self, unit: Unit, backend: Backend) -> list[Sample]:
        if isinstance(unit.config, LossEval):
            return [self._window_sample(unit, backend)]
        prompt = self.prompt(unit)
        first = unit.index * _per_context(unit.config)
        samples = []
        for at, (asked, output) in enumerate(zip(prompt.questions, backend.answers(prompt), strict=True)):
            sample = _sample(unit, first + at, asked.depth, prompt.context_ids, asked.ids)
            score = score_answer(output, asked.reference, prompt.match)
            samples.append({**sample, "reference": asked.reference, "output": output, "score": score})
        return samples

    def _window_sample(self, unit: Unit, backend: Backend) -> Sample:
        ids = self._windows[unit.length][unit.index]
        losses = backend.window_losses(ids)
        if not np.isfinite(losses).all():
            at = int(np.flatnonzero(~np.isfinite(losses))[0]) + 1
            raise DataError(f"loss: the model gives no finite loss at position {at}; its weights are damaged.")
        buckets = bucket_losses(losses)
        return {**_sample(unit, unit.index, None, ids), "score": float(losses.mean()), "losses": buckets}

    def _units(self, config: Runnable) -> list[Unit]:
        if isinstance(config, LossEval):
            count = len(self._windows[config.length])
            return [Unit(config=config, length=config.length, index=at, num_samples=1) for at in range(count)]
        contexts = niah.num_contexts(config) if isinstance(config, NiahEval) else kv.num_contexts(config)
        per_context = _per_context(config)
        return [
            Unit(
                config=config,
                length=length,
                index=at,
                num_samples=min(per_context, config.samples - at * per_context),
            )
            for length in config.lengths
            for at in range(contexts)
        ]


def summarize(evals: Sequence[Runnable], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The cells of summary.json."""
    cells: list[dict[str, Any]] = []
    for config in evals:
        if isinstance(config, LossEval):
            cells += loss_cells(config.length, samples)
            continue
        depths = niah.depth_grid(config) if isinstance(config, NiahEval) else []
        for length in config.lengths:
            cells += accuracy_cells(config.suite, length, depths, samples)
    return cells


def _sample(unit: Unit, index: int, depth: float | None, *ids: np.ndarray) -> Sample:
    return {
        "suite": unit.config.suite,
        "length": unit.length,
        "depth": depth,
        "index": index,
        "hash": prompt_hash(*ids),
        "prompt_tokens": sum(map(len, ids)),
    }


def _per_context(config: NiahEval | KvEval) -> int:
    return config.needles if isinstance(config, NiahEval) else config.questions


def _text_of(config: Runnable) -> str | None:
    return None if isinstance(config, KvEval) else config.text


def _documents(evals: Sequence[Runnable], text: str | None, root: Path) -> list[str]:
    tokens = [
        config.samples * config.length if isinstance(config, LossEval) else max(config.lengths)
        for config in evals
        if not isinstance(config, KvEval) and config.text == text
    ]
    # Key-value recall needs no text.
    return heldout_documents(text, root, tokens=max(tokens)) if tokens else []
