"""LongPPL: loss on tokens that become predictable with long context (Fang et al., arXiv 2410.23771).

Most tokens depend only on the text right before them, so the mean loss over all tokens barely shows how well a model
uses long context. The log-probability of a key token is above `min_log_prob` with the whole window as context. It also
exceeds the log-probability with only the last `short_context` tokens by more than `min_gain`.

One model, the evaluator, chooses the key tokens. By default this is the scored model itself. Models are comparable only
on the key tokens of one evaluator, so set `key_tokens` to that model's scores folder.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from unspool.core.artifacts import file_digest
from unspool.core.errors import ConfigError, DataError
from unspool.core.sizes import Size, format_size
from unspool.core.stats import t_quantile
from unspool.data.strategies import long_context_gain
from unspool.data.strategies.long_context_gain import STRIDES
from unspool.evals.backends.base import Backend
from unspool.evals.config import EvalConfig
from unspool.evals.heldout import Heldout, PlanInputs
from unspool.evals.prompts import prompt_hash
from unspool.evals.suite import Cell, PlannedEval, Sample, Suite, Unit
from unspool.evals.suites.perplexity import PerplexityEval, windows

SHORT_CONTEXT = 4096  # tokens, as in the paper
SAMPLES_FILE = "samples.jsonl"


class LongPPLEval(EvalConfig):
    """Loss on the tokens of held-out text that long context makes predictable."""

    suite: Literal["longppl"]
    length: Size = Field(description="Length of each window of text, in tokens.")
    short_context: Size | None = Field(
        None,
        ge=8,
        description="Longest context in the comparison with short context, in tokens. Default: 4K, or an eighth of a "
        "length below 32K.",
    )
    min_gain: float = Field(
        2.0, description="Smallest gain in log-probability, in nats, that the long context must give a key token."
    )
    min_log_prob: float = Field(
        -2.0, le=0, description="Lowest log-probability, in nats, of a key token with the long context."
    )
    key_tokens: str | None = Field(
        None,
        description="Scores folder of the model that chooses the key tokens, so that several models are scored on the "
        "same ones. Default: the scored model chooses.",
    )
    samples: int = Field(8, ge=1, description="Number of windows.")
    text: str | None = Field(None, description="JSONL or text files to read. Default: the bundled held-out book.")

    @model_validator(mode="after")
    def _is_longer(self) -> "LongPPLEval":
        if self.length < 2 * self.short:
            raise ValueError(
                f"length {format_size(self.length)} is less than twice short_context {format_size(self.short)}"
            )
        return self

    @property
    def short(self) -> int:
        """Maximum tokens of a short context."""
        return self.short_context or max(8, min(SHORT_CONTEXT, self.length // 8))


def short_losses(backend: Backend, ids: np.ndarray, short_context: int) -> np.ndarray:
    """Return −log p of tokens from position `short_context` on, each with at most `short_context` context tokens."""
    return long_context_gain.short_losses(backend.window_losses, ids, short_context)


def choose_key_tokens(config: LongPPLEval, long: np.ndarray, short: np.ndarray) -> np.ndarray:
    """Return positions of key tokens. Both loss arrays start at position `short_context`."""
    is_key = (short - long > config.min_gain) & (-long > config.min_log_prob)
    return np.flatnonzero(is_key) + config.short


@dataclass(frozen=True, kw_only=True)
class LongPPLSuite(Suite):
    def lengths(self, config: LongPPLEval) -> list[int]:
        return [config.length]

    def plan(self, config: LongPPLEval, inputs: PlanInputs) -> "PlannedLongPPL":
        return PlannedLongPPL(self, config, inputs)

    def ratio_of(self, sample: Sample) -> tuple[float, float]:
        return (sample["score"] or 0.0) * sample["key_tokens"], sample["key_tokens"]

    def inputs(self, config: LongPPLEval, root: Path) -> dict[str, dict[str, Any]]:
        if config.key_tokens is None:
            return {}
        return {"key_tokens": {self.name: file_digest(samples_file(config.key_tokens, root))}}

    def cells(self, config: LongPPLEval, samples: Sequence[Sample]) -> list[Cell]:
        chosen = [one for one in samples if one["suite"] == self.name and one["length"] == config.length]
        known = [one for one in chosen if one["score"] is not None]
        n = sum(one["key_tokens"] for one in known)
        value = sum(one["score"] * one["key_tokens"] for one in known) / n if n else None
        half = _half_interval(known, n)
        return [
            {
                "suite": self.name,
                "metric": "loss",
                "length": config.length,
                "depth": None,
                "from": config.short,
                "to": config.length,
                "value": value,
                "n": n,
                "low": None if value is None or half is None else value - half,
                "high": None if value is None or half is None else value + half,
                "perplexity": None if value is None else math.exp(value),
                "tokens": sum(one["tokens"] for one in chosen),
            }
        ]

    def summary(self, config: LongPPLEval, cells: Sequence[Cell], samples: Sequence[Sample]) -> dict[str, Any] | None:
        own = config.key_tokens is None
        sentence = (
            "not comparable with other models, because this model chose the key tokens itself; to compare models, set "
            "key_tokens to the scores folder of one of them"
            if own
            else f"key tokens of {config.key_tokens}: comparable with models scored on the same key tokens"
        )
        return {"suite": self.name, "key_tokens": config.key_tokens, "comparable": not own, "comparability": sentence}


def _half_interval(samples: Sequence[Sample], n: int) -> float | None:
    """Half-width of the mean's 95% interval, from the variation between windows. None for one window."""
    if len(samples) < 2:
        return None
    # Linearized ratio of sums: windows with more key tokens count more.
    mean = sum(one["score"] * one["key_tokens"] for one in samples) / n
    parts: list[float] = [len(samples) * one["key_tokens"] * (one["score"] - mean) / n for one in samples]
    half: float = t_quantile(len(parts) - 1) * stdev(parts) / math.sqrt(len(parts))
    return half


class PlannedLongPPL(PlannedEval):
    def __init__(self, suite: LongPPLSuite, config: LongPPLEval, inputs: PlanInputs) -> None:
        self.suite: LongPPLSuite = suite
        self.config = config
        # The same windows as in the suite perplexity with these settings.
        text = PerplexityEval(suite="perplexity", length=config.length, samples=config.samples, text=config.text)
        self.windows = windows(text, inputs.materials(suite.heldout(config)), seed=inputs.seed)
        self._known = None if config.key_tokens is None else read_key_tokens(config, inputs.root)
        is_asked = bool(config.asked_lengths([config.length], inputs.context))
        if config.cut_to(inputs.context) is not None:
            raise ConfigError("longppl: beyond_context: truncate would drop the long context; use skip or ask.")
        self.units = [
            Unit(planned=self, length=config.length, index=index, tokens=(1 + STRIDES) * config.length)
            for index in range(len(self.windows) if is_asked else 0)
        ]
        limit = inputs.context
        self.beyond_context = {config.length: len(self.windows)} if limit and config.length > limit else {}

    def check(self) -> None:
        if self._known is None:
            return
        missing = [ids for ids in self.windows if prompt_hash(ids) not in self._known]
        if missing:
            raise ConfigError(
                f"longppl: key_tokens {self.config.key_tokens} lacks {len(missing)} of {len(self.windows)} windows; "
                "score its model with the same tokenizer, text, length, samples and seed."
            )

    def prepare(self, unit: Unit) -> np.ndarray:
        return self.windows[unit.index]

    def ask(self, prepared: np.ndarray, backend: Backend) -> tuple[np.ndarray, np.ndarray]:
        """Return (losses from position `short_context` on, positions of key tokens)."""
        short_context = self.config.short
        long = backend.window_losses(prepared)[short_context - 1 :]
        if not np.isfinite(long).all():
            at = int(np.flatnonzero(~np.isfinite(long))[0]) + short_context
            raise DataError(f"longppl: the model's loss at position {at} is not finite; its weights are damaged.")
        if self._known is not None:
            return long, self._known[prompt_hash(prepared)]
        return long, choose_key_tokens(self.config, long, short_losses(backend, prepared, short_context))

    def samples(self, unit: Unit, prepared: np.ndarray, answers: tuple[np.ndarray, np.ndarray]) -> list[Sample]:
        long, positions = answers
        return [
            {
                "suite": self.suite.name,
                "length": unit.length,
                "depth": None,
                "index": unit.index,
                "hash": prompt_hash(prepared),
                "prompt_tokens": len(prepared),
                "score": float(long[positions - self.config.short].mean()) if len(positions) else None,
                "tokens": len(long),
                "key_tokens": len(positions),
                "key_positions": positions.tolist(),
            }
        ]


def samples_file(folder: str, root: Path) -> Path:
    path = root / folder
    path = path / SAMPLES_FILE if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"longppl: key_tokens {folder}: {SAMPLES_FILE} is missing; use a folder that `unspool eval --out` or a "
            "recipe (scores/MODEL) wrote for a model with longppl scores."
        )
    return path


def read_key_tokens(config: LongPPLEval, root: Path) -> Mapping[str, np.ndarray]:
    """Read the key tokens of each window, keyed by the window's hash."""
    path = samples_file(str(config.key_tokens), root)
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            sample = json.loads(line)
            if sample["suite"] == SUITE.name and sample["length"] == config.length:
                found[str(sample["hash"])] = np.array(sample["key_positions"], dtype=np.int64)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: line {number} is not a sample ({error!r}); score its model again.") from error
    if any(len(each) and (each.min() < config.short or each.max() >= config.length) for each in found.values()):
        raise ConfigError(
            f"longppl: key_tokens {config.key_tokens} has positions outside {config.short} to "
            f"{config.length}; score its model with the same short_context and length."
        )
    return found


SUITE = LongPPLSuite(
    name="longppl",
    title="Loss on key tokens (LongPPL)",
    config=LongPPLEval,
    measure="loss",
    is_ratio=True,
    version=1,
    heldout=lambda config: Heldout(config.text, config.samples * config.length),
)
