"""Attention over a row that lies on several ranks, by exchanging heads (Ulysses).

In: queries, keys and values of a rank's own tokens, all heads, already rotated. Out: the attention output of these
tokens; in between every rank has the whole row of some heads, on which any kernel, mask and window works as ever.
Promise: keys and values travel as they are: un-duplicated where every rank gets whole KV heads, else each rank gets
just the one that its query heads share. One collective before the kernel and one after it, backward too, always in
the same order, so that recomputed layers repeat them alike.
Price: per token and layer (query heads + 2 × KV heads) + query heads go over the wire: 80 slices for Llama-3-8B.
Why functions of our own and not torch's differentiable all-to-all: they pack straight into what is sent, so that
there is one copy each way, and the backward pass of a duplicated KV head is a sum in a fixed order.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Heads = tuple[Tensor, Tensor, Tensor]  # query, key, value


def gather_tokens(query: Tensor, key: Tensor, value: Tensor, group: Any) -> Heads:
    """From [1, all heads, own tokens, D] to [1, own heads, all tokens, D]; ranks' tokens come in their order."""
    assert len(query) == 1, "a packed batch is one sequence"
    heads: Heads = _Gather.apply(query, key, value, group)  # type: ignore[no-untyped-call]
    return heads


def gather_heads(out: Tensor, group: Any) -> Tensor:
    """From [1, all tokens, own heads, D] back to [1, own tokens, all heads, D]."""
    gathered: Tensor = _Return.apply(out, group)  # type: ignore[no-untyped-call]
    return gathered


def own_query_heads(per_query_head: Tensor, group: Any) -> Tensor:
    """Of something that each query head has: what belongs to the heads that this rank computes."""
    return per_query_head.tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any) -> Heads:
        ctx.group, ctx.shapes = group, [tensor.shape for tensor in (query, key, value)]
        degree = dist.get_world_size(group)
        widths = [_width(shape, degree) for shape in ctx.shapes]
        send = query.new_empty(degree, query.shape[2], sum(widths))
        for tensor, place in zip((query, key, value), torch.split(send, widths, dim=-1), strict=True):
            _by_rank(place, tensor.shape, degree).copy_(_by_owner(tensor, degree))
        received = _swap(send, group).flatten(0, 1)
        query, key, value = (
            _cut(part, -1, shape[-1]).transpose(0, 1)[None]
            for part, shape in zip(torch.split(received, widths, dim=-1), ctx.shapes, strict=True)
        )
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        degree = dist.get_world_size(ctx.group)
        num_tokens = ctx.shapes[0][2]
        widths = [_width(shape, degree) for shape in ctx.shapes]
        send = grads[0].new_empty(degree * num_tokens, sum(widths))
        for grad, place in zip(grads, torch.split(send, widths, dim=-1), strict=True):
            _cut(place, -1, grad.shape[-1]).copy_(grad[0].transpose(0, 1))
        received = _swap(send.view(degree, num_tokens, -1), ctx.group)
        own = [
            _summed(_by_rank(part, shape, degree)).movedim(1, 2).reshape(1, *shape[1:])
            for part, shape in zip(torch.split(received, widths, dim=-1), ctx.shapes, strict=True)
        ]
        return (*own, None)


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, group: Any) -> Tensor:
        ctx.group, degree = group, dist.get_world_size(group)
        # By token already, and tokens are by rank.
        received = _swap(_cut(out[0], 0, out.shape[1] // degree), group)
        return received.transpose(0, 1).flatten(1, 2)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        degree = dist.get_world_size(ctx.group)
        received = _swap(_cut(grad[0], 1, grad.shape[2] // degree).transpose(0, 1), ctx.group)
        return received.flatten(0, 1)[None], None


def _width(shape: torch.Size, degree: int) -> int:
    """Numbers per token that one rank gets of this tensor's heads: those of one head at least."""
    return max(1, shape[1] // degree) * shape[-1]


def _by_rank(place: Tensor, shape: torch.Size, degree: int) -> Tensor:
    """[ranks, tokens, width] seen as [owners, ranks that share a head, tokens, heads, D]."""
    owners = min(shape[1], degree)
    return _cut(_cut(place, 0, degree // owners), -1, shape[-1])


def _by_owner(tensor: Tensor, degree: int) -> Tensor:
    """[1, heads, tokens, D] seen as [owners, 1, tokens, heads of an owner, D]."""
    return _cut(tensor[0], 0, max(1, tensor.shape[1] // degree)).movedim(1, 2)[:, None]


def _cut(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A dimension seen as two, the second of `size`."""
    cut: Tensor = tensor.unflatten(dim, (-1, size))  # type: ignore[no-untyped-call]
    return cut


def _summed(by_rank: Tensor) -> Tensor:
    """[owners, tokens, heads, D]: where ranks shared a KV head, its gradient is the sum of theirs."""
    return by_rank[:, 0] if by_rank.shape[1] == 1 else by_rank.sum(dim=1)


def _swap(send: Tensor, group: Any) -> Tensor:
    """What lies at [r] goes to rank r; what rank r sent comes to [r]."""
    send = send.contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return received
