"""The model that scores documents for `score` of a dataset, and the folders of its scores."""

import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from unspool.core.artifacts import digest
from unspool.core.errors import ConfigError, DataError
from unspool.core.sizes import format_size
from unspool.data.corpus.in_memory import build_from_records
from unspool.data.document_scores import read_scores, score_documents
from unspool.data.packing.config import DatasetConfig
from unspool.data.strategies.long_context_gain import LongContextGain
from unspool.evals.backends.base import Backend, BackendOptions, build_backend, claimed_context
from unspool.models.location import model_path
from unspool.recipe.schema import Recipe

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


def scorer_ref(config: LongContextGain, recipe: Recipe) -> str:
    """Return the model that scores, as the recipe spells it."""
    ref = config.model or recipe.model
    assert isinstance(ref, str), "the recipe's check refuses a new model"
    return ref


def check_scorer(config: LongContextGain, ref: str, tokenizer: Any, *, place: str) -> None:
    """Reject a model that cannot score this text: another vocabulary, or a context shorter than `long`."""
    from unspool.models.tokenizer import load_tokenizer  # import late: it loads transformers

    limit = claimed_context(ref)
    if limit is not None and config.long > limit.tokens:
        raise ConfigError(
            f"{place}.long is {format_size(config.long)}, but {config.model or ref} reads at most "
            f"{format_size(limit.tokens)} ({limit.source}); set {place}.long: {format_size(limit.tokens)} or less, or "
            f"give {place}.model with a longer context."
        )
    if load_tokenizer(ref).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{place}.model {config.model or ref} has another vocabulary than the text's tokenizer; give a model of "
            "the same family, such as the smallest one, or the model itself."
        )


def long_context_gains(
    data: Iterable[Any],
    model: str,
    *,
    long: int | str,
    short: int | str,
    tokenizer: Any = None,
    device: str = "auto",
) -> np.ndarray:
    """Score texts by what long context adds to their prediction (LongFilter), to choose those to train on.

    A token's gain is p · (short loss − long loss): its losses in nats with at most `short` and at most `long` tokens of
    context, and its probability p with long context. The gain of a text is the mean over its tokens.

    Args:
        data: Texts, lists of token ids, or conversations.
        model: The model that scores: a folder, Hub id or asset:NAME. A small one is enough.
        long: Long context in tokens, such as `"32K"`.
        short: Short context in tokens. Texts of at most this length have gain 0.
        tokenizer: The tokenizer of the model to train; by default the one of `model`.
        device: `auto`, `cpu` or `cuda`.

    Returns:
        float64 [texts]: the gain of each text, in nats per token.

    Raises:
        ConfigError: The model has another vocabulary or a shorter context.
        DataError: A text is empty.

    Example:
        >>> import unspool
        >>> texts = ["The ship went on. " * 40, "A whale."]
        >>> gains = unspool.long_context_gains(texts, "asset:tiny-base", long=128, short=32, device="cpu")
        >>> len(gains), float(gains[1])
        (2, 0.0)
    """
    from unspool.models.tokenizer import load_tokenizer  # import late: it loads transformers

    ref = model_path(model, Path())
    try:
        config = LongContextGain.model_validate({"model": model, "long": long, "short": short})
        config.check_lengths()
    except ValueError as error:
        raise ConfigError(f"long_context_gains: {value_problem(error)}.") from error
    scorer = ModelScorer(ref, device)
    tokenizer = tokenizer or load_tokenizer(ref)
    check_scorer(config, ref, tokenizer, place="long_context_gains")
    records = list(data)
    with tempfile.TemporaryDirectory(prefix="unspool-") as scratch:
        corpus, scores = Path(scratch, "texts"), Path(scratch, "scores")
        build_from_records(records, corpus, tokenizer=tokenizer, text="text", name="texts")
        score_documents(config, corpus, scores, scorer=scorer)
        gains = np.array(read_scores(scores).gains)
    if len(gains) != len(records):
        raise DataError(f"long_context_gains: {len(records) - len(gains)} texts are empty; remove them.")
    return gains


def value_problem(error: ValueError) -> str:
    """Return the text of a ValueError or of the first problem of a pydantic one."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))} {first['msg']}".replace("Value error, ", "").strip()


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
