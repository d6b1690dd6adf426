"""One rank of many in one process: torch's fake process group, with the bytes of every collective counted.

The fake group sends nothing. Some of its collectives leave their output as it was, which would give random gradients,
so `Simulated` fills outputs from the rank's own input: gathered weights repeat its shard, a reduced gradient is its own
part, and received keys are the ones it sent. Shapes, memory and work are those of a real rank; values are not.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

# Kinds of collectives, and the functions of torch.distributed that start them. torch 2.13 renamed two.
FUNCTIONS = {
    "all-gather": ("all_gather_into_tensor", "all_gather_single"),
    "reduce-scatter": ("reduce_scatter_tensor", "reduce_scatter_single"),
    "all-to-all": ("all_to_all_single",),
    "all-reduce": ("all_reduce",),
    "send": ("batch_isend_irecv",),
}


class Finished:
    """A collective that is over."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Simulated:
    """Counts calls and bytes that this rank sends, by kind and size of the group."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, int]] = Counter()
        self.bytes: Counter[tuple[str, int]] = Counter()

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()

    def add(self, kind: str, ranks: int, sent: float) -> None:
        self.calls[kind, ranks] += 1
        self.bytes[kind, ranks] += round(sent)

    def total(self, kind: str) -> int:
        return sum(value for (own, _), value in self.bytes.items() if own == kind)

    def as_plain(self) -> list[dict[str, Any]]:
        keys = sorted(self.calls)
        return [
            {"kind": kind, "ranks": ranks, "calls": self.calls[kind, ranks], "bytes": self.bytes[kind, ranks]}
            for kind, ranks in keys
        ]

    # Replacements of torch.distributed's functions; the first two arguments have other names in other versions.

    def all_gather(self, output: Tensor, own: Tensor, group: Any) -> None:
        ranks = dist.get_world_size(group)
        self.add("all-gather", ranks, own.nbytes * (ranks - 1))
        parts = output.view(ranks, -1)
        # FSDP gathers in place: its input is the first part of its output.
        missing = parts[1:] if own.data_ptr() == output.data_ptr() else parts
        # One kernel; the fake group would copy once per rank.
        missing.copy_(own.reshape(1, -1).expand(len(missing), -1))

    def reduce_scatter(self, output: Tensor, whole: Tensor, group: Any) -> None:
        ranks = dist.get_world_size(group)
        self.add("reduce-scatter", ranks, whole.nbytes * (ranks - 1) / ranks)
        output.view(-1).copy_(whole.reshape(ranks, -1)[dist.get_rank(group)])

    def all_to_all(self, output: Tensor, own: Tensor, group: Any) -> None:
        ranks = dist.get_world_size(group)
        self.add("all-to-all", ranks, own.nbytes * (ranks - 1) / ranks)
        output.copy_(own)

    def all_reduce(self, tensor: Tensor, group: Any) -> None:
        ranks = dist.get_world_size(group)
        self.add("all-reduce", ranks, 2 * tensor.nbytes * (ranks - 1) / ranks)

    def send(self, messages: list[Any]) -> list[Finished]:
        sent = [message for message in messages if message.op is dist.isend]
        received = [message for message in messages if message.op is dist.irecv]
        for one, other in zip(sent, received, strict=True):
            self.add("send", dist.get_world_size(one.group), one.tensor.nbytes)
            other.tensor.copy_(one.tensor)
        return [Finished() for _ in messages]


@contextmanager
def simulated_ranks(world_size: int) -> Iterator[Simulated]:
    """Be rank 0 of `world_size` ranks that exist only as bytes; yield the counts."""
    counts = Simulated()
    handlers: dict[str, Callable[..., None]] = {
        "all-gather": counts.all_gather,
        "reduce-scatter": counts.reduce_scatter,
        "all-to-all": counts.all_to_all,
    }
    before = {name: getattr(dist, name) for names in FUNCTIONS.values() for name in names if hasattr(dist, name)}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    for kind, handler in handlers.items():
        for name in FUNCTIONS[kind]:
            if name in before:
                setattr(dist, name, _of_two_tensors(handler))
    dist.all_reduce = _of_one_tensor(counts.all_reduce)
    dist.batch_isend_irecv = counts.send
    try:
        yield counts
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
        dist.destroy_process_group()


def _of_two_tensors(handler: Callable[..., None]) -> Callable[..., Any]:
    names = ("output_tensor", "output"), ("input_tensor", "input")

    @torch.no_grad()
    def collective(*tensors: Tensor, group: Any = None, async_op: bool = False, **options: Any) -> Any:
        found = [*tensors, *(options[name] for pair in names for name in pair if name in options)]
        assert len(found) == 2, "output, then input"
        assert not options.get("output_split_sizes"), "even parts only"
        handler(*found, group)
        return Finished() if async_op else None

    return collective


def _of_one_tensor(handler: Callable[..., None]) -> Callable[..., Any]:
    def collective(tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        handler(tensor, group)
        return Finished() if async_op else None

    return collective
