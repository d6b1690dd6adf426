"""Results that a recomputed layer does not compute again: those of attention kernels, and of matrix products.

In: calls of a layer, each in `with around():`. Out: in the forward pass the operators' results are kept, in the
recomputation they are given back in the same order, on the device or from host memory.
Promise: the very same bits; what a call does besides (shapes, copies, the graph) runs as always.
Price: the kept results; those of host memory are back on the device one layer ahead of their use.
Around single calls and not around the layer: compiled functions would not run under a dispatch mode.
Elsewhere: which calls these are (attention_parts.py, recompute.py), the host's memory (offload.py).
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from unspool.model.offload import Offloader, Stored, is_dense

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

# What surrounds the next call in this thread.
_mode: ContextVar[TorchDispatchMode | None] = ContextVar("keeping", default=None)


def around() -> AbstractContextManager[Any]:
    """The context of a call whose result is to be kept, where one is being kept at all."""
    return _mode.get() or nullcontext()


def keep_result_of(module: nn.Module) -> None:
    """Put a module's `forward` into `around`."""
    forward = module.forward

    def kept(*args: Any, **kwargs: Any) -> Any:
        with around():
            return forward(*args, **kwargs)

    module.forward = kept


class Kept:
    """The kept results of one checkpointed region in one pass."""

    def __init__(self, offloader: Offloader | None, before: "Kept | None") -> None:
        self._offloader = offloader
        self._before = before  # of the region that is computed again after this one
        self._results: deque[Any] = deque()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For `checkpoint`: of the region's forward pass, and of its recomputation."""
        return _using(_Keeping(self)), self._recomputation()

    def put(self, result: Any) -> None:
        self._results.append(tree_map_only(Tensor, self._put_tensor, result))

    def take(self) -> Any:
        result = self._results.popleft()
        return result if self._offloader is None else tree_map_only(Stored, self._offloader.take, result)

    def fetch(self) -> None:
        """Let what waits in host memory be on its way."""
        if self._offloader is not None:
            for result in self._results:
                tree_map_only(Stored, self._offloader.fetch, result)

    def _put_tensor(self, tensor: Tensor) -> Any:
        # Seeds and the like stay where they are, and so does what has gaps, which some kernels leave between heads.
        if self._offloader is None or tensor.dim() < 2 or not is_dense(tensor):
            return tensor.detach()
        return self._offloader.put(tensor)

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        self.fetch()
        if self._before is not None:
            self._before.fetch()
        with _using(_Giving(self)):
            yield


@contextmanager
def _using(mode: TorchDispatchMode) -> Iterator[None]:
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if _is_kept(func):
            self._kept.put(out)
        return out


class _Giving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._kept.take() if _is_kept(func) else func(*args, **kwargs or {})


def _is_kept(operator: Any) -> bool:
    """Products, and attention kernels, which are operators of their own and named so."""
    name = str(operator)
    is_attention = ("attention" in name or "attn" in name) and "backward" not in name
    return operator in _PRODUCTS or is_attention
