"""Packing changes no document. The references are stock `transformers` and a softmax written out by hand."""

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AttentionInterface, DynamicCache

from factory import build_model, packed_inputs, random_tokens
from unspool.base.errors import ConfigError
from unspool.model import attention
from unspool.model.attention import NAME, attend

FAMILIES = ["llama", "llama-mha", "llama-mqa", "qwen2", "qwen3", "mistral"]
DOC_LENS = (7, 1, 12, 3)
# Sums of fp32 in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


def pieces(tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tokens, list(DOC_LENS), dim=-1)


def hidden(model: Any, tokens: torch.Tensor, doc_lens=DOC_LENS) -> torch.Tensor:
    return model.base_model(**packed_inputs(tokens, doc_lens), use_cache=False).last_hidden_state[0]


@torch.no_grad()
def leaks(model: Any) -> bool:
    """Whether a change in any one document shows, in a single bit, in any other."""
    tokens = random_tokens(sum(DOC_LENS))
    before = torch.split(hidden(model, tokens), list(DOC_LENS))
    for changed in range(len(DOC_LENS)):
        other = [part.clone() for part in pieces(tokens)]
        other[changed] = (other[changed] + 1) % 270
        after = torch.split(hidden(model, torch.cat(other, dim=1)), list(DOC_LENS))
        assert not torch.equal(before[changed], after[changed]), "the change did nothing, so nothing was probed"
        if any(not torch.equal(before[at], after[at]) for at in range(len(DOC_LENS)) if at != changed):
            return True
    return False


@torch.no_grad()
def looks_ahead(model: Any) -> bool:
    tokens = random_tokens(16)
    before = hidden(model, tokens, (16,))
    tokens[0, 10] += 1
    after = hidden(model, tokens, (16,))
    assert not torch.equal(before[10:], after[10:])
    return not torch.equal(before[:10], after[:10])


# Against references


def test_packed_documents_come_out_as_each_alone_in_stock_transformers(family):
    tokens = random_tokens(sum(DOC_LENS))
    stock = build_model(family, attention="eager")
    with torch.no_grad():
        packed = hidden(build_model(family), tokens)
        alone = [stock.base_model(input_ids=part, use_cache=False).last_hidden_state[0] for part in pieces(tokens)]

    torch.testing.assert_close(packed, torch.cat(alone), **CLOSE)


def test_packed_documents_give_the_gradient_of_each_alone_in_stock_transformers(family):
    tokens = random_tokens(sum(DOC_LENS))
    target = torch.randn(sum(DOC_LENS), 32, generator=torch.Generator().manual_seed(1))
    ours, stock = build_model(family), build_model(family, attention="eager")

    (hidden(ours, tokens) * target).sum().backward()
    for part, wanted in zip(pieces(tokens), torch.split(target, list(DOC_LENS)), strict=True):
        (stock.base_model(input_ids=part, use_cache=False).last_hidden_state[0] * wanted).sum().backward()

    expected = {name: parameter.grad for name, parameter in stock.base_model.named_parameters()}
    assert expected.keys() == {name for name, _ in ours.base_model.named_parameters()}
    for name, parameter in ours.base_model.named_parameters():
        scale = expected[name].abs().max()
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5 * float(scale), msg=name)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_batch_without_padding_gives_the_logits_of_stock_transformers(family, implementation):
    tokens = torch.cat([random_tokens(19, seed=1), random_tokens(19, seed=2)])
    with torch.no_grad():
        ours = build_model(family)(input_ids=tokens).logits
        stock = build_model(family, attention=implementation)(input_ids=tokens).logits

    torch.testing.assert_close(ours, stock, **CLOSE)


@pytest.mark.parametrize("chunks", [(9, 4, 1, 1), (1, 14), (15,)])
def test_reading_in_chunks_with_a_cache_gives_the_logits_of_one_pass_in_stock_transformers(family, chunks):
    tokens = random_tokens(15)
    model, cache, found = build_model(family), DynamicCache(), []
    with torch.no_grad():
        stock = build_model(family, attention="eager")(input_ids=tokens).logits
        for part in torch.split(tokens, list(chunks), dim=1):
            seen = cache.get_seq_length()
            positions = torch.arange(seen, seen + part.shape[1])[None]
            out = model(input_ids=part, position_ids=positions, past_key_values=cache, use_cache=True)
            found.append(out.logits)

    torch.testing.assert_close(torch.cat(found, dim=1), stock, **CLOSE)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_attention_is_the_softmax_written_out_by_hand(num_kv_heads, scaling):
    torch.manual_seed(0)
    query = torch.randn(1, 4, sum(DOC_LENS), 8)
    key, value = torch.randn(2, 1, num_kv_heads, sum(DOC_LENS), 8)

    found, weights = attend(torch.nn.Module(), query, key, value, None, scaling=scaling, doc_lens=DOC_LENS)

    doc_ids = torch.repeat_interleave(torch.arange(len(DOC_LENS)), torch.tensor(DOC_LENS))
    visible = (doc_ids[:, None] == doc_ids) & torch.ones(len(doc_ids), len(doc_ids), dtype=torch.bool).tril()
    for head in range(4):
        group = head * num_kv_heads // 4
        scores = query[0, head].double() @ key[0, group].double().t() * (scaling or 8**-0.5)
        wanted = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ value[0, group].double()
        torch.testing.assert_close(found[0, :, head], wanted.float(), **CLOSE)
    assert weights is None


# Invariances, and variants that must break them


def test_changing_one_document_changes_no_bit_of_another(family):
    assert not leaks(build_model(family))


def test_no_position_sees_a_later_one(family):
    assert not looks_ahead(build_model(family))


def one_document(query, key, value, scaling, doc_lens):
    return attention._causal(query, key, value, scaling)


def borders_off_by_one(query, key, value, scaling, doc_lens):
    return _true_loop(query, key, value, scaling, (doc_lens[0] + 1, *doc_lens[1:-1], doc_lens[-1] - 1))


def not_causal(query, key, value, scaling, doc_lens):
    key, value = attention._same_heads(query, key, value)
    return functional.scaled_dot_product_attention(query, key, value, scale=scaling)


_true_loop = attention._documents_loop


@pytest.mark.parametrize("broken", [one_document, borders_off_by_one])
def test_the_leak_probe_catches_attention_that_leaks(broken, monkeypatch):
    monkeypatch.setattr(attention, "_documents_loop", broken)

    assert leaks(build_model())


def test_the_causality_probe_catches_attention_that_looks_ahead(monkeypatch):
    monkeypatch.setattr(attention, "_documents_loop", not_causal)

    assert looks_ahead(build_model())


@torch.no_grad()
def test_a_row_as_one_document_sees_across_what_were_documents():
    model, tokens = build_model(), random_tokens(sum(DOC_LENS))

    whole = hidden(model, tokens, (sum(DOC_LENS),))

    plain = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(whole, plain, **CLOSE)
    tokens[0, 0] += 1
    assert not torch.equal(hidden(model, tokens, (sum(DOC_LENS),))[-1], whole[-1])


# No mask


def test_no_mask_is_built_in_training_or_in_reading(monkeypatch):
    masks, sdpa_masks = [], []
    true_sdpa = functional.scaled_dot_product_attention

    def spy(module, query, key, value, attention_mask, **kwargs):
        masks.append(attention_mask)
        return attend(module, query, key, value, attention_mask, **kwargs)

    def sdpa_spy(*args, attn_mask=None, **kwargs):
        sdpa_masks.append(attn_mask)
        return true_sdpa(*args, attn_mask=attn_mask, **kwargs)

    model, tokens = build_model(), random_tokens(sum(DOC_LENS))
    monkeypatch.setattr(functional, "scaled_dot_product_attention", sdpa_spy)
    AttentionInterface.register(NAME, spy)
    try:
        hidden(model.train(), tokens)
        model.eval()(input_ids=tokens)
    finally:
        AttentionInterface.register(NAME, attend)

    assert masks == [None] * 4, "two layers, two passes"
    assert sdpa_masks == [None] * (2 * len(DOC_LENS) + 2)


# Refusals


def test_a_sliding_window_is_refused_beyond_it_and_exact_within():
    ours = build_model("mistral", sliding_window=8)
    stock = build_model("mistral", sliding_window=8, attention="eager")
    tokens = random_tokens(9)
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=tokens[:, :8]).logits, stock(input_ids=tokens[:, :8]).logits, **CLOSE)
        with pytest.raises(ConfigError, match="sliding attention window of 8 tokens"):
            ours(input_ids=tokens)


def test_attention_that_adds_sinks_is_refused():
    model = build_model("GptOss", head_dim=8, num_local_experts=2, num_experts_per_tok=1)

    with pytest.raises(ConfigError, match="sinks"):
        model(input_ids=random_tokens(4))


def test_capped_scores_and_masks_are_refused():
    query = torch.randn(1, 2, 4, 8)

    with pytest.raises(ConfigError, match="caps its attention scores"):
        attend(torch.nn.Module(), query, query, query, None, softcap=50.0)
    with pytest.raises(ConfigError, match="masks of its own"):
        attend(torch.nn.Module(), query, query, query, torch.ones(1, 1, 4, 4))


@pytest.mark.parametrize("doc_lens", [(3,), (3, 2)])
def test_lengths_that_do_not_cover_the_row_are_a_bug(doc_lens):
    query = torch.randn(1, 2, 4, 8)

    with pytest.raises(AssertionError, match="cover one packed row"):
        attend(torch.nn.Module(), query, query, query, None, doc_lens=doc_lens)


# CUDA, against the CPU's fp32


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float().cpu() - wanted).norm() / wanted.norm())


def random_heads(num_tokens: int, num_kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(1, heads, num_tokens, 64) for heads in (8, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def attended(heads: list[torch.Tensor], target: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """The output and the gradients of query, key and value."""
    leaves = [tensor.detach().requires_grad_() for tensor in heads]
    out, _ = attend(torch.nn.Module(), *leaves, None, **options)
    (out * target.to(out)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.gpu
@pytest.mark.parametrize("doc_lens", [(256,), (64,) * 4, (1,) * 16, (100, 1, 27, 128), (1, 300)])
@pytest.mark.parametrize("num_kv_heads", [2, 8])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_cuda_documents_match_the_reference_to_bfloat16(doc_lens, num_kv_heads, scaling):
    heads = random_heads(sum(doc_lens), num_kv_heads)
    rounded = [tensor.bfloat16() for tensor in heads]
    target = torch.randn(1, sum(doc_lens), 8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    options = {"scaling": scaling, "doc_lens": doc_lens}

    wanted = attended([tensor.float() for tensor in rounded], target.float(), **options)
    found = attended([tensor.cuda() for tensor in rounded], target, **options)

    # bf16 keeps 8 bits; gradients add up more of its roundings.
    for name, ours, reference in zip(("out", "query", "key", "value"), found, wanted, strict=True):
        # A document of one token has no choice, so its queries and keys get nothing but rounding.
        if reference.abs().max() < 1e-5:
            assert ours.float().abs().max() < 1e-2, name
        else:
            assert relative_error(ours, reference) < 2e-2, name


@pytest.mark.gpu
@pytest.mark.parametrize("doc_lens", [(64,) * 4, (100, 1, 27, 128)])
def test_cuda_documents_do_not_leak_a_bit(doc_lens):
    query, key, value = (tensor.bfloat16().cuda() for tensor in random_heads(sum(doc_lens), 2))
    before, _ = attend(torch.nn.Module(), query, key, value, None, doc_lens=doc_lens)
    first = doc_lens[0]
    for tensor in (query, key, value):
        tensor[:, :, :first] += 1

    after, _ = attend(torch.nn.Module(), query, key, value, None, doc_lens=doc_lens)

    assert not torch.equal(before[:, :first], after[:, :first])
    assert torch.equal(before[:, first:], after[:, first:])


@pytest.mark.gpu
@pytest.mark.parametrize("num_queries", [1, 5, 300])
def test_cuda_queries_after_a_cache_match_the_reference_to_bfloat16(num_queries):
    query, key, value = (tensor.bfloat16() for tensor in random_heads(300, 2))
    query = query[:, :, -num_queries:]

    wanted, _ = attend(torch.nn.Module(), query.float(), key.float(), value.float(), None)
    found, _ = attend(torch.nn.Module(), query.cuda(), key.cuda(), value.cuda(), None)

    assert relative_error(found, wanted) < 2e-2
