"""Operators between the matrix products, fused: norms, rotations, the gate of an MLP.

In: a decoder of any family. Out: the same model, whose parts call compiled functions.
Promise: results change by no more than rounding; what is compiled sees tensors only, so that it is compiled once for
all layers and few lengths, and lies inside of what memory settings wrap.
Price: some seconds of compiling. Matrix products and attention stay outside: theirs are kernels already, a recomputed
layer can then stop before its last product, and attention is given the lengths of documents, which always differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from unspool.models.checks import alike, attention_of, layers_of, token_parts, tried_tokens

# What `transformers` calls the rotation of queries and keys in every family that has RoPE.
ROTATE = "apply_rotary_pos_emb"
# From how much reading on, in parameters × tokens, compiling pays: at the shape of Llama-3-8B fused parts save 0.5 s of
# reading 128K tokens (8.0e9 × 131,072 = 1.05e15), compiling takes some 15 s, and 15 / 0.5 × 1.05e15 = 3.2e16.
PAYS_FROM = 3.2e16
# Fewer tokens than this in one pass are written and not read: time goes into launches and weights.
READ_FROM = 512


def fuse_parts(model: Any, *, least_tokens: int | None = None) -> None:
    """Change `model` in place; once, before its memory settings.

    Training has rows of few lengths. Where lengths are many, `least_tokens` lets one kernel stand for all of them from
    there on, and leaves passes of fewer tokens to the code as it was, so that these are not compiled for.
    """
    gates: dict[str, Gate] = {}
    for part in token_parts(model):
        if not _fuse_gate(part, gates, model.config.hidden_size, least_tokens):
            part.forward = _compiled(part.forward, least_tokens)
    for layer in layers_of(model):
        _fuse_rotation(attention_of(layer), least_tokens)


def pays_to_fuse(model: Any, tokens: int) -> bool:
    """Whether reading so many tokens takes so much longer unfused that compiling is worth its time."""
    return bool(model.device.type == "cuda" and tokens * model.num_parameters() >= PAYS_FROM)


def fuse_for_reading(model: Any) -> None:
    """For prompts of many lengths, in inference mode too; tokens that are written one by one are left alone."""
    fuse_parts(model, least_tokens=READ_FROM)


@dataclass(frozen=True)
class Gate:
    """An activation, which has no weights, and the kernel made of it: one for all layers."""

    act: Callable[[Tensor], Tensor]
    compiled: Callable[[Tensor, Tensor], Tensor]


def _compiled(
    function: Callable[..., Any], least_tokens: int | None, *, plain: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """`function` of tensors whose last dimension but one counts tokens; with fewer of these, `plain` or itself."""
    fused: Callable[..., Any] = torch.compile(function)
    if least_tokens is None:
        return fused
    as_it_was = plain or function

    def by_count(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if given[0].shape[-2] < least_tokens:
            return as_it_was(*args, **kwargs)
        for each in given:
            if isinstance(each, Tensor) and each.dim() > 1:
                # Without being told, the first length would be compiled for by itself.
                torch._dynamo.maybe_mark_dynamic(each, each.dim() - 2)
        return fused(*args, **kwargs)

    return by_count


def _fuse_gate(part: Any, gates: dict[str, Gate], hidden_size: int, least_tokens: int | None = None) -> bool:
    """Whether `part` is an MLP with a gate, as nearly all are, and now computes that in one kernel."""
    if not all(isinstance(getattr(part, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")):
        return False
    act = getattr(part, "act_fn", None)
    if not callable(act):
        return False
    if repr(act) not in gates:
        gates[repr(act)] = Gate(act, _compiled(lambda gate, up: act(gate) * up, least_tokens))
    gate = gates[repr(act)]

    def plain(hidden: Tensor) -> Tensor:
        out: Tensor = part.down_proj(gate.act(part.gate_proj(hidden)) * part.up_proj(hidden))
        return out

    def gated(hidden: Tensor) -> Tensor:
        out: Tensor = part.down_proj(gate.compiled(part.gate_proj(hidden), part.up_proj(hidden)))
        return out

    if not _same(part.forward, plain, part.down_proj.weight, hidden_size):
        return False
    part.forward = gated
    return True


@torch.no_grad()
def _same(one: Callable[[Tensor], Any], other: Callable[[Tensor], Tensor], weight: Tensor, hidden_size: int) -> bool:
    tokens = tried_tokens(weight, hidden_size)
    found = one(tokens)
    return isinstance(found, Tensor) and alike(found.float(), other(tokens).float())


def _fuse_rotation(attention: Any, least_tokens: int | None = None) -> None:
    """Let this module's `forward` call a compiled `apply_rotary_pos_emb`.

    Its code is run with other globals instead of changing the module of `transformers`, which other models use too.
    """
    function = getattr(attention.forward, "__func__", None)
    rotate = getattr(function, "__globals__", {}).get(ROTATE)
    if not isinstance(function, FunctionType) or rotate is None or ROTATE not in function.__code__.co_names:
        return
    compiled = function.__globals__ | {ROTATE: _compiled_rotation(rotate, least_tokens)}
    again = FunctionType(function.__code__, compiled, function.__name__, function.__defaults__, function.__closure__)
    again.__kwdefaults__ = function.__kwdefaults__
    attention.forward = MethodType(again, attention)


@cache
def _compiled_rotation(rotate: Any, least_tokens: int | None = None) -> Any:
    """Once for all layers. Laid out by token, as attention kernels take and return it without a copy.

    Tables are fp32 and so are the products with them; attention would round them to the model's dtype.
    """

    def by_token(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        turned = rotate(query, key, *args, **kwargs)
        return tuple(each.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2) for each in turned)

    return _compiled(by_token, least_tokens, plain=rotate)


# A model that computes in bf16, its positions still in fp32.


def exact_fp32() -> None:
    """Products of fp32 are fp32, whatever the environment says (NVIDIA's containers turn TF32 on).

    TF32 has 11 bits, and `transformers` up to 5.18 multiplies frequencies by positions in a matrix product: from
    position 2,048 on, neighbours would get one position.
    """
    torch.set_float32_matmul_precision("highest")


def compute_in_bf16(model: Any) -> None:
    keep_tables(model)
    cast_parameters(model, torch.bfloat16)


def cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Parameters and not buffers, as `transformers` loads a model in `dtype`."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def keep_tables(model: Any) -> None:
    """Positions stay fp32 in a model of bf16: `transformers` rounds their tables to the dtype of what it is shown."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is not None and any(name.endswith("inv_freq") for name, _ in rotary.named_buffers()):
        rotary.register_forward_pre_hook(_shown_fp32)


def _shown_fp32(rotary: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].new_empty(0, dtype=torch.float32), *args[1:])
