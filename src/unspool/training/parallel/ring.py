"""Ring attention: exact causal attention over a row on several ranks that pass keys and values around.

Each rank has one piece from the front of the row and one from its back (`sequence_part`), so that all ranks compute
equally much. Blocks are merged by their log-sum-exp in fp32, and messages have the same order in every pass. The ring
computes full causal attention of one document and refuses everything else. Keys and values of the row pass through
every rank, followed by their gradients. Unlike Ulysses, the number of heads does not limit the number of ranks. torch's
own context parallelism is not used: it has no CPU kernels, and it patches attention for the whole process, so it could
not be compared with one rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from unspool.core.errors import ConfigError
from unspool.models.attention.reference import MAX_SCORES, AttentionInputs, causal_mask, repeat_kv_heads
from unspool.models.memory import kept
from unspool.training.parallel.mesh import is_gloo_on_gpu

Grads = tuple[Tensor, Tensor, Tensor]


def block(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attend from some queries to some keys: return output and log-sum-exp, fp32. Causal: query i sees keys 0 to i."""
    key, value = repeat_kv_heads(query, key, value)
    if _has_flash(query):
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
        found = kept.call(flash, query, key, value, 0.0, causal, scale=scale)
        return found[0].float(), found[1]
    outs, sums = [], []
    for _, scores in _scores(query, key, scale, causal=causal):
        log_sum = scores.logsumexp(dim=-1)
        outs.append((scores - log_sum[..., None]).exp() @ value.float())
        sums.append(log_sum)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def block_backward(
    grad: Tensor, heads: tuple[Tensor, Tensor, Tensor], out: Tensor, log_sum: Tensor, scale: float, *, causal: bool
) -> Grads:
    """Return the gradients of query, key and value from this block, in fp32."""
    query, num_kv = heads[0], heads[1].shape[1]
    key, value = repeat_kv_heads(*heads)
    if _has_flash(query):
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
        empty, seed = None, torch.zeros(2, dtype=torch.uint64, device=query.device)
        sizes = (query.shape[2], key.shape[2])
        args = (
            grad,
            query,
            key,
            value,
            out.to(query.dtype),
            log_sum,
            empty,
            empty,
            *sizes,
            0.0,
            causal,
            seed,
            seed[:0],
        )
        query_grad, key_grad, value_grad = (part.float() for part in flash(*args, scale=scale))
    else:
        query_grad = torch.zeros_like(query, dtype=torch.float32)
        key_grad, value_grad = (torch.zeros_like(part, dtype=torch.float32) for part in (key, value))
        delta = (grad.float() * out.float()).sum(dim=-1, keepdim=True)
        for rows, scores in _scores(query, key, scale, causal=causal):
            weights = (scores - log_sum[:, :, rows, None]).exp()
            some = grad[:, :, rows].float()
            value_grad += weights.transpose(-1, -2) @ some
            weights *= (some @ value.float().transpose(-1, -2) - delta[:, :, rows]) * scale
            query_grad[:, :, rows] = weights @ key.float()
            key_grad += weights.transpose(-1, -2) @ query[:, :, rows].float()
    return query_grad, _sum_repeated(key_grad, num_kv), _sum_repeated(value_grad, num_kv)


def _scores(query: Tensor, key: Tensor, scale: float, *, causal: bool) -> Iterator[tuple[slice, Tensor]]:
    """Yield a few queries at a time: their slice, and their scores in fp32, −∞ where masked."""
    batch, num_heads, num_queries, _ = query.shape
    size = max(1, MAX_SCORES // (batch * num_heads * key.shape[2]))
    for start in range(0, num_queries, size):
        rows = slice(start, min(start + size, num_queries))
        scores = query[:, :, rows].float() @ key.float().transpose(-1, -2) * scale
        if causal:
            unseen = ~causal_mask(scores.shape[2], key.shape[2], start, None, query.device)
            scores = scores.masked_fill(unseen, -torch.inf)
        yield rows, scores


def _sum_repeated(grad: Tensor, num_kv: int) -> Tensor:
    """Sum the gradients of repeated KV heads."""
    return grad if grad.shape[1] == num_kv else grad.view(len(grad), num_kv, -1, *grad.shape[2:]).sum(dim=2)


def _has_flash(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] % 8 == 0


def ring_attention(inputs: AttentionInputs, group: Any) -> Tensor:
    """Return [1, own tokens, H, D] from heads [1, H, own tokens, D]."""
    _refuse_unsupported(inputs)
    out: Tensor = _Ring.apply(*inputs.heads, inputs.scale, group)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2)


def _refuse_unsupported(inputs: AttentionInputs) -> None:
    assert inputs.doc_lens is not None
    if len(inputs.doc_lens) > 1:
        raise ConfigError(
            f"parallel: ring needs rows of one document, but this batch holds {len(inputs.doc_lens)}; use ring 1 and "
            "ulysses, or attention: full with one row per micro-batch."
        )
    asked = {"sliding windows": inputs.window, "capped scores": inputs.softcap, "sinks": inputs.sinks}
    for name, setting in asked.items():
        if setting is not None:
            raise ConfigError(f"parallel: ring does not support {name}, which this model has; use ulysses instead.")


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, group: Any) -> Tensor:
        ctx.scale, ctx.group = scale, group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=torch.float32)
        log_sum = query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float32)
        current = _pack(key, value)
        for turn in range(ranks):
            incoming = _start_exchange(current, group) if turn < ranks - 1 else None
            rows, seen, causal = _visible_block(query.shape[2], rank, (rank - turn) % ranks)
            keys, values = _unpack(current, key, value)
            part = block(query[:, :, rows], keys[:, :, seen], values[:, :, seen], scale, causal=causal)
            _merge(out[:, :, rows], log_sum[:, :, rows], *part)
            current = _finish_exchange(incoming, current)
        rounded = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, rounded, log_sum)
        return rounded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        query_grad = torch.zeros_like(query, dtype=torch.float32)
        current = _pack(key, value)
        # The gradients of keys and values follow one turn behind them, and end on their own rank.
        sums = torch.zeros_like(current, dtype=torch.float32)
        for turn in range(ranks):
            incoming = _start_exchange(current, ctx.group) if turn < ranks - 1 else None
            rows, seen, causal = _visible_block(query.shape[2], rank, (rank - turn) % ranks)
            keys, values = _unpack(current, key, value)
            heads = (query[:, :, rows], keys[:, :, seen], values[:, :, seen])
            args = (grad[:, :, rows].contiguous(), heads, out[:, :, rows], log_sum[:, :, rows].contiguous())
            grads = block_backward(*args, ctx.scale, causal=causal)
            query_grad[:, :, rows] += grads[0]
            key_sum, value_sum = _unpack(sums, key, value)
            key_sum[:, :, seen] += grads[1]
            value_sum[:, :, seen] += grads[2]
            current = _finish_exchange(incoming, current)
            sums = _finish_exchange(_start_exchange(sums, ctx.group), sums)
        key_sum, value_sum = _unpack(sums, key, value)
        return query_grad.to(query.dtype), key_sum.to(key.dtype), value_sum.to(value.dtype), None, None


def _visible_block(num_tokens: int, rank: int, source: int) -> tuple[slice, slice, bool]:
    """Return own queries, the keys of rank `source` that they attend to, and whether attention is causal.

    Rank r has pieces r and 2R − 1 − r. So all queries see the first piece of an earlier rank, and the second half of
    the queries sees both pieces of a later rank.
    """
    whole, half = slice(0, num_tokens), num_tokens // 2
    if source == rank:
        return whole, whole, True
    return (whole, slice(0, half), False) if source < rank else (slice(half, num_tokens), whole, False)


def _merge(out: Tensor, log_sum: Tensor, more: Tensor, more_sum: Tensor) -> None:
    """Merge a block into `out` in place: the result is the softmax over both sets of keys."""
    both = torch.logaddexp(log_sum, more_sum)
    out.mul_((log_sum - both).exp()[..., None]).add_(more * (more_sum - both).exp()[..., None])
    log_sum.copy_(both)


def _pack(key: Tensor, value: Tensor) -> Tensor:
    """Pack two tensors into one, to send one message instead of two."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpack(flat: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = torch.split(flat, [key.numel(), value.numel()])
    return keys.view(key.shape), values.view(value.shape)


def _start_exchange(tensor: Tensor, group: Any) -> tuple[Tensor, list[Any]]:
    """Start sending to the next rank and receiving from the previous rank."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if is_gloo_on_gpu(tensor, group):
        # gloo sends only from host memory.
        tensor = tensor.cpu()
    received = torch.empty_like(tensor)
    messages = [
        dist.P2POp(dist.isend, tensor, dist.get_global_rank(group, (rank + 1) % ranks), group),
        dist.P2POp(dist.irecv, received, dist.get_global_rank(group, (rank - 1) % ranks), group),
    ]
    return received, dist.batch_isend_irecv(messages)


def _finish_exchange(incoming: tuple[Tensor, list[Any]] | None, current: Tensor) -> Tensor:
    if incoming is None:
        return current
    for message in incoming[1]:
        message.wait()
    return incoming[0].to(current.device)
