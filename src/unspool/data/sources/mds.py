"""Source kind `mds`: MosaicML's MDS format, version 2, read without its library. Documents are already tokens.

A sample without a column `indices` is one document. In a packed sample, `indices` holds the [start, end) of each
document in the row. Each becomes a separate document; tokens outside all of them are dropped. A sample that cannot be
read is one quarantined record, because its number of documents is unknown.

Nothing in a shard is executed or trusted: pickled columns are never loaded, and every offset, length and document
boundary is checked. Hashes in index.json are checked; those of xxhash only if it is installed. A compressed shard is
decompressed in memory (usually 64 MiB).

ProLong's public data uses Llama-3's tokenizer. Its unpacked sets have no BOS and no EOS. Its packer puts 128000 before
and 128001 after a document, so a row that starts inside a document has no BOS. The column `mask` of its instruction
data is the loss mask: a token with 0 is never a prediction target.
"""

import bz2
import gzip
import hashlib
import io
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

import numpy as np
import zstandard
from pydantic import Field

from unspool.core.errors import ConfigError
from unspool.data.sources.base import MAX_RECORD_BYTES, Bad, Document, FileSource, Filtered, Item
from unspool.data.sources.files import Unreadable, damaged, first_line, list_names

INDEX = "index.json"
BOUNDARIES = "indices"
_MISSING = f"{INDEX} names this shard, but the file does not exist"
_CHUNK = 1 << 20
_XXHASHES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
_MAX_COMPRESSED = 1 << 30  # maximum size of a decompressed shard
# The first byte of an array whose encoding does not give its type.
_DTYPES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4", 64: "u8", 65: "i8", 66: "f8"}
_DTYPE_NAMES = {np.dtype(code).name: code for code in _DTYPES.values()}


@dataclass(frozen=True, slots=True)
class _Shard:
    """The entry of one shard file in index.json."""

    names: list[str]
    encodings: list[str]
    sizes: list[int | None]  # None if the size varies; then it precedes the sample
    num_samples: int
    compression: str | None  # of the file that is read, if it is compressed
    raw_bytes: int
    hashes: dict[str, str]  # of the file that is read


class MdsSource(FileSource):
    """Folders of tokenized documents in MosaicML's MDS format, such as ProLong's public data."""

    kind: Literal["mds"]
    tokens: str = Field("input_ids", description="Column that holds the token ids.")
    mask: str | None = Field(
        "mask",
        description="Column that holds the loss mask (1: trained on, 0: not), in shards that have it. `null` trains "
        "on all tokens.",
    )

    endings: ClassVar[tuple[str, ...]] = (INDEX,)

    def units(self, root: Path) -> list[Path]:
        """List every shard once, even if several index.json files list it (ProLong has one per part and one for all).

        An index.json that cannot be read, or that lists a missing or unsafe file, is itself a unit.
        """
        found: set[Path] = set()
        for path in super().units(root):
            if path.name != INDEX:
                found.add(path)
                continue
            try:
                entries = _read_index(path)
            except Unreadable:
                found.add(path)
                continue
            for entry in entries:
                try:
                    shard = _shard_path(path, entry)
                except Unreadable:
                    shard = path
                found.add(shard if shard.is_file() else path)
        if not found:
            raise ConfigError(f"path {self.path!r}: the {INDEX} files there list no shard; write the dataset again.")
        return sorted(found)

    def input_files(self, units: Sequence[Path]) -> list[tuple[Path, Path]]:
        # The index next to a shard describes its content.
        indexes = sorted({unit.parent / INDEX for unit in units})
        beside = [(index, index) for index in indexes if index.is_file() and index not in units]
        return [*super().input_files(units), *beside]

    def has_loss_masks(self, units: Sequence[Path]) -> bool:
        known: dict[Path, dict[Path, Any]] = {}
        for path in units:
            try:
                if path.name != INDEX and self.mask in _find_shard(path, known).names:
                    return True
            except Unreadable:
                continue  # `read_units` reports it
        return False

    def estimate_tokens(self, files: Sequence[Path]) -> int:
        return int(sum(file.stat().st_size for file in files) / 4)  # bytes of a stored token

    def read_units(self, units: Sequence[Path], seed: int = 0) -> Iterator[Item]:
        known: dict[Path, dict[Path, Any]] = {}
        missing: set[Path] = set()
        for path in units:
            if path.name == INDEX:
                yield from _index_problems(path, missing)
                continue
            try:
                yield from _read_shard(path, _find_shard(path, known), self.tokens, self.mask)
            except Unreadable as error:
                yield Bad(str(path), "whole file", error.reason, error.detail)


def _read_shard(path: Path, shard: _Shard, column: str, mask_column: str | None) -> Iterator[Item]:
    if column not in shard.names:
        raise Unreadable("missing_field", f"no column {column!r}; it has {list_names(shard.names, 'no columns')}")
    with _open_shard(path, shard) as stream:
        size = stream.seek(0, io.SEEK_END)
        offsets = _read_offsets(stream, size, shard)
        for number, (begin, end) in enumerate(pairwise(offsets), start=1):
            try:
                data = _read_sample(stream, begin, end, size, first=4 * (len(offsets) + 1))
                columns = _split_columns(shard, data)
                yield from _documents(f"{path.parent.name}/{path.name}:{number}", columns, column, mask_column)
            except Unreadable as error:
                yield Bad(str(path), f"sample {number}", error.reason, error.detail)


# The index


def _read_index(index: Path) -> list[Any]:
    try:
        content = json.loads(index.read_bytes())
    except OSError as error:
        raise damaged(error, index) from error
    except (ValueError, RecursionError) as error:
        raise Unreadable("broken_json", f"not valid JSON ({first_line(error)})") from error
    shards = content.get("shards") if isinstance(content, dict) else None
    if not isinstance(shards, list):
        raise Unreadable("unreadable", "not an index of MDS shards; it has no list `shards`")
    return shards


def _shard_path(index: Path, entry: Any) -> Path:
    """Return the file to read: the shard itself, or its compressed form if that is missing."""
    raw, packed = (_file_path(index, entry, key) for key in ("raw_data", "zip_data"))
    path = packed if packed is not None and (raw is None or not raw.exists()) else raw
    if path is None:
        raise Unreadable("unreadable", "a shard without a file name")
    return path


def _file_path(index: Path, entry: Any, key: str) -> Path | None:
    info = entry.get(key) if isinstance(entry, dict) else None
    name = info.get("basename") if isinstance(info, dict) else None
    if not isinstance(name, str) or not name:
        return None
    path = Path(name)
    possible = name.isprintable() and len(name.encode(errors="replace")) < 256
    if not possible or path.is_absolute() or ".." in path.parts or path.name in ("", INDEX):
        raise Unreadable("unsafe_path", f"names {name[:80]!r}, which is not a shard below its folder")
    return index.parent / name


def _index_problems(index: Path, missing: set[Path]) -> Iterator[Item]:
    """Yield the problems of an index; a missing shard only if it is not in `missing` yet."""
    try:
        entries = _read_index(index)
    except Unreadable as error:
        yield Bad(str(index), "whole file", error.reason, error.detail)
        return
    for number, entry in enumerate(entries, start=1):
        try:
            shard = _shard_path(index, entry)
        except Unreadable as error:
            yield Bad(str(index), f"shard {number}", error.reason, error.detail)
            continue
        if not shard.is_file() and shard not in missing:
            missing.add(shard)
            yield Bad(str(shard), "whole file", "unreadable", _MISSING)


def _find_shard(path: Path, known: dict[Path, dict[Path, Any]]) -> _Shard:
    """Describe a shard by the nearest index.json that lists it."""
    for folder in path.parents:
        if folder not in known:
            known[folder] = _entries_by_path(folder / INDEX)
        if path in known[folder]:
            return _parse_shard(path, known[folder][path])
    raise Unreadable("unreadable", f"no {INDEX} in its folder or above lists this shard")


def _entries_by_path(index: Path) -> dict[Path, Any]:
    found = {}
    try:
        entries = _read_index(index) if index.is_file() else []
    except Unreadable:
        return {}  # the index itself is a unit, and read_units reports it
    for entry in entries:
        try:
            found.update({path: entry for key in ("raw_data", "zip_data") if (path := _file_path(index, entry, key))})
        except Unreadable:
            continue
    return found


def _parse_shard(path: Path, entry: dict[str, Any]) -> _Shard:
    if entry.get("format") != "mds" or entry.get("version") != 2:
        found = f"format {entry.get('format')!r}, version {entry.get('version')!r}"
        raise Unreadable("unreadable", f"{found}; only format 'mds', version 2 is supported")
    raw, packed = (_typed(entry, key, dict) for key in ("raw_data", "zip_data"))
    # Compare names only, because a merged index adds a leading folder.
    is_packed = Path(str(packed.get("basename"))).name == path.name
    shard = _Shard(
        names=_typed(entry, "column_names", list),
        encodings=_typed(entry, "column_encodings", list),
        sizes=_typed(entry, "column_sizes", list),
        num_samples=_typed(entry, "samples", int),
        compression=_typed(entry, "compression", str) or None if is_packed else None,
        raw_bytes=_typed(raw, "bytes", int),
        hashes=_typed(packed if is_packed else raw, "hashes", dict),
    )
    texts, sizes = (*shard.names, *shard.encodings), [size for size in shard.sizes if size is not None]
    if (
        not len(shard.names) == len(shard.encodings) == len(shard.sizes)
        or not all(isinstance(text, str) for text in texts)
        or not all(isinstance(size, int) and size >= 0 for size in sizes)
    ):
        raise Unreadable("unreadable", f"{INDEX} does not give a name, an encoding and a size for each column")
    return shard


def _typed(entry: dict[str, Any], key: str, kind: type) -> Any:
    """Return the value, or an empty one of its type if it is missing or has another type."""
    value = entry.get(key)
    return value if isinstance(value, kind) else kind()


# The shard


def _open_shard(path: Path, shard: _Shard) -> BinaryIO:
    try:
        _check_hashes(path, shard)
        return path.open("rb") if shard.compression is None else _decompress(path, shard, shard.compression)
    except (OSError, zlib.error, zstandard.ZstdError) as error:
        raise damaged(error, path) from error


def _check_hashes(path: Path, shard: _Shard) -> None:
    for name, expected in shard.hashes.items():
        digest: Any = None
        if name in hashlib.algorithms_guaranteed and not name.startswith("shake"):
            digest = hashlib.new(name)
        elif name in _XXHASHES and find_spec("xxhash"):
            digest = getattr(import_module("xxhash"), name)()
        if digest is None:
            continue
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        if digest.hexdigest() != expected:
            raise Unreadable("unreadable", f"damaged; its {name} hash differs from {INDEX}")


def _decompress(path: Path, shard: _Shard, compression: str) -> BinaryIO:
    """Decompress a shard; a truncated shard still gives its first samples."""
    method = compression.partition(":")[0]  # "zstd:7" is zstd at level 7
    if shard.raw_bytes > _MAX_COMPRESSED:
        raise Unreadable("too_long", f"decompresses to more than {_MAX_COMPRESSED >> 30} GiB; decompress it first")
    content = io.BytesIO()
    with path.open("rb") as file:
        if method == "zstd":
            stream: Any = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        elif method in ("gz", "bz2"):
            stream = gzip.GzipFile(fileobj=file) if method == "gz" else bz2.BZ2File(file)
        else:
            detail = f"compressed with {compression!r}; supported are zstd, gz and bz2: decompress the shards first"
            raise Unreadable("unreadable", detail)
        try:
            while chunk := stream.read(_CHUNK):
                if content.write(chunk) and content.tell() > shard.raw_bytes:
                    raise Unreadable("archive_bomb", f"expands to more than the {shard.raw_bytes} bytes in {INDEX}")
        except EOFError:
            pass  # missing samples are reported later, as for zstd, which raises nothing here
    return content


def _read_offsets(stream: BinaryIO, size: int, shard: _Shard) -> list[int]:
    """Read the offset of each sample, and the end of the last one."""
    stream.seek(0)
    head = stream.read(4)
    num_samples = int.from_bytes(head, "little")
    if len(head) < 4 or size < 4 * (num_samples + 2):
        raise Unreadable("truncated", f"truncated after {size} bytes, before its first sample")
    if num_samples != shard.num_samples:
        raise Unreadable("unreadable", f"holds {num_samples} samples, but {INDEX} says {shard.num_samples}")
    offsets: list[int] = np.frombuffer(stream.read(4 * (num_samples + 1)), dtype="<u4").tolist()
    return offsets


def _read_sample(stream: BinaryIO, begin: int, end: int, size: int, *, first: int) -> bytes:
    if not first <= begin <= end:
        raise Unreadable("bad_offsets", f"its offsets are invalid: byte {begin} to byte {end}")
    if end > size:
        raise Unreadable("truncated", f"it should end at byte {end}, but the shard is truncated after {size}")
    if end - begin > MAX_RECORD_BYTES:
        raise Unreadable("too_long", f"more than {MAX_RECORD_BYTES >> 20} MiB in one sample")
    stream.seek(begin)
    return stream.read(end - begin)


# The sample


def _split_columns(shard: _Shard, data: bytes) -> dict[str, tuple[str, bytes]]:
    """Split a sample into encoding and bytes by column. Variable sizes come first, then the columns."""
    num_variable = sum(1 for size in shard.sizes if not size)
    at = 4 * num_variable
    if len(data) < at:
        raise Unreadable("bad_offsets", f"{len(data)} bytes are too few for the sizes of {num_variable} columns")
    variable = iter(np.frombuffer(data, dtype="<u4", count=num_variable).tolist())
    columns = {}
    for name, encoding, size in zip(shard.names, shard.encodings, shard.sizes, strict=True):
        end = at + (size or next(variable))
        columns[name] = (encoding, data[at:end])
        at = end
    if at != len(data):
        raise Unreadable("bad_offsets", f"its columns take {at} bytes, but the sample has {len(data)}")
    return columns


def _documents(
    sample: str, columns: dict[str, tuple[str, bytes]], column: str, mask_column: str | None
) -> Iterator[Item]:
    tokens = _check_tokens(_decode_column(column, *columns[column]), column)
    mask = None
    if mask_column in columns:
        mask = _check_mask(_decode_column(mask_column, *columns[mask_column]), mask_column, len(tokens))
    if BOUNDARIES not in columns:
        yield Document(sample, "", tokens, loss_mask=mask) if len(tokens) else Filtered(sample, "empty")
        return
    borders = _check_boundaries(_decode_column(BOUNDARIES, *columns[BOUNDARIES]), len(tokens))
    for number, (begin, end) in enumerate(borders, start=1):
        name = f"{sample}.{number}"
        if end == begin:
            yield Filtered(name, "empty")
            continue
        yield Document(name, "", tokens[begin:end], loss_mask=None if mask is None else mask[begin:end])


def _decode_column(column: str, encoding: str, data: bytes) -> np.ndarray:
    kind, _, options = encoding.partition(":")
    if kind == "ndarray":
        return _decode_ndarray(column, options, data)
    if kind == "json":
        try:
            return np.array(json.loads(data))
        except (ValueError, RecursionError, OverflowError) as error:
            raise Unreadable("broken_json", f"column {column!r} holds no list of numbers") from error
    why = "pickled, and loading it could run any code" if kind == "pkl" else f"encoded as {encoding!r}"
    raise Unreadable("not_tokens", f"column {column!r} is {why}; supported are ndarray and json")


def _decode_ndarray(column: str, options: str, data: bytes) -> np.ndarray:
    """Decode an array whose type and shape are in the encoding ("uint32:65536") or else in the data."""
    dtype_name, _, dims = options.partition(":")
    at = 0
    try:
        if dtype_name:
            dtype = np.dtype(_DTYPE_NAMES[dtype_name]).newbyteorder("<")
        else:
            dtype = np.dtype(_DTYPES[data[0]]).newbyteorder("<")
            at = 1
        if dims:
            shape = [int(dim) for dim in dims.split(",")]
        else:
            num_dims, width = data[at] >> 2, data[at] & 3  # sizes of 1, 2, 4 or 8 bytes
            shape = np.frombuffer(data, dtype=f"<u{1 << width}", count=num_dims, offset=at + 1).tolist()
            at += 1 + (num_dims << width)
        if len(data) - at != math.prod(shape) * dtype.itemsize:
            raise ValueError("its values do not fill its shape")
        return np.frombuffer(data, dtype=dtype, offset=at).reshape(shape)
    except (KeyError, IndexError, ValueError) as error:
        raise Unreadable("not_tokens", f"column {column!r} is not an array of kind {options or 'any'!r}") from error


def _check_tokens(values: np.ndarray, column: str) -> np.ndarray:
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
        found = f"{values.ndim} dimensions of {values.dtype}"
        raise Unreadable("not_tokens", f"column {column!r} must hold one row of whole numbers, not {found}")
    if len(values) and not (values.min() >= 0 and values.max() < 1 << 32):
        raise Unreadable("not_tokens", f"column {column!r} holds {values.min()} to {values.max()}; use 32-bit ids")
    # Always copy, because the values may be unaligned.
    return values.astype(np.uint32)


def _check_mask(values: np.ndarray, column: str, num_tokens: int) -> np.ndarray:
    if values.shape != (num_tokens,):
        raise Unreadable("bad_mask", f"column {column!r} has the shape {values.shape} for {num_tokens} tokens")
    if num_tokens and (values.dtype.kind not in "biu" or not (values.min() >= 0 and values.max() <= 1)):
        found = f"{values.min()} to {values.max()} of {values.dtype}"
        raise Unreadable("bad_mask", f"column {column!r} must hold whole numbers 0 and 1, not {found}")
    return values.astype(np.bool_)


def _check_boundaries(values: np.ndarray, num_tokens: int) -> list[tuple[int, int]]:
    if values.size and (values.ndim != 2 or values.shape[1] != 2 or values.dtype.kind not in "iu"):
        raise Unreadable("bad_borders", f"column {BOUNDARIES!r} must hold pairs of whole numbers, not {values.shape}")
    pairs: list[tuple[int, int]] = [(begin, end) for begin, end in values.reshape(-1, 2).tolist()]
    last = 0
    for begin, end in sorted(pairs):
        if not last <= begin <= end <= num_tokens:
            detail = f"a document from token {begin} to {end} overlaps another or leaves the row of {num_tokens}"
            raise Unreadable("bad_borders", detail)
        last = end
    return pairs
