"""Measure the bytes that are alive while the trainer's own code runs a step of a small model.

On a CPU in bf16, so that sizes are those of a GPU. There is no compiler here, so fused kernels are stood in for by
functions that do as they do: keep their inputs, give their results, and need no room for anything between.
"""

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from factory import build_model
from training.parallel.cases import random_row
from unspool.models.fp8.linear import use_fp8
from unspool.models.fuse import _compiled_rotation, fuse_parts
from unspool.models.memory import kept
from unspool.models.memory.checkpointing import apply_memory
from unspool.planning.cost import Shape
from unspool.training.config import StageConfig
from unspool.training.loader import build_step
from unspool.training.optim.updater import build_updater
from unspool.training.step import train_step

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": 4096,
}
# Of a chunk of logits, and of what a fused kernel works on.
TOKENS_AT_ONCE = 32


class Alive(TorchDispatchMode):
    """Adds up the memory of tensors that are made under it, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.found: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if not isinstance(leaf, Tensor):
                continue
            key = leaf.untyped_storage()._cdata
            if key not in known and key not in self.found:
                self.found[key] = leaf.untyped_storage().nbytes()
                self.bytes += self.found[key]
                weakref.finalize(leaf.untyped_storage(), self._gone, key)
        self.peak = max(self.peak, self.bytes)
        return out

    def _gone(self, key: int) -> None:
        self.bytes -= self.found.pop(key)


def shape_of(model: Any) -> Shape:
    config = model.config
    return Shape(
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
        tied=config.tie_word_embeddings,
    )


class _Fused(torch.autograd.Function):
    """A function of tokens, a few of them at a time: what a fused kernel needs between in- and output is nothing."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.function, ctx.wanted = function, ctx.needs_input_grad[1:]
        # A rotation is linear: its gradient needs the tables only, which are no matter of heads.
        ctx.save_for_backward(*(_nothing(one) if one.dim() == 4 else one for one in tensors))
        return _in_pieces(function, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensors, wanted = ctx.saved_tensors, ctx.wanted
        outs: list[Tensor | None] = [
            _by_token(one.shape, one) if want else None for one, want in zip(tensors, wanted, strict=True)
        ]
        for start in range(0, grads[0].shape[-2], TOKENS_AT_ONCE):
            cut = [
                _cut(tensor.detach(), start).requires_grad_(want) for tensor, want in zip(tensors, wanted, strict=True)
            ]
            with torch.enable_grad():
                made = ctx.function(*cut)
            made = made if isinstance(made, tuple) else (made,)
            inputs = [one for one, want in zip(cut, wanted, strict=True) if want]
            found = iter(torch.autograd.grad(made, inputs, [_cut(grad, start) for grad in grads]))
            for out in (one for one in outs if one is not None):
                _cut(out, start).add_(next(found))
        return None, *outs


def _nothing(tensor: Tensor) -> Tensor:
    """Zeros of the same shape that take no memory."""
    return tensor.new_zeros(()).expand(tensor.shape)


def _cut(tensor: Tensor, start: int) -> Tensor:
    """Some tokens; weights have none."""
    return tensor if tensor.dim() < 2 else tensor[..., start : start + TOKENS_AT_ONCE, :]


def _in_pieces(function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Any:
    length = max(tensor.shape[-2] for tensor in tensors if tensor.dim() > 1)
    outs: list[Tensor] = []
    single = False
    for start in range(0, length, TOKENS_AT_ONCE):
        made = function(*(_cut(tensor, start) for tensor in tensors))
        single = isinstance(made, Tensor)
        made = (made,) if single else made
        if not outs:
            outs = [_by_token((*one.shape[:-2], length, one.shape[-1]), one) for one in made]
        for out, one in zip(outs, made, strict=True):
            _cut(out, start).copy_(one)
    return outs[0] if single else tuple(outs)


def _by_token(shape: Any, like: Tensor) -> Tensor:
    """Laid out as kernels want it, and as fuse.py does: all heads of a token together."""
    if len(shape) != 4:
        return like.new_zeros(shape)
    batch, heads, tokens, size = shape
    return like.new_zeros((batch, tokens, heads, size)).transpose(1, 2)


def _stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    """In place of torch.compile."""
    module = getattr(function, "__self__", None)

    def fused(*tensors: Tensor, **kwargs: Any) -> Any:
        if module is None:
            return _Fused.apply(lambda *some: function(*some, **kwargs), *tensors)
        name, weight = next(iter(module.named_parameters()))

        def with_weight(hidden: Tensor, weight: Tensor) -> Any:
            return torch.func.functional_call(_Plain(module), {f"module.{name}": weight}, (hidden,))

        return _Fused.apply(with_weight, tensors[0], weight)

    return fused


class _Plain(torch.nn.Module):
    """A norm as its class computes it, even if its `forward` is replaced."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden: Tensor) -> Any:
        return type(self.module).forward(self.module, hidden)


def tracked_peak(changes: dict[str, Any], *, tokens: int, rows: int = 1, **shape: Any) -> tuple[int, Shape]:
    """Bytes alive at the fullest moment of a step: those of the model and optimizer, and what the step makes."""
    model = build_model(**SMALL | shape).train()
    settings = {"name": "one", "context_length": tokens, "mix": {"long": 1.0}, "tokens": tokens * rows, "lr": 1e-3}
    stage = StageConfig.model_validate(settings | {"batch_tokens": tokens * rows} | changes)
    updater = build_updater(stage, model)
    if stage.compile:
        _compiled_rotation.cache_clear()
        with patch("torch.compile", _stand_in):
            fuse_parts(model)
    if stage.precision == "fp8":
        use_fp8(model)
    apply_memory(model, stage.memory)
    data: Any = {"long": [random_row((tokens,), number) for number in range(rows)]}
    work = build_step(stage, data, [[("long", number)] for number in range(rows)])
    train_step(model, updater, work, lr=stage.lr)  # the first makes what stays
    static = {id(one.untyped_storage()): one.untyped_storage().nbytes() for one in _all(model, updater)}
    # Small chunks of logits: a CPU's take other room than a GPU's.
    # And no room for the update: on a GPU it is one kernel.
    at_once = patch("unspool.models.loss.CPU_CHUNK", TOKENS_AT_ONCE)
    update = patch("unspool.training.optim.adamw.update_by_operators", lambda *_: None)
    with at_once, update, Alive() as alive:
        train_step(model, updater, work, lr=stage.lr)
    _compiled_rotation.cache_clear()
    assert kept._mode.get() is None
    return sum(static.values()) + alive.peak, shape_of(model)


def _all(model: Any, updater: Any) -> list[Tensor]:
    moments: list[Tensor] = []
    for param in updater._params:
        moments.append(param.weight)
        for moment in (param.state.first, param.state.second):
            moments += [moment] if isinstance(moment, Tensor) else [moment.codes, moment.scales]
    return [*model.parameters(), *model.buffers(), *moments]
