"""Short passes that show whether a model is what training takes it for.

Architectures differ in ways that no field of a config names: logits scaled after the head, layers that carry
a state from token to token, heads rotated otherwise. Computed our way such a model raises no error
and is only wrong, so the numbers themselves are compared, on a handful of tokens.
"""

from typing import Any

import torch
from torch import Tensor

from unspool.base.errors import ConfigError

DOC_LEN = 8
# Far above rounding in fp32, far below what any of these differences does.
TOLERANCE = 1e-2


def check_trainable(model: Any) -> None:
    """Refuse a model whose packed documents would leak or whose loss the head's weight alone does not give."""
    both = last_states(model, (DOC_LEN, DOC_LEN))
    second = last_states(model, (DOC_LEN,), first=DOC_LEN)
    name = type(model).__name__
    if not bool(both.isfinite().all()):
        raise ConfigError(f"{name} computes infinite or undefined numbers; its weights are damaged, get it again.")
    if not alike(both[DOC_LEN:], second):
        raise ConfigError(
            f"{name} carries something from one packed document into the next, besides attention (as state-space, "
            "linear-attention and convolution layers do); use a model with attention in every layer."
        )
    with torch.no_grad():
        own = model(input_ids=_tokens(model, DOC_LEN, DOC_LEN), use_cache=False).logits[0]
        plain = second @ model.get_output_embeddings().weight.t()
    if not alike(plain, own):
        raise ConfigError(
            f"{name} scales, caps or shifts its logits after the head, which the loss cannot follow yet; "
            "use another model."
        )


@torch.no_grad()
def last_states(model: Any, doc_lens: tuple[int, ...], *, first: int = 0) -> Tensor:
    """The last hidden states [T, D] of packed trial documents, tokens counted from `first` on."""
    tokens = _tokens(model, first, sum(doc_lens))
    positions = torch.cat([torch.arange(doc_len, device=tokens.device) for doc_len in doc_lens])[None]
    states = model.base_model(input_ids=tokens, position_ids=positions, doc_lens=doc_lens, use_cache=False)
    hidden: Tensor = states.last_hidden_state[0]
    return hidden


def alike(left: Tensor, right: Tensor) -> bool:
    return float((left - right).norm()) <= TOLERANCE * float(right.norm())


def _tokens(model: Any, first: int, count: int) -> Tensor:
    # Spread over the vocabulary and all different, by a step that is prime.
    numbers = torch.arange(first, first + count, device=model.device)
    return torch.remainder(numbers * 7919, int(model.config.vocab_size))[None]
