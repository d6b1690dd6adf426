"""Fused operators between the matrix products (norms, rotations, MLP gates), and mixed precision.

Results change only by rounding. Compiled functions take only tensors, so each is compiled once for all layers, and for
few lengths. They are inside the regions that memory settings wrap. Matrix products and attention are not compiled. They
are kernels already, a recomputed layer can stop before its last product, and attention depends on document lengths,
which always differ. Compiling takes some seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from unspool.models.checks import attention_of, is_close, layers_of, probe_states, tokenwise_modules, with_weights

# Name of the function in `transformers` that rotates queries and keys, the same in every family with RoPE.
ROTATE = "apply_rotary_pos_emb"
# Parameters × prompt tokens above which compiling saves time. At the shape of Llama-3-8B fused operators save 0.5 s per
# 128K tokens (8.0e9 × 131,072 = 1.05e15), compiling takes about 15 s, and 15 / 0.5 × 1.05e15 = 3.2e16.
PAYS_FROM = 3.2e16
# In passes of fewer tokens, kernel launches and reading weights dominate.
MIN_PREFILL_TOKENS = 512


def fuse_parts(model: Any, *, least_tokens: int | None = None, device: torch.device | None = None) -> None:
    """Fuse operators of `model` in place. Call this once, before memory settings are applied.

    A model on the meta device needs `device`, on which its MLPs are tested. Without `least_tokens`, functions are
    compiled for each length; training has few lengths. With it, one kernel serves all lengths from `least_tokens`, and
    shorter passes run the original code.
    """
    gates: dict[str, Gate] = {}
    device = device or next(model.parameters()).device
    for module in tokenwise_modules(model):
        if not _fuse_gate(module, gates, model.config.hidden_size, device, least_tokens):
            module.forward = _compile(module.forward, least_tokens)
    for layer in layers_of(model):
        _fuse_rotation(attention_of(layer), least_tokens)


def pays_to_fuse(model: Any, tokens: int) -> bool:
    """Return whether fusing saves more time on this many prompt tokens than compiling takes."""
    return bool(model.device.type == "cuda" and tokens * model.num_parameters() >= PAYS_FROM)


def fuse_for_reading(model: Any) -> None:
    """Fuse operators for prompts of many lengths, also in inference mode; decoding steps run the original code."""
    fuse_parts(model, least_tokens=MIN_PREFILL_TOKENS)


@dataclass(frozen=True)
class Gate:
    """An activation function without weights, and its kernel, which all layers share."""

    act: Callable[[Tensor], Tensor]
    compiled: Callable[[Tensor, Tensor], Tensor]


def _compile(
    function: Callable[..., Any], least_tokens: int | None, *, plain: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Compile a function of tensors whose second-to-last dimension is tokens; `plain` computes shorter inputs."""
    fused: Callable[..., Any] = torch.compile(function)
    if least_tokens is None:
        return fused
    uncompiled = plain or function

    def by_count(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if given[0].shape[-2] < least_tokens:
            return uncompiled(*args, **kwargs)
        for each in given:
            if isinstance(each, Tensor) and each.dim() > 1:
                # Without this, the first length would get its own kernel.
                torch._dynamo.maybe_mark_dynamic(each, each.dim() - 2)
        return fused(*args, **kwargs)

    return by_count


def _fuse_gate(
    module: Any, gates: dict[str, Gate], hidden_size: int, device: torch.device, least_tokens: int | None
) -> bool:
    """Fuse the gate of an MLP into one kernel; False if `module` is not such an MLP."""
    if not all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")):
        return False
    act = getattr(module, "act_fn", None)
    if not callable(act):
        return False
    if repr(act) not in gates:
        gates[repr(act)] = Gate(act, _compile(lambda gate, up: act(gate) * up, least_tokens))
    gate = gates[repr(act)]
    tested: Any = with_weights(module, device)

    def plain(hidden: Tensor) -> Tensor:
        out: Tensor = tested.down_proj(gate.act(tested.gate_proj(hidden)) * tested.up_proj(hidden))
        return out

    def gated(hidden: Tensor) -> Tensor:
        out: Tensor = module.down_proj(gate.compiled(module.gate_proj(hidden), module.up_proj(hidden)))
        return out

    if not _same(tested.forward, plain, tested.down_proj.weight, hidden_size):
        return False
    module.forward = gated
    return True


@torch.no_grad()
def _same(one: Callable[[Tensor], Any], other: Callable[[Tensor], Tensor], weight: Tensor, hidden_size: int) -> bool:
    states = probe_states(weight, hidden_size)
    found = one(states)
    return isinstance(found, Tensor) and is_close(found.float(), other(states).float())


def _fuse_rotation(attention: Any, least_tokens: int | None = None) -> None:
    """Let this module's `forward` call a compiled `apply_rotary_pos_emb`.

    The function's code runs with changed globals. Changing the `transformers` module would affect other models.
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
    """Compile once for all layers. The output is laid out by token, so attention kernels need no copy.

    Tables and products are fp32. The result is rounded to the model's dtype here; attention would do it otherwise.
    """

    def by_token(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        rotated = rotate(query, key, *args, **kwargs)
        return tuple(each.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2) for each in rotated)

    return _compile(by_token, least_tokens, plain=rotate)


# Mixed precision: a model in bf16 with positions in fp32.


def require_exact_fp32() -> None:
    """Disable TF32, even if the environment enables it, as NVIDIA's containers do.

    TF32 has 11 bits, and `transformers` up to 5.18 multiplies frequencies by positions in a matrix product. From
    position 2,048 on, neighbors would get the same position.
    """
    torch.set_float32_matmul_precision("highest")


def compute_in_bf16(model: Any) -> None:
    keep_tables(model)
    cast_parameters(model, torch.bfloat16)


def cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Cast parameters, but not buffers, as `transformers` does when it loads a model in `dtype`."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def keep_tables(model: Any) -> None:
    """Keep the RoPE tables in fp32: `transformers` would round them to the dtype of the rotary module's input."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is not None and any(name.endswith("inv_freq") for name, _ in rotary.named_buffers()):
        rotary.register_forward_pre_hook(_pass_fp32)


def _pass_fp32(rotary: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].new_empty(0, dtype=torch.float32), *args[1:])
