"""One step of writing as one launch: a CUDA graph.

In: a function that reads and changes the same tensors in every call. Out: the graph, or None where it cannot be one.
Promise: those tensors are as before; a function that cannot be captured costs two calls of it and is told of once.
Price: memory for the intermediate results of one call, until the graph is reset.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from unspool.base.progress import say


def captured(step: Callable[[], None], state: Sequence[Tensor]) -> torch.cuda.CUDAGraph | None:
    """`state`: all that `step` goes on from; what else it writes must not matter to a later call."""
    device = state[0].device
    before = [tensor.clone() for tensor in state]
    # Kernels are chosen and libraries loaded outside of the capture, on another stream, as torch asks for.
    stream, main = _side_stream(device), torch.cuda.current_stream(device)
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(main)
    try:
        with torch.cuda.stream(stream):
            step()
            with _waiting_forbidden():
                step()
        main.wait_stream(stream)
        # Other threads of this process may use the device for something else.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
    except RuntimeError as error:
        _say_once(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}")
        return None
    finally:
        # Where a capture cannot be ended, torch stays on its stream.
        torch.cuda.set_stream(main)
        main.wait_stream(stream)
        for tensor, kept in zip(state, before, strict=True):
            tensor.copy_(kept)
    return graph


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """Whatever waits for the device raises. In a capture it would too, and leave the allocator in disorder."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # That it does not find everything is no matter here: the capture comes next.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all batches: libraries keep a workspace for every stream that they have seen."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


@cache
def _say_once(reason: str) -> None:
    say(f"answers are written without a CUDA graph, which takes longer ({reason})")
