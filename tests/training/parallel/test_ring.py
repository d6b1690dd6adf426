"""Blocks of attention and what a ring refuses."""

import pytest
import torch
import torch.nn.functional as F

from factory import attention_inputs
from unspool.core.errors import ConfigError
from unspool.models.attention.reference import repeat_kv_heads
from unspool.training.batch import sequence_part
from unspool.training.parallel import ring
from unspool.training.parallel.ring import _merge, _visible_block, block, block_backward, ring_attention

SCALE = 0.3


def heads(num_tokens, *, device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    sizes = ((4, 8), (2, 8), (2, 8))
    return [torch.randn(1, num, num_tokens, dim, device=device, dtype=dtype) for num, dim in sizes]


def whole_row(query, key, value, **options):
    key, value = repeat_kv_heads(query, key, value)
    return F.scaled_dot_product_attention(query, key, value, scale=SCALE, **options)


def around_the_ring(tensors, ranks):
    """What the ranks of a ring compute, one after another, put together; and their gradients."""
    query, key, value = tensors
    num_tokens = query.shape[2]
    parts = [sequence_part(num_tokens, rank, ranks, ring=ranks) for rank in range(ranks)]
    out, log_sum = (
        torch.zeros_like(query, dtype=torch.float32),
        torch.full(query.shape[:3], -torch.inf, device=query.device),
    )
    blocks = []
    for rank, part in enumerate(parts):
        own_out, own_sum = out[:, :, part], log_sum[:, :, part]
        for source in range(ranks):
            rows, seen, causal = _visible_block(len(part), rank, source)
            blocks.append((part[rows], parts[source][seen], causal))
            some = (query[:, :, blocks[-1][0]], key[:, :, blocks[-1][1]], value[:, :, blocks[-1][1]])
            _merge(own_out[:, :, rows], own_sum[:, :, rows], *block(*some, SCALE, causal=causal))
        out[:, :, part], log_sum[:, :, part] = own_out, own_sum
    grad = torch.ones_like(out).cumsum(2).sin().to(query.dtype)
    sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors]
    for rows, seen, causal in blocks:
        some = (query[:, :, rows], key[:, :, seen], value[:, :, seen])
        found = block_backward(grad[:, :, rows], some, out[:, :, rows], log_sum[:, :, rows], SCALE, causal=causal)
        for total, places, part in zip(sums, (rows, seen, seen), found, strict=True):
            total[:, :, places] += part
    return out, grad, sums


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_blocks_of_a_ring_make_up_attention_over_the_row(ranks, monkeypatch):
    monkeypatch.setattr(ring, "MAX_SCORES", 100)
    tensors = [tensor.requires_grad_() for tensor in heads(12)]

    with torch.no_grad():
        out, grad, sums = around_the_ring(tensors, ranks)
    wanted = whole_row(*tensors, is_causal=True)
    torch.testing.assert_close(out, wanted)
    for found, exact in zip(sums, torch.autograd.grad(wanted, tensors, grad), strict=True):
        torch.testing.assert_close(found, exact)


@pytest.mark.gpu
def test_the_kernel_on_a_gpu_agrees_with_plain_products(monkeypatch):
    tensors = heads(96, device="cuda", dtype=torch.bfloat16)
    found = around_the_ring(tensors, 3)
    monkeypatch.setattr(ring, "_has_flash", lambda query: False)
    wanted = around_the_ring(tensors, 3)

    for left, right in zip([found[0], *found[2]], [wanted[0], *wanted[2]], strict=True):
        assert float((left - right).norm()) < 1e-2 * float(right.norm())


@pytest.mark.parametrize(
    ("doc_lens", "options", "sentence"),
    [
        ((3, 4), {}, "rows of one document, but this batch holds 2"),
        ((7,), {"window": 3}, "does not support sliding windows"),
        ((7,), {"softcap": 3.0}, "does not support capped scores"),
        ((7,), {"sinks": torch.zeros(4)}, "does not support sinks"),
    ],
)
def test_what_a_ring_would_compute_wrongly_is_refused(doc_lens, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ring_attention(attention_inputs(*heads(7), doc_lens=doc_lens, **options), group=None)
