"""Ulysses: attention over a row on several ranks that exchange heads for tokens.

Before the kernel, each rank sends queries, keys and values of its tokens, and receives the whole row for some heads. So
any kernel, mask and window works. KV heads are not repeated if every rank gets whole KV heads; otherwise a rank gets
the KV head that its query heads share. There is one collective before the kernel and one after it, also in the backward
pass. Their order is always the same, so that recomputed layers repeat them. Per token and layer, 2 × query heads + 2 ×
KV heads are sent: 80 slices for Llama-3-8B.

torch's differentiable all-to-all is not used: these functions pack directly into the send buffer, which saves copies,
and sum the gradients of shared KV heads in a fixed order.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Heads = tuple[Tensor, Tensor, Tensor]  # query, key, value


def gather_tokens(query: Tensor, key: Tensor, value: Tensor, group: Any) -> Heads:
    """Exchange [1, all heads, own tokens, D] for [1, own heads, all tokens, D], with tokens in rank order."""
    assert len(query) == 1, "a packed batch is one sequence"
    heads: Heads = _Gather.apply(query, key, value, group)  # type: ignore[no-untyped-call]
    return heads


def gather_heads(out: Tensor, group: Any) -> Tensor:
    """Exchange [1, all tokens, own heads, D] for [1, own tokens, all heads, D]."""
    gathered: Tensor = _Return.apply(out, group)  # type: ignore[no-untyped-call]
    return gathered


def own_query_heads(per_query_head: Tensor, group: Any) -> Tensor:
    """Return the entries of a per-query-head tensor for the heads that this rank computes."""
    return per_query_head.tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any) -> Heads:
        ctx.group, ctx.shapes = group, [tensor.shape for tensor in (query, key, value)]
        degree = dist.get_world_size(group)
        widths = [_width(shape, degree) for shape in ctx.shapes]
        send = query.new_empty(degree, query.shape[2], sum(widths))
        for tensor, target in zip((query, key, value), torch.split(send, widths, dim=-1), strict=True):
            _by_rank(target, tensor.shape, degree).copy_(_by_owner(tensor, degree))
        received = _all_to_all(send, group).flatten(0, 1)
        query, key, value = (
            _unflatten(part, -1, shape[-1]).transpose(0, 1)[None]
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
        for grad, target in zip(grads, torch.split(send, widths, dim=-1), strict=True):
            _unflatten(target, -1, grad.shape[-1]).copy_(grad[0].transpose(0, 1))
        received = _all_to_all(send.view(degree, num_tokens, -1), ctx.group)
        own = [
            _sum_shared(_by_rank(part, shape, degree)).movedim(1, 2).reshape(1, *shape[1:])
            for part, shape in zip(torch.split(received, widths, dim=-1), ctx.shapes, strict=True)
        ]
        return (*own, None)


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, group: Any) -> Tensor:
        ctx.group, degree = group, dist.get_world_size(group)
        # Already in token order, and tokens in rank order.
        received = _all_to_all(_unflatten(out[0], 0, out.shape[1] // degree), group)
        return received.transpose(0, 1).flatten(1, 2)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        degree = dist.get_world_size(ctx.group)
        received = _all_to_all(_unflatten(grad[0], 1, grad.shape[2] // degree).transpose(0, 1), ctx.group)
        return received.flatten(0, 1)[None], None


def _width(shape: torch.Size, degree: int) -> int:
    """Return the elements per token that one rank gets of this tensor: at least one head."""
    return max(1, shape[1] // degree) * shape[-1]


def _by_rank(target: Tensor, shape: torch.Size, degree: int) -> Tensor:
    """View [ranks, tokens, width] as [owners, ranks that share a head, tokens, heads, D]."""
    owners = min(shape[1], degree)
    return _unflatten(_unflatten(target, 0, degree // owners), -1, shape[-1])


def _by_owner(tensor: Tensor, degree: int) -> Tensor:
    """View [1, heads, tokens, D] as [owners, 1, tokens, heads of an owner, D]."""
    return _unflatten(tensor[0], 0, max(1, tensor.shape[1] // degree)).movedim(1, 2)[:, None]


def _unflatten(tensor: Tensor, dim: int, size: int) -> Tensor:
    """View a dimension as two, the second of `size`."""
    cut: Tensor = tensor.unflatten(dim, (-1, size))  # type: ignore[no-untyped-call]
    return cut


def _sum_shared(by_rank: Tensor) -> Tensor:
    """[owners, tokens, heads, D]: sum the gradients of ranks that share a KV head."""
    return by_rank[:, 0] if by_rank.shape[1] == 1 else by_rank.sum(dim=1)


def _all_to_all(send: Tensor, group: Any) -> Tensor:
    """Send `send[r]` to rank r; the result holds at [r] what rank r sent."""
    send = send.contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return received
