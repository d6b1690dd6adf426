"""Load tokenizers from a Hub id, a folder or a GGUF file. Does not import torch, which takes seconds."""

import json
from pathlib import Path
from typing import Any

from unspool.core.errors import ConfigError, UnspoolError
from unspool.models.location import first_line, location

# Classes that use only tokenizer.json.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
# GGUF names of tokenizers that split off every digit first.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


def load_tokenizer(ref: str) -> Any:
    """Load the fast tokenizer of a model."""
    silence_transformers()
    try:
        tokenizer = _loader(ref).from_pretrained(**location(ref), trust_remote_code=False)
    except UnspoolError:
        raise
    except Exception as error:  # of any type: `tokenizers` raises plain Exceptions, and files can hold anything
        raise ConfigError(
            f"model {ref}: no tokenizer could be loaded ({first_line(error)}); add one to the model."
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(f"model {ref}: its tokenizer has no fast version; save one as tokenizer.json in its folder.")
    if Path(ref).suffix == ".gguf":
        _split_digits(tokenizer, header_text(Path(ref), "tokenizer.ggml.pre"))
    _check_vocabulary(tokenizer, ref)
    return tokenizer


def _check_vocabulary(tokenizer: Any, ref: str) -> None:
    """Refuse a tokenizer of another model early: ordinary text would have tokens without embeddings.

    Special tokens may have no embeddings, such as image tokens in text models; they are refused when used.
    """
    try:
        config = json.loads((Path(ref) / "config.json").read_text(encoding="utf-8"))
        size = int((config.get("text_config") or config).get("vocab_size") or len(tokenizer))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return  # a folder without a model, or an error that the config reader reports
    if len(tokenizer) <= size:
        return
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    outside = sorted(token for token in tokenizer.get_vocab().values() if token >= size and token not in special)
    if outside:
        raise ConfigError(
            f"model {ref}: its tokenizer has {len(tokenizer)} tokens and its config a vocab_size of {size}, so "
            f"{len(outside)} ordinary tokens have no embedding; use the tokenizer that the model was trained with."
        )


def header_text(path: Path, key: str) -> str | None:
    """Return the text of `key` in the header of a GGUF file; None if the key is missing."""
    # Imported late: optional, but installed if `transformers` could read the file.
    from gguf import GGUFReader, GGUFValueType

    try:
        field = GGUFReader(path).get_field(key)
        text = field.contents() if field is not None and field.types == [GGUFValueType.STRING] else None
    except (ValueError, LookupError) as error:
        raise ConfigError(f"{path}: not a GGUF file, or damaged ({first_line(error)}); download it again.") from error
    return None if text is None else str(text)


def _split_digits(tokenizer: Any, kind: str | None) -> None:
    """Split off digits, a step that `transformers` loses when it converts from GGUF."""
    backend = tokenizer.backend_tokenizer
    own = backend.pre_tokenizer
    if kind not in _SINGLE_DIGITS or "Digits" in repr(own):
        return
    from tokenizers.pre_tokenizers import Digits, Sequence

    digits = Digits(individual_digits=True)
    backend.pre_tokenizer = digits if own is None else Sequence([digits, own])


def _loader(ref: str) -> Any:
    """Return `AutoTokenizer`, or the class that it would choose, without importing torch."""
    try:
        named = json.loads((Path(ref) / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        named = None
    if named in _GENERIC:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def silence_transformers() -> None:
    """Keep `transformers` from printing."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
