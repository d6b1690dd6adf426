"""The CUDA path against the reference: its planning with stand-ins for the kernels, and on a device for real."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from factory import attention_inputs
from unspool.models.attention import cuda
from unspool.models.attention.cuda import cumulative_lens, dense_from, padded_len, plan
from unspool.models.attention.interface import attend, register
from unspool.models.attention.reference import reference_attention, repeat_kv_heads

MIXES = [
    (640,),
    (600,),
    (64,) * 4,
    (128,) * 4,
    (1,) * 16,
    (100, 1, 27, 128),
    (1, 300),
    (300, 5, 700, 20, 1, 512),
    (513, 511),
]


def random_heads(num_tokens: int, num_kv_heads: int, dim: int = 64, num_heads: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    # As projections lay them out: [B, S, H, D] in memory.
    shapes = [(1, num_tokens, heads, dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=generator).transpose(1, 2) for shape in shapes]


def attended(heads: list[torch.Tensor], target: torch.Tensor, module: Any = None, **options: Any) -> list[torch.Tensor]:
    """The output and the gradients of query, key and value."""
    leaves = [tensor.detach().requires_grad_() for tensor in heads]
    out, _ = attend(module or torch.nn.Module(), *leaves, None, **options)
    (out * target.to(out)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


# Planning, by stand-ins


def plain_varlen(query, key, value, query_ends, key_ends, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """What `varlen_attn` does: the last query of a document stands at its last key."""
    left, right = window_size
    assert right == 0, "causal"
    assert enable_gqa == (query.shape[1] != key.shape[1])
    lens = [torch.diff(ends).tolist() for ends in (query_ends, key_ends)]
    assert max(lens[0]) <= max_q and max(lens[1]) <= max_k
    options = {"scaling": scale, "window": None if left < 0 else left + 1}
    outs = [
        reference_attention(attention_inputs(*(part.transpose(0, 1)[None] for part in parts), **options))[0]
        for parts in zip(*(torch.split(heads, sizes) for heads, sizes in
                           ((query, lens[0]), (key, lens[1]), (value, lens[1]))), strict=True)
    ]  # fmt: skip
    return torch.cat(outs)


def plain_sdpa(inputs, *, is_causal, kernels=cuda.KERNELS):
    query, (key, value) = inputs.query, repeat_kv_heads(*inputs.heads)
    assert query.shape[2] > 1 or kernels[0] != SDPBackend.CUDNN_ATTENTION, "one more key each time: planned anew"
    assert query.shape[2] == 1 or query.shape[2] % 128 == 0, "a length that cuDNN would have to plan anew"
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=inputs.scaling)
    return out.transpose(1, 2)


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(cuda, "supports", lambda *heads: True)
    monkeypatch.setattr(cuda, "varlen_attn", plain_varlen)
    monkeypatch.setattr(cuda, "_sdpa", plain_sdpa)
    monkeypatch.setattr(cuda, "_has_enable_gqa", lambda: True)
    # So that documents of 512 tokens count as long.
    monkeypatch.setattr(cuda, "DENSE_FROM", {64: 2.0 * 8 * 64 * 512**2})


@pytest.mark.parametrize("doc_lens", MIXES)
@pytest.mark.parametrize("window", [None, 37])
def test_documents_divided_among_kernels_come_out_as_in_the_reference(doc_lens, window, stand_ins):
    heads = random_heads(sum(doc_lens), 2)
    target = torch.randn(1, sum(doc_lens), 8, 64, generator=torch.Generator().manual_seed(1))
    leaves = [tensor.clone().requires_grad_() for tensor in heads]
    wanted = reference_attention(attention_inputs(*leaves, scaling=0.3, window=window, doc_lens=doc_lens))
    (wanted * target).sum().backward()

    found = attended(heads, target, scaling=0.3, doc_lens=doc_lens, sliding_window=window)

    for ours, right in zip(found, [wanted.detach(), *(leaf.grad for leaf in leaves)], strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_queries", [1, 5, 256])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_without_packing_come_out_as_in_the_reference(num_queries, window, batch, stand_ins):
    query, key, value = (tensor.repeat(batch, 1, 1, 1) for tensor in random_heads(256, 2))
    query = query[:, :, -num_queries:]

    found, _ = attend(torch.nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window)

    wanted = reference_attention(attention_inputs(query, key, value, scaling=0.3, window=window))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_long_documents_stand_alone_and_short_neighbours_together():
    made = plan((300, 5, 700, 20, 1, 512), 512)

    assert made.segment_lens == (305, 700, 21, 512)
    assert made.dense == (False, True, False, True)
    assert made.short_lens == (300, 5, 20, 1)


def test_without_a_kernel_for_long_documents_all_are_short():
    assert dense_from(32, 256) is None
    assert plan((70_000, 3), None).dense == (False,)


def test_fewer_and_smaller_heads_need_longer_documents():
    assert dense_from(32, 128) < dense_from(8, 128)
    assert dense_from(9, 64) > dense_from(32, 64)


def test_lengths_are_rounded_to_few_and_by_little():
    lengths = np.arange(1024, 70_000, 7)
    up = np.array([padded_len(int(length)) for length in lengths])

    assert (up >= lengths).all()
    assert (up / lengths).max() < 1.125
    assert len(set(up.tolist())) < 120
    assert padded_len(65_536) == 65_536


def test_borders_are_made_once_and_can_be_saved_for_a_backward_pass():
    with torch.inference_mode():
        first = cumulative_lens((3, 4), torch.device("cpu"))

    assert first.tolist() == [0, 3, 7]
    assert cumulative_lens((3, 4), torch.device("cpu")) is first
    assert not first.is_inference()


# On a device


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float().cpu() - wanted.float().cpu()).norm() / wanted.float().norm().cpu())


def check_on_cuda(doc_lens, num_kv_heads, dim, module=None, **options):
    """Against the CPU's fp32, forward and gradients, on inputs rounded alike."""
    rounded_heads = [tensor.bfloat16() for tensor in random_heads(sum(doc_lens), num_kv_heads, dim)]
    target = torch.randn(1, sum(doc_lens), 8, dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    options = options | {"doc_lens": doc_lens}
    on_device = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}

    wanted = attended([tensor.float() for tensor in rounded_heads], target.float(), module, **options)
    if module is not None:
        module = module.cuda()
    found = attended([tensor.cuda() for tensor in rounded_heads], target, module, **on_device)

    # bf16 keeps 8 bits; gradients add up more of its roundings.
    for name, ours, right in zip(("out", "query", "key", "value"), found, wanted, strict=True):
        # A document of one token has no choice, so its queries and keys get nothing but rounding.
        if right.abs().max() < 1e-5:
            assert ours.float().abs().max() < 1e-2, name
        else:
            assert relative_error(ours, right) < 2e-2, name


@pytest.mark.gpu
@pytest.mark.parametrize("doc_lens", MIXES)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("long_from", [512, None])
def test_cuda_documents_match_the_reference_to_bfloat16(doc_lens, num_kv_heads, scaling, long_from, monkeypatch):
    monkeypatch.setattr(cuda, "dense_from", lambda num_heads, dim: long_from)
    check_on_cuda(doc_lens, num_kv_heads, 64, scaling=scaling)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("doc_lens", [(300, 5, 700), (128,) * 3])
def test_cuda_heads_of_any_size_match_the_reference_to_bfloat16(dim, window, doc_lens, monkeypatch):
    monkeypatch.setattr(cuda, "dense_from", lambda num_heads, dim: 512)
    check_on_cuda(doc_lens, 2, dim, sliding_window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("rules", [{"softcap": 3.0}, {"softcap": 3.0, "sliding_window": 37}, {"s_aux": True}])
def test_cuda_caps_and_sinks_match_the_reference_to_bfloat16(rules):
    if "s_aux" in rules:
        rules = {"s_aux": torch.linspace(-1, 2, 8)}
    check_on_cuda((300, 5, 100), 2, 64, **rules)


@pytest.mark.gpu
def test_cuda_heads_with_bases_of_their_own_match_the_reference_to_bfloat16():
    doc_lens = (300, 5, 700)
    module = torch.nn.Module()
    exponents = torch.arange(0, 64, 2) / 64
    module.register_buffer("head_inv_freq", torch.tensor([1e4, 5e5])[:, None] ** -exponents)
    positions = torch.cat([torch.arange(doc_len) for doc_len in doc_lens])[None]

    check_on_cuda(doc_lens, 2, 64, module, position_ids=positions)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 37])
def test_cuda_grouped_heads_equal_expanded_ones(window):
    """torch 2.11 documents no fewer KV heads in `varlen_attn`; its kernel takes them."""
    doc_lens = (300, 5, 700)
    query, key, value = (tensor.bfloat16().cuda() for tensor in random_heads(sum(doc_lens), 2))
    target = torch.randn(1, sum(doc_lens), 8, 64, device="cuda")
    wide = [tensor.repeat_interleave(4, dim=1) for tensor in (key, value)]

    grouped = attended([query, key, value], target, doc_lens=doc_lens, sliding_window=window)
    expanded = attended([query, *wide], target, doc_lens=doc_lens, sliding_window=window)

    summed = [grad.float().unflatten(1, (2, 4)).sum(dim=2) for grad in expanded[2:]]
    for ours, right in zip(grouped, [*expanded[:2], *summed], strict=True):
        assert relative_error(ours, right) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("doc_lens", [(64,) * 4, (128,) * 4, (100, 1, 27, 128), (700, 30, 600)])
@pytest.mark.parametrize("window", [None, 37])
def test_cuda_documents_do_not_leak_a_bit(doc_lens, window, monkeypatch):
    monkeypatch.setattr(cuda, "dense_from", lambda num_heads, dim: 512)
    query, key, value = (tensor.bfloat16().cuda() for tensor in random_heads(sum(doc_lens), 2))
    options = {"doc_lens": doc_lens, "sliding_window": window}
    before, _ = attend(torch.nn.Module(), query, key, value, None, **options)
    first = doc_lens[0]
    for tensor in (query, key, value):
        tensor[:, :, :first] += 1

    after, _ = attend(torch.nn.Module(), query, key, value, None, **options)

    assert not torch.equal(before[:, :first], after[:, :first])
    assert torch.equal(before[:, first:], after[:, first:])


@pytest.mark.gpu
@pytest.mark.parametrize("num_queries", [1, 5, 300])
@pytest.mark.parametrize("window", [None, 37])
def test_cuda_queries_after_a_cache_match_the_reference_to_bfloat16(num_queries, window):
    query, key, value = (tensor.bfloat16() for tensor in random_heads(300, 2))
    query = query[:, :, -num_queries:]

    wanted, _ = attend(torch.nn.Module(), query.float(), key.float(), value.float(), None, sliding_window=window)
    found, _ = attend(torch.nn.Module(), query.cuda(), key.cuda(), value.cuda(), None, sliding_window=window)

    assert relative_error(found, wanted) < 2e-2


@pytest.mark.gpu
def test_cuda_in_fp32_falls_back_to_the_reference():
    heads = random_heads(64, 2)
    target = torch.randn(1, 64, 8, 64)

    wanted = attended(heads, target, doc_lens=(40, 24))
    found = attended([tensor.cuda() for tensor in heads], target.cuda(), doc_lens=(40, 24))

    for ours, right in zip(found, wanted, strict=True):
        assert relative_error(ours, right) < 1e-3


@pytest.mark.gpu
def test_layers_after_the_first_wait_for_nothing():
    doc_lens = (700, 30, 600)
    heads = [tensor.bfloat16().cuda() for tensor in random_heads(sum(doc_lens), 2)]
    attend(torch.nn.Module(), *heads, None, doc_lens=doc_lens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(torch.nn.Module(), *heads, None, doc_lens=doc_lens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# What is left behind

IN_A_NEW_PROCESS = """
import sys, torch
from unspool.models.attention.interface import register
from unspool.models.attention.cuda import cuda_attention
from unspool.models.attention.reference import AttentionInputs

if sys.argv[1] == "registered first":
    register()
    assert not torch.cuda.is_initialized()
heads = [torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
if sys.argv[1] == "registered on a device":
    register()
if sys.argv[1] != "stock":
    cuda_attention(AttentionInputs(query=heads[0][:, :, -1:], key=heads[1], value=heads[2]))
torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
print(torch._C._get_sdp_priority_order())
"""


def test_registering_lets_torch_choose_its_order_of_kernels_once_and_only_if_cuda_starts(monkeypatch):
    waiting: list[Any] = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", waiting.append)
    cuda.initialize_kernel_order.cache_clear()
    try:
        register()
        register()
    finally:
        cuda.initialize_kernel_order.cache_clear()

    assert waiting == [cuda._select_kernel]
    empty = torch.empty(1, 1, 0, 8, dtype=torch.bfloat16)
    chosen: list[Any] = []
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty)  # no device here
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *heads: chosen.append(heads))
    waiting[0]()
    assert chosen == [(empty, empty, empty)]


def test_attention_runs_its_kernel_and_no_other(monkeypatch):
    called: list[str] = []
    plain, context = F.scaled_dot_product_attention, cuda.sdpa_kernel

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        called.append("attention")
        return plain(*args, **options)

    def entered(*args: Any, **options: Any) -> Any:
        called.append("our order")
        # A CPU has none of the kernels.
        return context(SDPBackend.MATH)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(cuda, "sdpa_kernel", entered)
    query, key, value = random_heads(16, 2)

    for _ in range(2):
        cuda.cuda_attention(attention_inputs(query[:, :, -1:], key, value))

    assert called == ["our order", "attention"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("ours", ["registered first", "registered on a device"])
def test_stock_attention_keeps_its_kernels_after_ours(ours):
    """On Hopper it takes cuDNN's; an order that is put back too early made it FlashAttention-2's, half as fast."""

    def order(first: str) -> str:
        command = [sys.executable, "-c", IN_A_NEW_PROCESS, first]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert order(ours) == order("stock")
