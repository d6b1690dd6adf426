"""Short passes that show whether a model is what we take it for.

Architectures differ in ways that no field of a config names: masks of their own, logits scaled after the head,
layers that carry a state from token to token, heads rotated otherwise. Computed our way such a model raises no error
and is only wrong, so the numbers themselves are compared, on a handful of tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unspool.core.errors import ConfigError
from unspool.models.loss import read_head

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


# The parts of a decoder that memory settings work on, found by construction and not by family.


_TRIED_TOKENS = 6


def layers_of(model: Any) -> list[nn.Module]:
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(
            f"{type(model).__name__} keeps its layers elsewhere than other decoders do, which memory settings cannot "
            "follow; leave activation_checkpointing, mlp_tiles, attention_heads_at_once and compile out."
        )
    return list(layers)


def attention_of(layer: nn.Module) -> Any:
    """The module that attends: `self_attn` in nearly all families, else the only child that is called attention."""
    named = getattr(layer, "self_attn", None)
    found = [named] if named is not None else [part for part in layer.children() if "Attention" in type(part).__name__]
    if len(found) != 1:
        raise ConfigError(
            f"{type(layer).__name__} has {len(found)} attention modules where one is expected; "
            "leave attention_heads_at_once out and use activation_checkpointing none or full."
        )
    return found[0]


@contextmanager
def stand_between(model: Any, exchange_of: Callable[[int], Callable[..., Tensor]]) -> Iterator[None]:
    """Within this, `exchange_of(layer)` stands between a layer's attention and its kernel (attention.py)."""
    attentions = [attention_of(layer) for layer in layers_of(model)]
    assert all(getattr(one, "exchange", None) is None for one in attentions), "rows lie on several devices"
    for number, one in enumerate(attentions):
        one.exchange = exchange_of(number)
    try:
        yield
    finally:
        for one in attentions:
            del one.exchange


def token_parts(model: Any) -> Iterator[nn.Module]:
    """Norms and MLPs of all layers and the norm after the last: what computes each token by itself."""
    for layer in layers_of(model):
        attention = attention_of(layer)
        yield from (part for part in layer.children() if part is not attention and _has_parameters(part))
    for part in model.base_model.children():
        if _has_parameters(part) and all(parameter.dim() == 1 for parameter in part.parameters()):
            yield part


def tried_tokens(weight: Tensor, hidden_size: int) -> Tensor:
    """A few hidden states to try a part of a model on, where and in what `weight` is."""
    numbers = torch.arange(_TRIED_TOKENS * hidden_size, device=weight.device)
    return (numbers * 0.7).sin().to(weight.dtype).view(1, _TRIED_TOKENS, hidden_size)


@torch.no_grad()
def check_token_part(part: nn.Module, hidden_size: int) -> None:
    """Refuse a module that gives another result for some of the tokens than for all of them."""
    name = type(part).__name__
    if any(isinstance(inner, nn.Dropout) and inner.p > 0 for inner in part.modules()):
        raise ConfigError(f"mlp_tiles: {name} has dropout, which would fall otherwise in tiles; leave mlp_tiles out.")
    tokens = tried_tokens(next(part.parameters()), hidden_size)
    whole = part(tokens)
    if isinstance(whole, Tensor) and whole.shape == tokens.shape:
        half = _TRIED_TOKENS // 2
        halves = torch.cat([part(tokens[:, :half]), part(tokens[:, half:])], dim=1)
        if alike(halves.float(), whole.float()):
            return
    raise ConfigError(
        f"mlp_tiles: {name} does not compute each token by itself (or returns more than hidden states), "
        "so that it cannot be computed in tiles; leave mlp_tiles out."
    )


def _has_parameters(part: nn.Module) -> bool:
    return not isinstance(part, nn.ModuleList) and next(part.parameters(), None) is not None
