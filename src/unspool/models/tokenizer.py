"""Tokenizers from a Hub id, a folder or a GGUF file. Imports no torch, which takes seconds."""

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

from unspool.core.errors import ConfigError

# Types of values in a GGUF header, and the sizes in bytes of the others.
_TEXT, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def header_text(path: Path, key: str) -> str | None:
    """Read the text of `key` in the header of a GGUF file (version 2 or later); None if there is none."""
    try:
        with path.open("rb") as file:
            magic, version, _, num_keys = struct.unpack("<4sIQQ", file.read(24))
            if magic != b"GGUF" or version < 2:
                raise ConfigError(f"{path}: not a GGUF file of version 2 or later; convert the model again.")
            for _ in range(num_keys):
                name, kind = _text(file), _number(file, "<I")
                if name == key and kind == _TEXT:
                    return _text(file)
                _skip(file, kind)
    except (struct.error, KeyError, UnicodeDecodeError, OverflowError) as error:
        raise ConfigError(f"{path}: its header cannot be read, so the file is damaged; download it again.") from error
    return None


def _number(file: BinaryIO, form: str) -> int:
    return int(struct.unpack(form, file.read(struct.calcsize(form)))[0])


def _text(file: BinaryIO) -> str:
    length = _number(file, "<Q")
    content = file.read(length)
    if len(content) < length:
        raise struct.error("the file ends inside a text")
    return content.decode()


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _TEXT:
        file.seek(_number(file, "<Q"), 1)
    elif kind == _ARRAY:
        inner, count = _number(file, "<I"), _number(file, "<Q")
        if inner in _SIZES:
            file.seek(_SIZES[inner] * count, 1)
        else:
            for _ in range(count):
                _skip(file, inner)
    else:
        file.seek(_SIZES[kind], 1)


# Classes that do what tokenizer.json says and nothing else.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
# GGUF's names of tokenizers that split off every digit first.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


def load_tokenizer(ref: str) -> Any:
    """Load the fast tokenizer of a model."""
    silence_transformers()
    try:
        tokenizer = _loader(ref).from_pretrained(**location(ref), trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"model {ref}: no tokenizer could be loaded ({first_line(error)}).") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"model {ref}: its tokenizer has no fast version; save one as tokenizer.json beside it.")
    if Path(ref).suffix == ".gguf":
        _split_digits(tokenizer, header_text(Path(ref), "tokenizer.ggml.pre"))
    return tokenizer


def _split_digits(tokenizer: Any, kind: str | None) -> None:
    """Restore a step that `transformers` loses when it converts from GGUF."""
    backend = tokenizer.backend_tokenizer
    own = backend.pre_tokenizer
    if kind not in _SINGLE_DIGITS or "Digits" in repr(own):
        return
    from tokenizers.pre_tokenizers import Digits, Sequence

    digits = Digits(individual_digits=True)
    backend.pre_tokenizer = digits if own is None else Sequence([digits, own])


def _loader(ref: str) -> Any:
    """Return `AutoTokenizer`, or the class that it would choose, without importing torch to find out."""
    try:
        named = json.loads((Path(ref) / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        named = None
    if named in _GENERIC:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def location(ref: str) -> dict[str, str]:
    """Return the arguments of `from_pretrained` that say where a model is."""
    path = Path(ref)
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": ref}


def silence_transformers() -> None:
    """Keep `transformers` from printing."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
