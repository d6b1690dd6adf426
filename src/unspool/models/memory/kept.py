"""Kernel results that activation checkpointing keeps instead of recomputing them.

Kernels are called through `call`. In the forward pass of a checkpointed region, `call` records the kernel's result. In
the recomputation, the recorded results replace the kernels in the same order, from device or host memory. Everything
else in the region (shapes, copies, the autograd graph) runs twice as usual. Results are bit-identical, because a kept
result is the tensor of the forward pass.

Only operators in `_OPERATORS` that run inside `call` are recorded. Every recorded result has a key (operator, shapes
and dtypes of the tensor arguments). The recomputation must request the same keys and use every result. If the two
passes differ, an error is raised instead of computing with the wrong tensor.

`call` wraps single kernels instead of layers, because compiled functions do not run under a dispatch mode.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.attention.varlen  # registers torch.ops.torch_attn
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import _StopRecomputationError

from unspool.core.errors import ConfigError
from unspool.models.memory.offload import Offloader, Stored, is_dense

_NAMES = {
    "aten": (
        "mm",
        "addmm",
        "_scaled_mm",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_attention_math_for_mps",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
    ),
    "torch_attn": ("_varlen_attn",),  # operator behind `varlen_attn`
}


def _find_operators() -> frozenset[Any]:
    """Return every operator in `_OPERATORS` that this version of torch has."""
    packets = (getattr(getattr(torch.ops, space), name, None) for space, names in _NAMES.items() for name in names)
    return frozenset(packet.default for packet in packets if packet is not None)


_OPERATORS = _find_operators()

# This thread's mode for kernel calls: recording, replaying or neither.
_mode: ContextVar["_Recording | _Replaying | None"] = ContextVar("keeping", default=None)


def call(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a kernel; a checkpointed region that keeps results records or replays its result."""
    mode = _mode.get()
    if mode is None:
        return kernel(*args, **kwargs)
    # The mode is off inside, so that a nested `call` does not record the same result twice.
    with _using(None), mode:
        return kernel(*args, **kwargs)


def call_foreign(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an attention function that does not use `call` itself; refuse it if none of its kernels can be kept."""
    mode = _mode.get()
    before = mode.count if isinstance(mode, _Recording) else 0
    out = call(function, *args, **kwargs)
    if isinstance(mode, _Recording) and mode.count == before:
        raise ConfigError(
            f"activation_checkpointing: attention {name!r} runs no kernel whose result can be kept; set "
            "activation_checkpointing to full, or load the model with unspool.load."
        )
    return out


def replays() -> bool:
    """Return whether results of the forward pass replace those of kernels here, inside a `call`."""
    return any(isinstance(mode, _Replaying) for mode in _get_current_dispatch_mode_stack())


def keep_result_of(module: nn.Module) -> None:
    """Send a module's `forward` through `call`."""
    forward = module.forward

    def kept(*args: Any, **kwargs: Any) -> Any:
        return call(forward, *args, **kwargs)

    module.forward = kept


class Key(NamedTuple):
    """The properties that a kernel call and its recomputation must share."""

    operator: str
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def __str__(self) -> str:
        tensors = ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in self.tensors)
        return f"{self.operator}({tensors})"


def key_of(operator: Any, args: Any, kwargs: Any) -> Key:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return Key(str(operator), tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors))


class _Entry(NamedTuple):
    key: Key
    result: Any
    num_saved: int  # number of tensors that autograd saved in the region before this call


class Kept:
    """The kept results of one checkpointed region in one pass."""

    def __init__(self, offloader: Offloader | None, before: "Kept | None") -> None:
        self._offloader = offloader
        self._before = before  # kept results of the region that is recomputed after this one
        self._entries: deque[_Entry] = deque()
        self._saved = _Saved()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return two contexts for `checkpoint`: for the region's forward pass and for its recomputation."""
        return self._forward(), self._recomputation()

    def put(self, key: Key, result: Any) -> None:
        self._entries.append(_Entry(key, tree_map_only(Tensor, self._put_tensor, result), self._saved.count))

    def take(self, key: Key) -> Any:
        if not self._entries:
            raise RuntimeError(
                f"A bug in Unspool: the recomputation of a layer requests the kept result of {key}, but the forward "
                "pass recorded no further result."
            )
        entry = self._entries.popleft()
        if entry.key != key:
            raise RuntimeError(
                f"A bug in Unspool: the recomputation of a layer requests the kept result of {key}, but the forward "
                f"pass recorded {entry.key} at this place."
            )
        return self._on_device(entry.result)

    def fetch(self) -> None:
        """Start copying results in host memory back to the device."""
        if self._offloader is not None:
            for entry in self._entries:
                tree_map_only(Stored, self._offloader.fetch, entry.result)

    def _put_tensor(self, tensor: Tensor) -> Any:
        # Small tensors such as seeds stay on the device, and so do non-dense tensors, which some kernels return.
        if self._offloader is None or tensor.dim() < 2 or not is_dense(tensor):
            return tensor.detach()
        return self._offloader.put(tensor)

    def _on_device(self, result: Any) -> Any:
        return result if self._offloader is None else tree_map_only(Stored, self._offloader.take, result)

    @contextmanager
    def _forward(self) -> Iterator[None]:
        with self._saved.counting(), _using(_Recording(self)):
            yield
        # `checkpoint` stops the recomputation once it has saved as many tensors as the forward pass. So later kernels
        # do not run.
        while self._entries and self._entries[-1].num_saved == self._saved.count:
            self._on_device(self._entries.pop().result)  # returns the blocks of host memory

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        self.fetch()
        if self._before is not None:
            self._before.fetch()
        with _using(_Replaying(self)):
            try:
                yield
            except _StopRecomputationError:
                self._check_all_taken()
                raise
            self._check_all_taken()

    def _check_all_taken(self) -> None:
        if self._entries:
            raise RuntimeError(
                f"A bug in Unspool: the forward pass of a layer recorded {len(self._entries)} more kept results than "
                f"its recomputation requested, first {self._entries[0].key}."
            )


class _Saved:
    """A counter of the tensors that autograd saves in a checkpointed region."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count saved tensors; the active hooks, those of `checkpoint`, save them."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        assert hooks is not None, "results can be kept only inside a checkpoint"
        pack, unpack = hooks

        def counted(tensor: Tensor) -> Any:
            self.count += 1
            return pack(tensor)

        with saved_tensors_hooks(counted, unpack):
            yield


@contextmanager
def _using(mode: "_Recording | _Replaying | None") -> Iterator[None]:
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records the results of the operators in `_OPERATORS`."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if func in _OPERATORS:
            self._kept.put(key_of(func, args, kwargs), out)
            self.count += 1
        return out


class _Replaying(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that replaces the operators in `_OPERATORS` with their recorded results."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._kept.take(key_of(func, args, kwargs)) if func in _OPERATORS else func(*args, **kwargs or {})
