"""The model that scores documents for `score` of a dataset, and the folders of its scores."""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from unspool.core.artifacts import digest
from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size
from unspool.data.document_scores import score_documents
from unspool.data.packing.config import DatasetConfig
from unspool.data.strategies.long_context_gain import LongContextGain
from unspool.evals.backends.base import Backend, BackendOptions, build_backend, claimed_context

SCORES = "document_scores"  # folder of a run, beside `corpus`


class ModelScorer:
    """A local model as a `Scorer`. Its weights are loaded at the first document, and not for scores up to date."""

    def __init__(self, ref: str, device: Any = "auto") -> None:
        from unspool.models.extend import pick_device, pick_dtype  # import late: these load torch

        target = pick_device(device)
        self._options = BackendOptions(model=ref, device=target, dtype=pick_dtype(None, target))

    @cached_property
    def _backend(self) -> Backend:
        return build_backend(self._options)

    @cached_property
    def digest(self) -> str:
        # bf16 and fp32 give different losses, so scores of two machines are not mixed.
        return digest([self._options.identity, str(self._options.dtype)])

    def losses(self, tokens: np.ndarray) -> np.ndarray:
        return self._backend.window_losses(tokens)


def check_scorer(config: LongContextGain, ref: str, tokenizer: Any, *, place: str) -> None:
    """Reject a model that cannot score this text: another vocabulary, or a context shorter than `long`."""
    from unspool.models.tokenizer import load_tokenizer  # import late: it loads transformers

    limit = claimed_context(ref)
    if limit is not None and config.long > limit.tokens:
        raise ConfigError(
            f"{place}.long is {format_size(config.long)}, but {config.model} reads at most "
            f"{format_size(limit.tokens)} ({limit.source}); set {place}.long: {format_size(limit.tokens)} or less, or "
            f"give {place}.model with a longer context."
        )
    if load_tokenizer(ref).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{place}.model {config.model} has another vocabulary than the text's tokenizer; give a model of the same "
            "family, such as the smallest one, or the model itself."
        )


def score_sources(
    dataset: DatasetConfig,
    corpora: Mapping[str, Path],
    *,
    scorer: ModelScorer,
    build: Callable[[str, Callable[[Path], Any]], Path],
) -> dict[str, Path]:
    """Score the documents of a dataset's sources; return the folder of each. `build` runs a step for a folder."""
    config = dataset.score
    assert config is not None

    def step(source: str) -> Callable[[Path], Any]:
        return lambda folder: score_documents(config, corpora[source], folder, scorer=scorer)

    return {source: build(source, step(source)) for source in config.scored_sources(dataset)}
