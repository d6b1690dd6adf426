"""Ways to damage the inputs of readers.

In: valid inputs (fuzz_inputs.py), a generator. Out: a damaged one.
Promise: the same generator gives the same damage; files that are compressed or carry checksums are also damaged on
the inside and packed again, since damage from the outside seldom gets past the first check.
Elsewhere: what must hold whatever a reader is given (test_fuzz.py).
"""

import gzip
import json
import re
import stat
import struct
import tarfile
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import zstandard

from .fuzz_inputs import CODE, Input, squeeze, tar_bytes, zip_bytes

# A line, record or sample of more bytes is too long for the readers while they are tested.
LIMIT = 4 << 10
# What an archive may unpack to.
UNPACKED_LIMIT = 1 << 18

# Damage to bytes

Rng = np.random.Generator
T = TypeVar("T")
_ORDERS: tuple[Literal["little", "big"], ...] = ("little", "big")
_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1)
_SIGNATURES = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"ustar", b"PAR1", b"ARROW1", b"\xff\xff\xff\xff", b"\x28\xb5\x2f\xfd")
_INSERTIONS = (
    b"\0",
    b"\0" * 700,
    b"\xff\xfe",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\xf8\x88\x80\x80\x80",
    b'"\\ud800"',
    b"\\u0000",
    b"\n",
    b"\r\n\n\n",
    b"\xe2\x80\xa8",
    b"{",
    b'{"text":',
    b"[" * 5000,
    b'{"text":' * 1500,
    b"[" * 900 + b"]" * 900,
    b"9" * 400,
    b"9" * 5000,
    b"-1e999",
    b"NaN",
    b"x" * (LIMIT + 1),
    b"\xc3\xa9" * LIMIT,
    b"../../../etc/passwd",
    b"/etc/passwd",
    b"\0" * (2 * UNPACKED_LIMIT),
    b"&a [*a, *a]",
)


def _below(rng: Rng, size: int) -> int:
    return int(rng.integers(max(size, 1)))


def _choose(rng: Rng, options: Sequence[T]) -> T:
    return options[_below(rng, len(options))]


def _span(rng: Rng, data: bytes) -> tuple[int, int]:
    start = _below(rng, len(data))
    return start, min(len(data), start + 1 + _below(rng, 2 ** _below(rng, 10)))


def _flip(rng: Rng, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(1 + _below(rng, 6) if data else 0):
        changed[_below(rng, len(data))] ^= 1 << _below(rng, 8)
    return bytes(changed)


def _truncate(rng: Rng, data: bytes, other: bytes) -> bytes:
    return data[: _below(rng, len(data))]


def _drop(rng: Rng, data: bytes, other: bytes) -> bytes:
    start, end = _span(rng, data)
    return data[:start] + data[end:]


def _insert(rng: Rng, data: bytes, other: bytes) -> bytes:
    place = _below(rng, len(data) + 1)
    return data[:place] + _choose(rng, _INSERTIONS) + data[place:]


def _repeat(rng: Rng, data: bytes, other: bytes) -> bytes:
    start, end = _span(rng, data)
    return data[:end] + data[start:end] * (1 + _below(rng, 4)) + data[end:]


def _splice(rng: Rng, data: bytes, other: bytes) -> bytes:
    return data[: _below(rng, len(data))] + other[_below(rng, len(other)) :]


def _lie(rng: Rng, data: bytes, other: bytes) -> bytes:
    """A number in another's place, more often near what marks a header."""
    number, width = _choose(rng, _NUMBERS), 1 << _below(rng, 4)
    field = (number & ((1 << 8 * width) - 1)).to_bytes(width, _choose(rng, _ORDERS))
    marks = [data.find(mark, _below(rng, len(data))) for mark in _SIGNATURES]
    near = [mark for mark in marks if mark >= 0]
    place = _choose(rng, near) + _below(rng, 96) - 48 if near and _below(rng, 2) else _below(rng, len(data))
    place = min(max(place, 0), max(len(data) - width, 0))
    return data[:place] + field + data[place + width :]


def _enlarge(rng: Rng, data: bytes, other: bytes) -> bytes:
    """A number that is written in digits, with many more of them."""
    places = [found.start() for found in re.finditer(rb"[0-9]", data)]
    place = _choose(rng, places) if places else 0
    return data[:place] + b"9" * _choose(rng, (3, 12, 25, 400, 5000)) + data[place:]


def _garbage(rng: Rng, data: bytes, other: bytes) -> bytes:
    """Noise between a right beginning and a right end."""
    head, tail = _choose(rng, (2, 4, 8, 32)), _choose(rng, (0, 4, 8, 32))
    return data[:head] + rng.bytes(_below(rng, 600)) + data[max(len(data) - tail, 0) :]


_DAMAGE = (_flip, _truncate, _drop, _insert, _repeat, _splice, _lie, _lie, _enlarge, _garbage)


def damage_bytes(rng: Rng, data: bytes, other: bytes) -> bytes:
    """One to three kinds of damage; `other` is a second input of the same kind."""
    for _ in range(1 + _below(rng, 3)):
        data = _choose(rng, _DAMAGE)(rng, data, other)
    return data


# Damage with an eye to the format

_ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    float("inf"),
    float("nan"),
    1 << 64,
    10**300,
    "",
    "\0",
    "\ud800",
    "../shard.00000.mds",
    "/etc/passwd",
    "index.json",
    ".",
    "x" * (LIMIT + 1),
    "ndarray",
    "ndarray:uint64:0",
    "ndarray:float16",
    "json",
    "pkl",
    "zstd",
    "gz",
    [],
    {},
    [[]],
    {"a": {"b": [None]}},
    ["data", 3],
    {"sha256": "0", "xxh64_digest": "0", "shake_128": 5},
)
_ODD_NAMES = (
    "../../escape.py",
    "/etc/passwd.py",
    "C:\\windows\\a.py",
    "top\\..\\..\\a.py",
    "top/../../a.py",
    "./",
    ".",
    "..",
    "a\0b.py",
    "line\nbreak.py",
    "x" * 3000 + ".py",
    "top/" * 400 + "a.py",
    "top/\udcff.py",
    "top/mill.py/inside.py",
    "top/pkg/mill.py",
    "node_modules/a.py",
    " ",
)


def _damage_json(rng: Rng, data: bytes) -> bytes:
    """Replace, remove or rename some values of a JSON document; other data is unchanged."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return data
    whole = [content]
    for _ in range(1 + _below(rng, 3)):
        at, key = _choose(rng, _places(whole, 0))
        if isinstance(at, dict) and not _below(rng, 4):
            del at[key]
        else:
            at[key] = deepcopy(_choose(rng, _ODD_VALUES))
    return json.dumps(whole[0]).encode()


def _places(at: Any, key: Any) -> list[tuple[Any, Any]]:
    """Every place of a value in a JSON document, including the whole."""
    value = at[key]
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(at, key), *(place for inner, _ in inside for place in _places(value, inner))]


def _damage_lines(rng: Rng, data: bytes) -> bytes:
    found = data.split(b"\n")
    for _ in range(1 + _below(rng, 2)):
        number = _below(rng, len(found))
        found[number] = _damage_json(rng, found[number])
    return b"\n".join(found)


def with_checksums(tar: bytes) -> bytes:
    """Correct the checksums of all recognizable headers of a tar file."""
    fixed = bytearray(tar)
    for start in range(0, len(tar) - 511, 512):
        if fixed[start + 257 : start + 262] == b"ustar":
            fixed[start + 148 : start + 156] = b" " * 8
            fixed[start + 148 : start + 156] = b"%06o\0 " % sum(fixed[start : start + 512])
    return bytes(fixed)


def _odd_tar(rng: Rng) -> bytes:
    """Links, devices, names that lead elsewhere, and headers with false values."""
    extra = []
    for _ in range(1 + _below(rng, 3)):
        info = tarfile.TarInfo(_choose(rng, _ODD_NAMES))
        info.type = _choose(rng, (b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"S", b"Z"))
        info.linkname = _choose(rng, ("", "/etc/passwd", "../../..", "top/setup.py", info.name[:90]))
        info.size = _choose(rng, (0, 10, 600)) if info.type in (b"0", b"7", b"S", b"Z") else 0
        keys = ("path", "size", "GNU.sparse.major", "GNU.sparse.size", "linkpath", "comment")
        values = ("0", "-5", "99999999999999999999", "../../x.py", "/x.py", "\0", "é", "1e9")
        if _below(rng, 2):
            info.pax_headers = {_choose(rng, keys): _choose(rng, values)}
        extra.append(info)
    try:
        return tar_bytes(CODE, tuple(extra), _choose(rng, (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)))
    except (ValueError, UnicodeError):  # tarfile refuses to write some of this
        return tar_bytes({_choose(rng, _ODD_NAMES[:10]): b"a = 1\n", **CODE})


def _odd_zip(rng: Rng) -> bytes:
    names = [name for name in _ODD_NAMES if "\udcff" not in name]
    files = {_choose(rng, names): b"a = 1\n" * (1 + _below(rng, 50)), **CODE}
    mode = _choose(rng, (0, stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFDIR, stat.S_IFCHR)) | 0o644
    data = bytearray(zip_bytes(files, mode=mode if _below(rng, 2) else 0))
    if _below(rng, 2):
        # Flags and method of one member, in the list and before its content: encrypted, unknown, another's name.
        place, changed = 8 + _choose(rng, (0, 2)), _choose(rng, (0, 1, 9, 12, 14, 93, 99, 0x800, 0x2041))
        for mark, shift in ((b"PK\1\2", 0), (b"PK\3\4", -2)):
            struct.pack_into("<H", data, data.find(mark) + place + shift, changed)
    return bytes(data)


def _damage_tar(rng: Rng, tar: bytes, other: bytes) -> bytes:
    tar = _odd_tar(rng) if _below(rng, 3) == 0 else damage_bytes(rng, tar, other)
    return with_checksums(tar) if _below(rng, 4) else tar


def _damage_zip(rng: Rng, data: bytes, other: bytes) -> bytes:
    if _below(rng, 3) == 0:
        return _odd_zip(rng)
    return damage_bytes(rng, data if _below(rng, 2) else _odd_zip(rng), other)


def damage_file(rng: Rng, name: str, data: bytes, other: bytes) -> bytes:
    """Damage a file inside its compression, if its suffix has one, or outside."""
    inside = _below(rng, 3) > 0
    if name.endswith((".gz", ".zst", ".zstd")) and inside:
        unpack, pack = (
            (gzip.decompress, squeeze) if name.endswith(".gz") else (zstandard.decompress, zstandard.compress)
        )
        return pack(damage_file(rng, name.rpartition(".")[0], unpack(data), unpack(other)))
    if name.endswith(".tar"):
        return _damage_tar(rng, data, other)
    if name.endswith((".zip", ".whl")):
        return _damage_zip(rng, data, other)
    if name.endswith((".jsonl", ".json")) and inside:
        return (_damage_lines if name.endswith(".jsonl") else _damage_json)(rng, data)
    return damage_bytes(rng, data, other)


def damage(rng: Rng, valid: list[Input]) -> Input:
    """One of the inputs, damaged in one of its files, or in the names and kinds of the files of a folder."""
    chosen = _choose(rng, valid)
    sizes = np.array([len(data) for data in chosen.files.values()])
    name = list(chosen.files)[int(rng.choice(len(sizes), p=sizes / sizes.sum()))]
    others = [file for each in valid for other, file in each.files.items() if _ending(other) == _ending(name)]
    files = {**chosen.files, name: damage_file(rng, name, chosen.files[name], _choose(rng, others))}
    if chosen.source.kind == "repos" and "/" in name and not _below(rng, 3):
        return _odd_folder(rng, replace(chosen, files=files))
    if chosen.source.kind not in ("mds", "hf") and "/" not in name and not _below(rng, 30):
        files[_choose(rng, ("\udcff", "line\nbreak", "{}", "é")) + name] = files.pop(name)
    return replace(chosen, files=files)


def _ending(name: str) -> str:
    return "".join(name.rpartition("/")[2].partition(".")[1:])


def _odd_folder(rng: Rng, chosen: Input) -> Input:
    """Links, pipes and file names that only a file system can hold."""
    odd = ("\udcff\udcfe.py", "line\nbreak.py", "\\..\\a.py", "C:a.py", "\u202e.py", "deep/" * 60 + "a.py", " ", "-")
    targets = ("/etc/passwd", "..", ".", "missing", "again", "setup.py", "/")
    return replace(
        chosen,
        files={**chosen.files, f"mill/{_choose(rng, odd)}": b"a = 1\n"},
        links={f"mill/link{number}": _choose(rng, targets) for number in range(_below(rng, 3))}
        | {"mill/again": "again"},
        pipes=("mill/pipe.py",) if _below(rng, 2) else (),
    )
