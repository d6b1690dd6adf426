"""Models from a Hub id, a folder, a GGUF file, or from nothing.

Promise: safetensors only, no remote code; a model that we would compute wrongly is refused.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import modeling_gguf_pytorch_utils as gguf_conversion

from unspool.core.artifacts import digest, file_digest, folder_digest
from unspool.core.errors import ConfigError
from unspool.models.attention.interface import NAME, register
from unspool.models.checks import check_attention
from unspool.models.export import HARPE_KEYS, HARPE_TYPE
from unspool.models.fuse import exact_fp32
from unspool.models.presets import SIZES, NewModel
from unspool.models.rotary import apply_head_bases, rope_shape
from unspool.models.tokenizer import first_line, location, quiet

# Where models of text and images keep the weights of their language model, and where a language model alone has them.
_TEXT_NAMES = {
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}


def load_model(ref: str, *, device: torch.device, dtype: torch.dtype) -> Any:
    """The model with our attention, in evaluation mode."""
    quiet()
    register()
    exact_fp32()
    try:
        bases, config = _harpe(ref)
        with _quiet_conversion():
            model, loading = AutoModelForCausalLM.from_pretrained(
                **location(ref),
                **({"config": config} if config else _text_part(ref)),
                dtype=dtype,
                attn_implementation=NAME,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        needs = " pip install 'unspool[gguf]'." if ref.endswith(".gguf") and isinstance(error, ImportError) else ""
        raise ConfigError(f"model {ref}: could not be loaded ({first_line(error)}).{needs}") from error
    except KeyError as error:
        # Of our attention's name, in architectures that do not look it up where it is registered.
        raise ConfigError(
            f"model {ref}: its architecture computes attention in code of its own, which is not supported; "
            "use a model such as Llama, Qwen or Mistral."
        ) from error
    if loading["missing_keys"]:
        # `transformers` would start them from random numbers and only warn.
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise ConfigError(f"model {ref}: its files lack weights that its config asks for ({missing}, …); get it again.")
    if ref.endswith(".gguf"):
        _forget_quantization(model)
    model = model.to(device).eval()
    _check_supported(model)
    check_attention(model, NAME)
    if bases is not None:
        apply_head_bases(model, bases)
    return model


def _text_part(ref: str) -> dict[str, Any]:
    """What makes `transformers` load only the language model of one that also sees or hears; else nothing."""
    if Path(ref).suffix == ".gguf":
        return {}
    config = AutoConfig.from_pretrained(**location(ref), trust_remote_code=False)
    text = config.get_text_config()
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {}
    return {"config": text, "key_mapping": _TEXT_NAMES}


@contextmanager
def _quiet_conversion() -> Iterator[None]:
    """Keep the bar of GGUF conversion, which no setting of `transformers` turns off, to terminals."""
    bar = gguf_conversion.tqdm
    gguf_conversion.tqdm = partial(bar, disable=None)
    try:
        yield
    finally:
        gguf_conversion.tqdm = bar


def _forget_quantization(model: Any) -> None:
    """A GGUF file is dequantised on loading; `transformers` would still refuse to save such a model."""
    for holder, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)


def build_new(new: NewModel, tokenizer: Any, *, seed: int) -> Any:
    """A Llama-architecture model with random weights."""
    register()
    exact_fp32()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=new.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": new.base},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation=NAME,
        **SIZES[new.size],
    )
    return LlamaForCausalLM(config)


def fit_vocabulary(model: Any, new: Collection[int], trained: np.ndarray) -> None:
    """Let the tokens `new` start at the mean of those `trained`, with more embeddings where there are too few.

    Models often have more embeddings than tokens, and tokens that nothing uses; what a new token would find there was
    never trained.
    """
    if not new:
        return
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    if max(new) >= num_embeddings:
        model.resize_token_embeddings(max(new) + 1, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        for parameter in layer.parameters(recurse=False):
            is_trained = torch.zeros(len(parameter), dtype=parameter.dtype, device=parameter.device)
            is_trained[torch.from_numpy(trained[trained < num_embeddings])] = 1
            # As a product, because selecting the rows would copy what may be gigabytes.
            parameter.data[sorted(new)] = (is_trained @ parameter.data) / is_trained.sum()


def model_digest(ref: str) -> str:
    """Hash of a model's files; of the name alone for a Hub id, whose content the Hub names."""
    path = Path(ref)
    if path.is_dir():
        return folder_digest(path)
    return file_digest(path) if path.is_file() else digest(ref)


def original_context(ref: str) -> int:
    """The context length a model claims before any stage."""
    quiet()
    path = Path(ref) / "config.json"
    try:
        # A folder of ours may name a model_type that only we know, so its file is read as it is.
        if path.is_file():
            found = json.loads(path.read_text())
        else:
            found = AutoConfig.from_pretrained(**location(ref), trust_remote_code=False).to_dict()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {ref}: its config could not be read ({first_line(error)}).") from error
    if not found.get("max_position_embeddings"):
        raise ConfigError(
            f"model {ref}: its config gives no max_position_embeddings, so it has no rotary positions to extend; "
            "use a model such as Llama, Qwen or Mistral."
        )
    return int(found["max_position_embeddings"])


def _harpe(ref: str) -> tuple[Any, Any]:
    """The bases and the plain config of a folder that we exported with a base per head."""
    path = Path(ref) / "config.json"
    if not path.is_file():
        return None, None
    content = json.loads(path.read_text())
    if content.get("model_type") != HARPE_TYPE:
        return None, None
    plain = {key: value for key, value in content.items() if key not in HARPE_KEYS}
    return content["head_bases"], AutoConfig.for_model(content["plain_type"], **plain)


def _check_supported(model: Any) -> None:
    rope_shape(model.config)
    if not hasattr(model.base_model, "rotary_emb") or not hasattr(model.base_model, "layers"):
        raise ConfigError(f"model_type {model.config.model_type!r} keeps its layers where we cannot reach them.")
