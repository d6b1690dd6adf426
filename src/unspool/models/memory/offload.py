"""Layer inputs in host memory between the forward and the backward pass.

In: tensors in the order of the layers. Out: the same tensors, asked for in the opposite order.
Promise: every byte comes back, in the same layout, which kernels of backward passes rely on; the device computes while
bytes move, on a stream of their own.
Host memory is a pool of blocks of one size, pinned once and used again by every micro-batch whatever its length.
A tensor of any size takes whole blocks: pinned memory comes in powers of two, so one tensor of 5 GiB would take 8.
Elsewhere: which tensors these are (recompute.py, keep.py).
On a CPU there is no other memory to move to. The same blocks are filled and emptied there, which saves nothing.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 64 << 20
# Bytes that may wait on the device for their copies to the host; more would be faster and take more memory.
MOST_LEAVING = 6 << 30


@dataclass(eq=False)
class Stored:
    """A tensor that was put away."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    blocks: list[Tensor]
    before: "Stored | None"  # will be asked for next, where that is known
    on_device: Tensor | None  # until the copy is done, and again from the prefetch on
    copied: Any  # CUDA event of the last copy, in either direction


class Offloader:
    """Puts tensors away and brings them back, the next one while the last one is worked on."""

    def __init__(self, device: torch.device, *, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.free: list[Tensor] = []
        self.num_blocks = 0
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._leaving: deque[Stored] = deque()

    def put(self, tensor: Tensor, *, before: Stored | None = None) -> Stored:
        """Start the copy to the host; the tensor is let go when a later one is put away."""
        tensor = tensor.detach()
        assert is_dense(tensor), "between its numbers are others, which would stay behind"
        content = _as_bytes(tensor)
        self._let_go(len(content))
        blocks = [self._block() for _ in range(0, len(content), self.block_bytes)]
        stored = Stored(tensor.shape, tensor.stride(), tensor.dtype, blocks, before, on_device=tensor, copied=None)
        with self._beside():
            for block, piece in zip(blocks, torch.split(content, self.block_bytes), strict=True):
                block[: len(piece)].copy_(piece, non_blocking=True)
            stored.copied = self._mark()
        self._leaving.append(stored)
        return stored

    def take(self, stored: Stored) -> Tensor:
        """The tensor on the device again, once; the one before it starts on its way."""
        assert stored.blocks or stored.on_device is not None, "a checkpoint was asked for twice"
        self.fetch(stored)
        self._wait(stored.copied)
        tensor = stored.on_device
        assert tensor is not None
        stored.on_device = None
        self._give_back(stored)
        if stored in self._leaving:
            self._leaving.remove(stored)
        if stored.before is not None:
            self.fetch(stored.before)
        return tensor

    def fetch(self, stored: Stored) -> None:
        """Start the copy to the device, unless the tensor is there or has been taken."""
        if stored.on_device is not None or not stored.blocks:
            return
        # Memory of the computing stream: it is used there, and freed there after the wait for the copy.
        tensor = torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device=self._device)
        content = _as_bytes(tensor)
        with self._beside():
            for block, piece in zip(stored.blocks, torch.split(content, self.block_bytes), strict=True):
                piece.copy_(block[: len(piece)], non_blocking=True)
            stored.copied = self._mark()
        stored.on_device = tensor

    def _let_go(self, coming: int) -> None:
        """Device memory of tensors that have been copied; of the oldest others as well if too much is on its way."""
        while self._leaving:
            oldest = self._leaving[0]
            on_its_way = coming + sum(len(stored.blocks) for stored in self._leaving) * self.block_bytes
            if on_its_way <= MOST_LEAVING and not (oldest.copied is None or oldest.copied.query()):
                return
            self._wait(oldest.copied)
            oldest.on_device = None
            self._leaving.popleft()

    def _block(self) -> Tensor:
        if self.free:
            return self.free.pop()
        self.num_blocks += 1
        return torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    def _give_back(self, stored: Stored) -> None:
        # Whoever gets these blocks next writes them on the same stream, so after this copy.
        self.free += stored.blocks
        stored.blocks = []

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Work on the copying stream, after what is queued for computing."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _mark(self) -> Any:
        return None if self._stream is None else self._stream.record_event()

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def is_dense(tensor: Tensor) -> bool:
    """Whether its numbers fill one stretch of memory, in whatever order."""
    by_stride = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    expected = 1
    for stride, size in by_stride:
        if stride != expected:
            return False
        expected *= size
    return True


def _as_bytes(tensor: Tensor) -> Tensor:
    """Of one that is dense, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
