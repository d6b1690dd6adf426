"""Write safetensors files straight from tensors, several at a time.

The `safetensors` library holds the GIL while it writes, which blocks training, and needs GPU tensors in host memory.
Here threads write and hash in chunks, without the GIL and without a second copy. The bytes are the same. Digests are
cached, so that no later step reads the files again.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unspool.core.artifacts import MAX_THREADS, remember_digest
from unspool.core.errors import naming

CHUNK_BYTES = 32 << 20
# Order of tensors in a file, as in `safetensors`: first by type (last type first), then by name.
_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
TORCH_TYPES = {name: dtype for dtype, name in _TYPES.items()}
_ORDER = {dtype: number for number, dtype in enumerate(_TYPES)}


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file to be written."""

    path: Path
    tensors: Mapping[str, Tensor]  # on any device
    metadata: Mapping[str, str] | None = None


def write_tensor_files(files: Sequence[TensorFile], *, sync: bool = False) -> None:
    """Write all `files`; with `sync`, flush them to the disk and not only to the page cache."""
    with ThreadPoolExecutor(min(MAX_THREADS, max(1, len(files))), "unspool-tensors") as pool:
        for done in [pool.submit(_write, file, sync=sync) for file in files]:
            done.result()


def write_streamed(file: TensorFile, compute: Callable[[str], Tensor]) -> None:
    """Write a file of meta tensors, whose values `compute` returns by name, one tensor in memory at a time."""
    _write(file, sync=False, compute=compute)


def _write(file: TensorFile, *, sync: bool, compute: Callable[[str], Tensor] | None = None) -> None:
    ordered = sorted(file.tensors.items(), key=lambda item: (-_ORDER[item[1].dtype], item[0]))
    hashed = hashlib.sha256()
    with naming(file.path), ThreadPoolExecutor(1, "unspool-digest") as pool, file.path.open("wb", buffering=0) as out:
        for chunk in _chunks(ordered, file.metadata, compute):
            hashing = pool.submit(hashed.update, chunk)
            left = chunk
            while left:
                left = left[out.write(left) :]
            hashing.result()
        if sync:
            os.fsync(out.fileno())
        state = os.fstat(out.fileno())
    remember_digest(state, hashed.hexdigest())


def _chunks(
    ordered: Sequence[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None,
    compute: Callable[[str], Tensor] | None = None,
) -> Iterator[memoryview]:
    """Yield the bytes of a file. Each chunk is valid until the next one is requested."""
    yield memoryview(_header(ordered, metadata))
    buffer: Tensor | None = None
    for name, empty in ordered:
        tensor = empty if compute is None else compute(name)
        assert (tensor.shape, tensor.dtype) == (empty.shape, empty.dtype), name
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for begin in range(0, len(flat), CHUNK_BYTES):
            part = flat[begin : begin + CHUNK_BYTES]
            if not part.is_cpu:
                buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) if buffer is None else buffer
                part = buffer[: len(part)].copy_(part)
            yield part.numpy().data


def _header(ordered: Sequence[tuple[str, Tensor]], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
