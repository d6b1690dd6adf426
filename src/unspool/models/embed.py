"""Vectors of texts: the mean of a model's last hidden states.

In: token arrays of some tokenizer. Out: float32[n, d], a vector for each.
Promise: safetensors only, no remote code; a text's vector does not depend on the texts beside it, up to rounding.
A model with another vocabulary gets the text decoded and tokenised its own way; one that knows the ids gets them
as they are. Texts beyond the model's context are cut.
Elsewhere: what is done with the vectors (data/embeddings.py).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModel

from unspool.core.errors import ConfigError
from unspool.models.load import model_digest
from unspool.models.tokenizer import first_line, load_tokenizer, location, quiet

# Texts that go through the model together.
_AT_ONCE = 16


class Embedder:
    """Makes vectors when called. The model is loaded at the first call, as rows that are up to date need none."""

    def __init__(self, ref: str, *, tokenizer: Any, device: torch.device) -> None:
        """`tokenizer` is the one of the token arrays."""
        self._ref = ref
        self._tokenizer = tokenizer
        self._device = device

    def __call__(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        vectors = [self._mean_states(texts[start : start + _AT_ONCE]) for start in range(0, len(texts), _AT_ONCE)]
        return np.concatenate(vectors)

    @cached_property
    def digest(self) -> str:
        return model_digest(self._ref)

    @torch.inference_mode()
    def _mean_states(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        rows = self._ids(texts)
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros(len(rows), longest, dtype=torch.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        sums = (states * mask[:, :, None]).sum(dim=1)
        vectors: np.ndarray = (sums / mask.sum(dim=1, keepdim=True)).cpu().numpy()
        return vectors

    def _ids(self, texts: Sequence[np.ndarray]) -> list[list[int]]:
        most = getattr(self._model.config, "max_position_embeddings", None)
        rows: list[list[int]] = [text[:most].tolist() for text in texts]
        if self._own_tokenizer is None:
            return rows
        plain = [self._tokenizer.decode(text.tolist(), skip_special_tokens=True) for text in texts]
        encoded = self._own_tokenizer(plain, truncation=most is not None, max_length=most)
        # A text of nothing but special tokens would leave nothing to take the mean of.
        return [row or [0] for row in encoded["input_ids"]]

    @cached_property
    def _own_tokenizer(self) -> Any:
        """The model's tokenizer, or None if it is the one of the token arrays."""
        own = load_tokenizer(self._ref)
        return None if own.get_vocab() == self._tokenizer.get_vocab() else own

    @cached_property
    def _model(self) -> Any:
        quiet()
        try:
            model, loading = AutoModel.from_pretrained(
                **location(self._ref),
                dtype=torch.float32,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, ImportError, SafetensorError) as error:
            raise ConfigError(f"nextlong.model {self._ref}: could not be loaded ({first_line(error)}).") from error
        if loading["missing_keys"]:
            missing = ", ".join(sorted(loading["missing_keys"])[:3])
            raise ConfigError(f"nextlong.model {self._ref}: its files lack weights ({missing}, …); get it again.")
        return model.to(self._device).eval()
