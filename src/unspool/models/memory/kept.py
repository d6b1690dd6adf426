"""Kernel results that activation checkpointing keeps instead of recomputing.

A call of a kernel goes through `call`. In the forward pass of a checkpointed region `call` records the kernel's
result. In the recomputation the recorded results replace the kernels, in the same order, from device memory or from
host memory. Everything else in the region (shapes, copies, the autograd graph) runs twice as usual. Results have the
same bits, since a kept result is the very tensor of the forward pass.

A result is kept only if the call goes through `call` and its operator is in `_OPERATORS`. A kernel that runs in the
region for another reason is not recorded. Every recorded result has a key (operator, shapes and dtypes of the tensor
arguments). The recomputation must ask for the same keys and take every result; if the two passes differ, it raises an
error instead of computing with the wrong tensor.

`call` surrounds single kernels and not the layer, because compiled functions do not run under a dispatch mode.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import _StopRecomputationError

from unspool.core.errors import ConfigError
from unspool.models.memory.offload import Offloader, Stored, is_dense

_NAMES = {
    "aten": (
        "mm",
        "addmm",
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
    "torch_attn": ("_varlen_attn",),  # what `varlen_attn` calls
}


def _find_operators() -> frozenset[Any]:
    """Every listed operator that this version of torch has."""
    packets = (getattr(getattr(torch.ops, space), name, None) for space, names in _NAMES.items() for name in names)
    return frozenset(packet.default for packet in packets if packet is not None)


_OPERATORS = _find_operators()

# The mode for kernel calls in this thread: recording, replaying or neither.
_mode: ContextVar["_Recording | _Replaying | None"] = ContextVar("keeping", default=None)


def call(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a kernel; its result is kept inside of a checkpointed region that keeps results."""
    mode = _mode.get()
    if mode is None:
        return kernel(*args, **kwargs)
    # Without the mode inside, so that a nested `call` does not record the same result twice.
    with _using(None), mode:
        return kernel(*args, **kwargs)


def call_foreign(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an attention function that does not use `call` itself; refuse it if it runs no kernel that can be kept."""
    mode = _mode.get()
    before = mode.count if isinstance(mode, _Recording) else 0
    out = call(function, *args, **kwargs)
    if isinstance(mode, _Recording) and mode.count == before:
        raise ConfigError(
            f"activation_checkpointing: attention {name!r} runs no kernel whose result can be kept; set "
            "activation_checkpointing to full, or load the model with Unspool's attention."
        )
    return out


def keep_result_of(module: nn.Module) -> None:
    """Send a module's `forward` through `call`."""
    forward = module.forward

    def kept(*args: Any, **kwargs: Any) -> Any:
        return call(forward, *args, **kwargs)

    module.forward = kept


class Key(NamedTuple):
    """What a kernel call must have in common with its recomputation."""

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
    num_saved: int  # tensors that autograd saved in the region before this call


class Kept:
    """The kept results of one checkpointed region in one pass."""

    def __init__(self, offloader: Offloader | None, before: "Kept | None") -> None:
        self._offloader = offloader
        self._before = before  # of the region that is recomputed after this one
        self._entries: deque[_Entry] = deque()
        self._saved = _Saved()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for `checkpoint`: of the region's forward pass, and of its recomputation."""
        return self._forward(), self._recomputation()

    def put(self, key: Key, result: Any) -> None:
        self._entries.append(_Entry(key, tree_map_only(Tensor, self._put_tensor, result), self._saved.count))

    def take(self, key: Key) -> Any:
        if not self._entries:
            raise RuntimeError(
                f"A bug in Unspool: the recomputation of a layer asks for the kept result of {key}, but the forward "
                "pass recorded no further result."
            )
        entry = self._entries.popleft()
        if entry.key != key:
            raise RuntimeError(
                f"A bug in Unspool: the recomputation of a layer asks for the kept result of {key}, but the forward "
                f"pass recorded {entry.key} at this place."
            )
        return self._on_device(entry.result)

    def fetch(self) -> None:
        """Start the copies of results that are in host memory."""
        if self._offloader is not None:
            for entry in self._entries:
                tree_map_only(Stored, self._offloader.fetch, entry.result)

    def _put_tensor(self, tensor: Tensor) -> Any:
        # Small tensors such as seeds stay on the device, and so do tensors with gaps, as some kernels return them.
        if self._offloader is None or tensor.dim() < 2 or not is_dense(tensor):
            return tensor.detach()
        return self._offloader.put(tensor)

    def _on_device(self, result: Any) -> Any:
        return result if self._offloader is None else tree_map_only(Stored, self._offloader.take, result)

    @contextmanager
    def _forward(self) -> Iterator[None]:
        with self._saved.counting(), _using(_Recording(self)):
            yield
        # `checkpoint` stops the recomputation as soon as it has saved the last tensor that the forward pass saved.
        # Later kernels are not reached.
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
                f"its recomputation asked for, first {self._entries[0].key}."
            )


class _Saved:
    """The number of tensors that autograd has saved in a checkpointed region."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count saved tensors; the hooks in place, those of `checkpoint`, save them."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        assert hooks is not None, "results are kept inside of a checkpoint only"
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
    """Records the results of the listed operators."""

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
    """Replaces the listed operators by their recorded results."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._kept.take(key_of(func, args, kwargs)) if func in _OPERATORS else func(*args, **kwargs or {})
