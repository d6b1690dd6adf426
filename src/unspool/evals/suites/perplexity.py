"""Loss by position on held-out text.

In: documents, a model. Out: windows of equal length; the loss of every token.
Promise: windows do not overlap and none crosses from one document into another, so that more
context always means more of the same text. No [tokens, vocabulary] tensor ever exists.
Elsewhere: means over ranges of positions (model/buckets.py).
"""

from typing import Any

import numpy as np
import torch

from unspool.core.errors import ConfigError, DataError
from unspool.core.rng import rng_for
from unspool.evals.config import PerplexityEval
from unspool.evals.prompts import Materials, encode, opening_ids
from unspool.models.loss import read_head, token_losses

# Positions whose logits exist at one time.
HEAD_CHUNK = 1024


def windows(config: PerplexityEval, materials: Materials, *, seed: int) -> list[np.ndarray]:
    """Up to `config.samples` windows of exactly `config.length` tokens."""
    opening = opening_ids(materials.tokenizer)
    body = config.length - len(opening)
    if body < 2:
        raise ConfigError(f"perplexity: length {config.length} leaves no token to predict; use at least 64.")
    rng = rng_for(seed, "loss", config.length)
    found: list[np.ndarray] = []
    longest = 0
    for text in materials.documents:
        ids = encode(materials.tokenizer, text)
        longest = max(longest, len(ids))
        if len(ids) >= body:
            # What no window covers is left out at the start, so that windows do not always begin with it.
            first = int(rng.integers(len(ids) % body + 1))
            found += np.split(ids[first : first + len(ids) // body * body], len(ids) // body)
    if not found:
        raise DataError(
            f"perplexity: no document of the held-out text has {config.length} tokens (the longest has {longest}). "
            "Use a shorter length, give longer documents as text (`--text` of unspool eval), or leave perplexity out."
        )
    chosen = rng.permutation(len(found))[: config.samples]
    return [np.concatenate([opening, found[at]]) for at in chosen]


@torch.inference_mode()
def window_losses(model: Any, ids: np.ndarray) -> np.ndarray:
    """−log p of every token but the first, in nats: float64 [len(ids) − 1]."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    _check_head(model, tokens[:, :8])
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    hidden = model.base_model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state[0, :-1]
    losses = token_losses(hidden, read_head(model), tokens[0, 1:], chunk=HEAD_CHUNK)
    return losses.double().cpu().numpy()


def _check_head(model: Any, tokens: torch.Tensor) -> None:
    """Some architectures change the logits after their head in ways that no config names."""
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, -1:]
    plain = read_head(model).logits(hidden)
    own = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits.float()
    if not torch.allclose(plain, own, rtol=1e-2, atol=1e-2):
        raise ConfigError(
            f"perplexity: {type(model).__name__} changes its logits after the head, which this suite cannot follow "
            "yet. "
            "Leave it out."
        )
