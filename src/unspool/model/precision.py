"""A model that computes in bf16, its positions still in fp32.

In: a model in any precision. Out: the same model, its parameters bf16; buffers stay as they are.
Why by hand: `model.to(bfloat16)` would round the frequencies of positions too, and `transformers` rounds cosines and
sines to the dtype of what it is shown.
"""

from typing import Any

import torch


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
