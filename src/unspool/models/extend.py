"""`unspool.load` and `unspool.extend`: a model and its tokenizer, and a longer context for it."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from unspool.core.config import lookup
from unspool.core.errors import ConfigError
from unspool.core.sizes import parse_size
from unspool.models.load import load_model
from unspool.models.location import model_path
from unspool.models.rotary import OWN_ATTENTION, apply_rope, decide_by_document, decides_by_document, depends_on_length
from unspool.models.tokenizer import load_tokenizer
from unspool.rope.advice import advised_base
from unspool.rope.methods import ABF
from unspool.rope.tables import RopeMethod

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

DEVICES = ("auto", "cpu", "cuda")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def load(
    model: str | Path, *, device: str | torch.device = "auto", dtype: str | torch.dtype | None = None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    """Load a model and its tokenizer, with attention that keeps packed documents apart.

    The model is a plain `transformers` model in evaluation mode, so any trainer takes it. Only safetensors are read,
    no remote code runs, and a model that would be computed wrongly is refused.

    Args:
        model: A model folder, a run or one of its stages, a `.gguf` file, a Hub id, or `asset:tiny-base`.
        device: `auto`, `cpu`, `cuda` or a torch device.
        dtype: `bf16`, `fp32`, `fp16` or a torch dtype; by default bf16 on a GPU and fp32 on a CPU.

    Returns:
        The model and its fast tokenizer.

    Raises:
        ConfigError: There is no such model, it is damaged, or its architecture is not supported.

    Example:
        >>> import unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> model.config.max_position_embeddings
        256
    """
    ref = model_path(str(model), Path())
    target = pick_device(device)
    loaded = load_model(ref, device=target, dtype=pick_dtype(dtype, target))
    return loaded, load_tokenizer(ref)


def extend(model: "PreTrainedModel", context_length: int | str, rope: RopeMethod | None = None) -> "PreTrainedModel":
    """Give a model RoPE settings for a longer context, in place. It still has to be trained at that length.

    The config changes with the model, so saving and loading it keeps the settings. The tables that `transformers`
    computes from them are compared with our own first.

    Args:
        model: A model of `load`, or any RoPE model of `transformers`. `HARPE` needs attn_implementation="unspool".
        context_length: Tokens, such as `"128K"` (131,072) or 131072.
        rope: A method such as `ABF(base=8e6)` or `YaRN()`; by default `ABF` with the base that `unspool rope` advises.

    Returns:
        The same model.

    Raises:
        ConfigError: The method does not fit the model or the length.

    Example:
        >>> import unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> model = unspool.extend(model, context_length="2K", rope=unspool.ABF(base=20_000))
        >>> model.config.max_position_embeddings, model.config.rope_parameters["rope_theta"]
        (2048, 20000.0)
    """
    try:
        length = parse_size(context_length)
    except ValueError as error:
        raise ConfigError(f"context_length {context_length!r}: {error}.") from error
    method = ABF(base=advised_base(model.config.to_dict(), length)) if rope is None else rope
    apply_rope(model, method, length)
    own_attention = model.config._attn_implementation == OWN_ATTENTION
    if own_attention and depends_on_length(model) and not decides_by_document(model):
        decide_by_document(model)
    return model


def pick_device(wanted: str | torch.device) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` names; ConfigError if it is not here."""
    if isinstance(wanted, torch.device):
        return wanted
    if wanted not in DEVICES:
        raise ConfigError(f"`device` {wanted!r} is not known; use {', '.join(DEVICES)}.")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda is not available here; use auto or cpu.")
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu")


def pick_dtype(wanted: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if isinstance(wanted, torch.dtype):
        return wanted
    if wanted is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return lookup(DTYPES, wanted, kind="dtype")
