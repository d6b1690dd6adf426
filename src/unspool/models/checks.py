"""Checks that a model computes what we assume, and access to the parts of a decoder.

Architectures differ in ways that no config field shows. Some have their own masks or rotations, scale logits after the
head, or carry a state from token to token. With our code, such a model would raise no error and compute wrong numbers.
So these checks compare the numbers themselves, on a few tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unspool.core.errors import ConfigError
from unspool.models.loss import read_head

DOC_LEN = 8
# Far above rounding, far below the effect of any of these differences.
TOLERANCE = 1e-2
TOLERANCE_16_BITS = 5e-2
# Size of attention windows during a check: smaller than a test document.
WINDOW = 4
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")


@torch.no_grad()
def check_finite(model: Any, what: str) -> None:
    """Refuse weights with NaN or infinite values. Reads each weight once, on its device, without a copy."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.dtype in _FLOATS}
    if not weights:
        return
    # A sum is not finite if any value is not. One transfer copies all sums from the device.
    sums = torch.stack([weight.sum().float() for weight in weights.values()]).tolist()
    suspects = [name for name, total in zip(weights, sums, strict=True) if not math.isfinite(total)]
    # Sums of finite 16-bit values can overflow.
    counts = {name: int((~weights[name].isfinite()).sum()) for name in suspects}
    bad = [f"{name} ({count} of {weights[name].numel()})" for name, count in counts.items() if count]
    if bad:
        more = f" and {len(bad) - 3} more tensors" if len(bad) > 3 else ""
        raise ConfigError(
            f"{what}: NaN or infinite values in {', '.join(bad[:3])}{more}; its weights are damaged, so download or "
            "train it again."
        )


def check_tokens(model: Any, ids: Iterable[np.ndarray]) -> None:
    """Refuse tokens without an embedding: on a GPU, one such token ends the process."""
    highest, size = max((int(some.max()) for some in ids if len(some)), default=0), num_embeddings(model)
    if highest >= size:
        raise ConfigError(f"the text holds token {highest}, and {no_embedding(size)}")


def num_embeddings(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def no_embedding(size: int) -> str:
    return (
        f"the model has embeddings for 0 to {size - 1} only: its tokenizer has more tokens than the model; use the "
        "tokenizer that the model was trained with."
    )


def check_attention(model: Any, own: str) -> None:
    """Refuse a model whose hidden states with our attention `own` differ from those with eager attention."""
    with short_windows(model):
        ours = last_states(model, (DOC_LEN,))
        model.set_attn_implementation("eager")
        try:
            theirs = last_states(model, (DOC_LEN,))
        finally:
            model.set_attn_implementation(own)
    # `check_trainable` reports models that compute infinite or undefined numbers.
    if bool(theirs.isfinite().all()) and not is_close(ours, theirs):
        raise ConfigError(
            f"{type(model).__name__} needs its own attention masks (in chunks, in both directions or sparse), which is "
            "not supported yet; use another model."
        )


def check_trainable(model: Any) -> None:
    """Refuse a model whose packed documents attend to each other, or whose loss we would compute wrongly."""
    both = last_states(model, (DOC_LEN, DOC_LEN))
    second = last_states(model, (DOC_LEN,), first=DOC_LEN)
    name = type(model).__name__
    if not bool(both.isfinite().all()):
        raise ConfigError(
            f"{name} computes infinite or undefined numbers, so its weights are damaged; download it again."
        )
    if not is_close(both[DOC_LEN:], second):
        raise ConfigError(
            f"{name} carries state from one packed document into the next (like state-space, linear-attention and "
            "convolution layers, or attention without document masks); use another model."
        )
    with torch.no_grad():
        own = model(input_ids=_tokens(model, DOC_LEN, DOC_LEN), use_cache=False).logits[0]
        found = read_head(model).logits(second)
    if not is_close(found, own.float()):
        raise ConfigError(
            f"{name} changes its logits after the head in a way that is not supported yet; use another model."
        )


@torch.no_grad()
def last_states(model: Any, doc_lens: tuple[int, ...], *, first: int = 0) -> Tensor:
    """Return the last hidden states [T, D] of packed test documents, whose tokens are numbered from `first`."""
    tokens = _tokens(model, first, sum(doc_lens))
    positions = torch.cat([torch.arange(doc_len, device=tokens.device) for doc_len in doc_lens])[None]
    states = model.base_model(input_ids=tokens, position_ids=positions, doc_lens=doc_lens, use_cache=False)
    hidden: Tensor = states.last_hidden_state[0]
    return hidden


def is_close(left: Tensor, right: Tensor) -> bool:
    coarse = torch.float32 not in (left.dtype, right.dtype)
    difference = float((left.float() - right.float()).norm())
    return difference <= (TOLERANCE_16_BITS if coarse else TOLERANCE) * float(right.float().norm())


@contextmanager
def short_windows(model: Any) -> Iterator[None]:
    """Inside the context, shrink attention windows and chunks to a few tokens, wherever the model stores their size."""
    holders = {id(holder): holder for holder in (model.config, model.config.get_text_config(), *model.modules())}
    changed = []
    for holder in holders.values():
        for name in _WINDOW_FIELDS:
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
    # Distinct tokens spread over the vocabulary: the stride is prime.
    numbers = torch.arange(first, first + count, device=model.device)
    return torch.remainder(numbers * 7919, int(model.config.vocab_size))[None]


# The parts of a decoder, found by structure, not by model family.


_NUM_PROBE_STATES = 6


def layers_of(model: Any) -> list[nn.Module]:
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(
            f"{type(model).__name__} does not keep its layers in `model.layers`, which memory settings and FP8 need; "
            "remove activation_checkpointing, mlp_tiles, attention_heads_at_once, compile and precision."
        )
    return list(layers)


def attention_of(layer: nn.Module) -> Any:
    """Return the attention module: `self_attn` in nearly all families, else the only child of an Attention class."""
    named = getattr(layer, "self_attn", None)
    found = [named] if named is not None else [part for part in layer.children() if "Attention" in type(part).__name__]
    if len(found) != 1:
        raise ConfigError(
            f"{type(layer).__name__} has {len(found)} attention modules where one is expected; "
            "remove attention_heads_at_once and set activation_checkpointing to none or full."
        )
    return found[0]


@contextmanager
def intercept_attention(model: Any, exchange_of: Callable[[int], Callable[..., Tensor]]) -> Iterator[None]:
    """Inside the context, call `exchange_of(layer)` in place of a layer's kernel, with the kernel as first argument."""
    attentions = [attention_of(layer) for layer in layers_of(model)]
    assert all(getattr(one, "exchange", None) is None for one in attentions), "attention is intercepted already"
    for number, one in enumerate(attentions):
        one.exchange = exchange_of(number)
    try:
        yield
    finally:
        for one in attentions:
            del one.exchange


def tokenwise_modules(model: Any) -> Iterator[nn.Module]:
    """Yield the modules that compute each token separately: norms and MLPs of all layers, and the final norm."""
    for layer in layers_of(model):
        attention = attention_of(layer)
        yield from (part for part in layer.children() if part is not attention and _has_parameters(part))
    for part in model.base_model.children():
        if _has_parameters(part) and all(parameter.dim() == 1 for parameter in part.parameters()):
            yield part


def probe_states(weight: Tensor, hidden_size: int) -> Tensor:
    """Return a few hidden states for testing a module, on the device and in the dtype of `weight`."""
    numbers = torch.arange(_NUM_PROBE_STATES * hidden_size, device=weight.device)
    return (numbers * 0.7).sin().to(weight.dtype).view(1, _NUM_PROBE_STATES, hidden_size)


@torch.no_grad()
def with_weights(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a module to test the code of `module` on: itself, or a copy with random weights if it has none yet.

    A module has no weights while it is on the meta device. The copy is on `device`.
    """
    if not any(parameter.is_meta for parameter in module.parameters()):
        return module
    copy = deepcopy(module).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for tensor in (*copy.parameters(), *copy.buffers()):
        if tensor.dim() > 1 and tensor.is_floating_point():
            tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
        else:
            tensor.fill_(1)
    return copy


@torch.no_grad()
def check_tokenwise(module: nn.Module, hidden_size: int, device: torch.device) -> None:
    """Refuse a module whose result for a token depends on other tokens. A module on the meta device uses `device`."""
    name = type(module).__name__
    if any(isinstance(inner, nn.Dropout) and inner.p > 0 for inner in module.modules()):
        raise ConfigError(f"mlp_tiles: {name} has dropout, which tiles would change; remove mlp_tiles.")
    # The code of its class: a fused `forward` would be compiled for a few tokens.
    run = partial(type(module).forward, with_weights(module, device))
    states = probe_states(next(run.args[0].parameters()), hidden_size)
    whole = run(states)
    if isinstance(whole, Tensor) and whole.shape == states.shape:
        half = _NUM_PROBE_STATES // 2
        halves = torch.cat([run(states[:, :half]), run(states[:, half:])], dim=1)
        if is_close(halves.float(), whole.float()):
            return
    raise ConfigError(
        f"mlp_tiles: {name} does not compute each token separately (or returns more than hidden states), so it cannot "
        "be computed in tiles; remove mlp_tiles."
    )


def _has_parameters(part: nn.Module) -> bool:
    return not isinstance(part, nn.ModuleList) and next(part.parameters(), None) is not None
