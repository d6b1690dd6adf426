"""Short passes that show whether a model is what we take it for.

Architectures differ in ways that no field of a config names: masks of their own, logits scaled after the head,
layers that carry a state from token to token, heads rotated otherwise. Computed our way such a model raises no error
and is only wrong, so the numbers themselves are compared, on a handful of tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unspool.base.errors import ConfigError
from unspool.model.head import read_head

DOC_LEN = 8
# Far above rounding, far below what any of these differences does.
TOLERANCE = 1e-2
TOLERANCE_16_BITS = 5e-2
# What attention windows are made for the trial, so that a document reaches beyond them.
WINDOW = 4
_WINDOWS = ("sliding_window", "attention_chunk_size")


def check_attention(model: Any, own: str) -> None:
    """Refuse a model whose layers attend otherwise with our attention `own` than with that of `transformers`."""
    with _short_windows(model):
        ours = last_states(model, (DOC_LEN,))
        model.set_attn_implementation("eager")
        try:
            theirs = last_states(model, (DOC_LEN,))
        finally:
            model.set_attn_implementation(own)
    # Weights that make no finite numbers are told of by `check_trainable`.
    if bool(theirs.isfinite().all()) and not alike(ours, theirs):
        raise ConfigError(
            f"{type(model).__name__} attends in a way that only masks of its own express (in chunks, in both "
            "directions or sparsely), which is not supported yet; use another model."
        )


def check_trainable(model: Any) -> None:
    """Refuse a model whose packed documents would leak or whose loss the head's weight alone does not give."""
    both = last_states(model, (DOC_LEN, DOC_LEN))
    second = last_states(model, (DOC_LEN,), first=DOC_LEN)
    name = type(model).__name__
    if not bool(both.isfinite().all()):
        raise ConfigError(f"{name} computes infinite or undefined numbers; its weights are damaged, get it again.")
    if not alike(both[DOC_LEN:], second):
        raise ConfigError(
            f"{name} carries something from one packed document into the next (as state-space, linear-attention and "
            "convolution layers do, and attention that is not told where documents end); use another model."
        )
    with torch.no_grad():
        own = model(input_ids=_tokens(model, DOC_LEN, DOC_LEN), use_cache=False).logits[0]
        found = read_head(model).logits(second)
    if not alike(found, own.float()):
        raise ConfigError(
            f"{name} changes its logits after the head in a way that the loss cannot follow yet; use another model."
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
    coarse = torch.float32 not in (left.dtype, right.dtype)
    difference = float((left.float() - right.float()).norm())
    return difference <= (TOLERANCE_16_BITS if coarse else TOLERANCE) * float(right.float().norm())


@contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Windows and chunks of attention of a few tokens, wherever the model keeps their size."""
    holders = {id(holder): holder for holder in (model.config, model.config.get_text_config(), *model.modules())}
    changed = []
    for holder in holders.values():
        for name in _WINDOWS:
            size = getattr(holder, name, None)
            if isinstance(size, int) and size > WINDOW:
                changed.append((holder, name, size))
                setattr(holder, name, WINDOW)
    try:
        yield
    finally:
        for holder, name, size in changed:
            setattr(holder, name, size)


def _tokens(model: Any, first: int, count: int) -> Tensor:
    # Spread over the vocabulary and all different, by a step that is prime.
    numbers = torch.arange(first, first + count, device=model.device)
    return torch.remainder(numbers * 7919, int(model.config.vocab_size))[None]
