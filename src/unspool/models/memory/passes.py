"""Which pass of a layer runs: a forward pass under a checkpoint, whose saved tensors are dropped, or another one."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_dropped: ContextVar[bool] = ContextVar("dropped", default=False)


@contextmanager
def dropping_saved() -> Iterator[None]:
    """Mark the forward pass inside as one that the backward pass recomputes."""
    token = _dropped.set(True)
    try:
        yield
    finally:
        _dropped.reset(token)


def saves_nothing() -> bool:
    """Return whether tensors that this pass saves for the backward pass are dropped, so that only shapes matter."""
    return _dropped.get()
