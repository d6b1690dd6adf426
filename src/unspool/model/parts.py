"""The parts of a decoder that memory settings work on, found by construction and not by family.

A layer of a `transformers` decoder is one attention module and modules that look at one token at a time: norms, the
MLP or a mixture of experts. Whether the latter really do is tried on a few tokens, so a new family costs nothing and
one that is built otherwise is refused instead of computed wrongly.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unspool.base.errors import ConfigError
from unspool.model.trial import alike

_TRIED_TOKENS = 6


def layers_of(model: Any) -> list[nn.Module]:
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(
            f"{type(model).__name__} keeps its layers elsewhere than other decoders do, which memory settings cannot "
            "follow; leave recompute, mlp_tiles, attention_heads_at_once and compile out."
        )
    return list(layers)


def attention_of(layer: nn.Module) -> Any:
    """The module that attends: `self_attn` in nearly all families, else the only child that is called attention."""
    named = getattr(layer, "self_attn", None)
    found = [named] if named is not None else [part for part in layer.children() if "Attention" in type(part).__name__]
    if len(found) != 1:
        raise ConfigError(
            f"{type(layer).__name__} has {len(found)} attention modules where one is expected; "
            "leave attention_heads_at_once out and use recompute none or full."
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
