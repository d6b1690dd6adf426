"""Offloading: tensors stored in host memory between the forward and the backward pass.

Tensors return in reverse order, byte for byte and in the same layout, which backward kernels rely on. Copies run on a
separate CUDA stream while the device computes. Host memory is a pool of blocks of one size, pinned once and reused by
every micro-batch of any length. A tensor takes whole blocks, because torch pins memory in powers of two: a tensor of 5
GiB alone would take 8 GiB. Pinning 94 GiB takes 20 s and more, so `reserve` pins in the background while the first step
is compiled. On a CPU the same blocks are used, which saves nothing.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

import torch
from torch import Tensor

from unspool.core.errors import UnspoolError
from unspool.models.memory.host_bytes import BLOCK_BYTES

# Most bytes on the device that wait for their copies to the host; more is faster and takes more memory.
MAX_PENDING = 6 << 30
PINNING_THREADS = 4  # each pins one block at a time


@dataclass(eq=False)
class Stored:
    """An offloaded tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    blocks: list[Tensor]
    before: "Stored | None"  # the tensor needed next in the backward pass, if known
    on_device: Tensor | None  # until the copy to the host is done, and again after the prefetch
    copied: Any  # CUDA event of the last copy, in either direction


class Offloader:
    """Copies tensors to the host and back; the next tensor is prefetched while the current one is used."""

    def __init__(self, device: torch.device, *, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.free: list[Tensor] = []
        self.num_blocks = 0
        self._changed = Condition()  # guards the counts and `free`
        self._reserved = 0  # background threads pin blocks until there are this many
        self._pinning = 0  # blocks in `num_blocks` that they have not finished
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pending: deque[Stored] = deque()

    def reserve(self, num_bytes: int) -> None:
        """Start to pin `num_bytes` in the background. Blocks can be used as soon as each is pinned."""
        with self._changed:
            self._reserved = num_bytes // self.block_bytes
        for _ in range(min(PINNING_THREADS, self._reserved - self.num_blocks)):
            Thread(target=self._pin_reserved, name="unspool-pin").start()

    def put(self, tensor: Tensor, *, before: Stored | None = None) -> Stored:
        """Start the copy to the host; a later call releases the device memory."""
        tensor = tensor.detach()
        assert is_dense(tensor), "a tensor with gaps cannot be copied as one range of bytes"
        content = _as_bytes(tensor)
        self._release(len(content))
        blocks = [self._block() for _ in range(0, len(content), self.block_bytes)]
        stored = Stored(tensor.shape, tensor.stride(), tensor.dtype, blocks, before, on_device=tensor, copied=None)
        with self._copy_stream():
            for block, piece in zip(blocks, torch.split(content, self.block_bytes), strict=True):
                block[: len(piece)].copy_(piece, non_blocking=True)
            stored.copied = self._record_event()
        self._pending.append(stored)
        return stored

    def take(self, stored: Stored) -> Tensor:
        """Return the tensor on the device (only once), and prefetch the one before it."""
        assert stored.blocks or stored.on_device is not None, "a checkpoint was read twice"
        self.fetch(stored)
        self._wait(stored.copied)
        tensor = stored.on_device
        assert tensor is not None
        stored.on_device = None
        # The next copy into these blocks runs on the same stream, so after this copy.
        with self._changed:
            self.free += stored.blocks
        stored.blocks = []
        if stored in self._pending:
            self._pending.remove(stored)
        if stored.before is not None:
            self.fetch(stored.before)
        return tensor

    def fetch(self, stored: Stored) -> None:
        """Start the copy to the device, unless the tensor is there or was taken already."""
        if stored.on_device is not None or not stored.blocks:
            return
        # Allocated on the compute stream, which uses it, and freed after waiting for the copy.
        tensor = torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device=self.device)
        content = _as_bytes(tensor)
        with self._copy_stream():
            for block, piece in zip(stored.blocks, torch.split(content, self.block_bytes), strict=True):
                piece.copy_(block[: len(piece)], non_blocking=True)
            stored.copied = self._record_event()
        stored.on_device = tensor

    def release(self) -> int:
        """Free all blocks that hold no tensor, and return their bytes."""
        with self._changed:
            self._reserved = 0
            self._changed.wait_for(lambda: not self._pinning)
            released = len(self.free) * self.block_bytes
            self.num_blocks -= len(self.free)
            self.free.clear()
        if self._stream is not None:
            # torch caches freed pinned memory; the name of the function that frees it differs between versions.
            names = ("_accelerator_emptyHostCache", "_host_emptyCache")
            next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), lambda: None)()
        return released

    def _release(self, coming: int) -> None:
        """Release device memory of copied tensors; wait for the oldest pending copies if too many bytes are pending."""
        while self._pending:
            oldest = self._pending[0]
            pending = coming + sum(len(stored.blocks) for stored in self._pending) * self.block_bytes
            if pending <= MAX_PENDING and not (oldest.copied is None or oldest.copied.query()):
                return
            self._wait(oldest.copied)
            oldest.on_device = None
            self._pending.popleft()

    def _block(self) -> Tensor:
        with self._changed:
            self._changed.wait_for(lambda: self.free or not self._pinning)
            if self.free:
                return self.free.pop()
            self.num_blocks += 1
        try:
            return self._pin()
        except (RuntimeError, MemoryError) as error:
            self.num_blocks -= 1
            taken = self.num_blocks * self.block_bytes / (1 << 30)
            raise UnspoolError(
                f"host memory: no more than {taken:.1f} GiB could be pinned for activations "
                f"({str(error).splitlines()[0]}); lower keep_on_host, or raise layers_per_checkpoint."
            ) from error

    def _pin(self) -> Tensor:
        return torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    def _pin_reserved(self) -> None:
        while True:
            with self._changed:
                if self.num_blocks >= self._reserved:
                    return
                self.num_blocks += 1
                self._pinning += 1
            try:
                found = [self._pin()]
            except (RuntimeError, MemoryError):  # `_block` reports it if so many blocks are needed
                found = []
            with self._changed:
                self._pinning -= 1
                self.free += found
                if not found:
                    self.num_blocks -= 1
                    self._reserved = 0
                self._changed.notify_all()

    @contextmanager
    def _copy_stream(self) -> Iterator[None]:
        """Use the copy stream, after the work that is queued on the compute stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def _record_event(self) -> Any:
        return None if self._stream is None else self._stream.record_event()

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one contiguous range of memory, in any order."""
    by_stride = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    expected = 1
    for stride, size in by_stride:
        if stride != expected:
            return False
        expected *= size
    return True


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a dense tensor as bytes, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
