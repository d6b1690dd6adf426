"""One text out of a GGUF file's header.

The `gguf` package reads a header too, for seconds, as it makes an array of every token.
"""

import struct
from pathlib import Path
from typing import BinaryIO

from unspool.base.errors import ConfigError

_TEXT, _ARRAY = 8, 9
# Bytes of the other kinds of value.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def header_text(path: Path, key: str) -> str | None:
    """The text that a GGUF file (version 2 or later) gives for `key`; None if there is none."""
    try:
        with path.open("rb") as file:
            magic, version, _, num_keys = struct.unpack("<4sIQQ", file.read(24))
            if magic != b"GGUF" or version < 2:
                raise ConfigError(f"{path}: this is no GGUF file of version 2 or later; convert the model again.")
            for _ in range(num_keys):
                name, kind = _text(file), _number(file, "<I")
                if name == key and kind == _TEXT:
                    return _text(file)
                _skip(file, kind)
    except (struct.error, KeyError, UnicodeDecodeError, OverflowError) as error:
        raise ConfigError(f"{path}: its header cannot be read; the file is damaged, get it again.") from error
    return None


def _number(file: BinaryIO, form: str) -> int:
    return int(struct.unpack(form, file.read(struct.calcsize(form)))[0])


def _text(file: BinaryIO) -> str:
    length = _number(file, "<Q")
    content = file.read(length)
    if len(content) < length:
        raise struct.error("the file ends within a text")
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
