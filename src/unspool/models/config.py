"""Model configs: sizes of new models, and config values of existing models without their weights. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from unspool.core.config import Config
from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.sizes import Size
from unspool.models.location import first_line, location
from unspool.models.tokenizer import silence_transformers
from unspool.models.weight_files import check_weights

_COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)

# Llama-architecture shapes; the vocabulary comes from the tokenizer. Eight small heads: of ten trials, only one learned
# to recall a stated fact, and it had eight heads. Three others with eight did not (benchmarks/README.md).
SIZES: dict[str, dict[str, Any]] = {
    "4M": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
}


class NewModel(Config):
    """`model: {size: 4M, tokenizer: folder, context_length: 256}` starts from random weights."""

    size: str = Field(description=f"Shape of the model: {', '.join(SIZES)}.")
    tokenizer: str = Field(description="Folder with a `tokenizer.json`.")
    context_length: Size = Field(description="Context length of the new model, in tokens.")
    base: float = Field(10_000.0, gt=1, description="RoPE base.")

    @field_validator("size")
    @classmethod
    def _known(cls, size: str) -> str:
        if size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}")
        return size


def config_values(ref: str) -> dict[str, Any]:
    """Read the text config of a Hub id, a folder or a GGUF file, with the architecture's defaults."""
    check_weights(ref, digests=False)
    content = read_config_file(ref)
    check_values(ref, content)
    config = _load_config(ref, content)
    try:
        values: dict[str, Any] = config.get_text_config().to_dict()
    except ValueError as error:
        raise _unreadable(ref, error) from error
    check_values(ref, values)
    return values


def check_values(ref: str, values: dict[str, Any]) -> None:
    """Refuse impossible sizes before `transformers` computes with them."""
    for name in _COUNTS:
        value = values.get(name)
        if isinstance(value, int | float | str) and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"model {ref}: its config has {name} {value!r}, and it must be a positive number.")


def original_context(ref: str) -> int:
    """Read a model's original context length: the one before any stage."""
    # An exported folder may have a model_type that only Unspool knows, so its file is read directly.
    found = read_config_file(ref) or _load_config(ref, {}).to_dict()
    if not found.get("max_position_embeddings"):
        raise ConfigError(
            f"model {ref}: its config gives no max_position_embeddings, so it has no rotary positions to extend; "
            "use a model such as Llama, Qwen or Mistral."
        )
    return int(found["max_position_embeddings"])


def read_config_file(ref: str) -> dict[str, Any]:
    """Read config.json of a folder without interpreting it; empty for a Hub id or a GGUF file."""
    path = Path(ref) / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(content, dict):
            raise ValueError(f"config.json holds a {type(content).__name__}, not a table")
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(ref, error) from error
    return content


def build_plain_config(content: dict[str, Any]) -> Any:
    """Build the plain architecture's config from config.json of a model with a base per head; it keeps the bases.

    An exported folder has a model_type that only Unspool knows. A folder that a user saved has the plain model_type.
    """
    from transformers import AutoConfig

    own = ("model_type", "plain_type", "auto_map", "architectures", "rope_scaling")
    plain = {key: value for key, value in content.items() if key not in own}
    plain["rope_parameters"] = {**content["rope_parameters"], "rope_type": "default"}
    return AutoConfig.for_model(content.get("plain_type") or content["model_type"], **plain)


def _load_config(ref: str, content: dict[str, Any]) -> Any:
    silence_transformers()
    # Imported late, because it takes seconds.
    from transformers import AutoConfig

    try:
        if "head_bases" in content:
            return build_plain_config(content)
        return AutoConfig.from_pretrained(**location(ref), trust_remote_code=False)
    except UnspoolError:
        raise
    except Exception as error:  # of any type: config classes do not check values before they compute with them
        raise _unreadable(ref, error) from error


def _unreadable(ref: str, error: Exception) -> ConfigError:
    return ConfigError(f"model {ref}: its config could not be read ({first_line(error)}); download the model again.")
