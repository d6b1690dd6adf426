"""Packing changes no document. The references are stock `transformers` and a softmax written out by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AttentionInterface, DynamicCache

from factory import build_model, packed_inputs, random_tokens
from models.memory_factory import Largest
from unspool.core.errors import ConfigError
from unspool.models.attention import interface
from unspool.models.attention import reference as attention_reference
from unspool.models.attention.interface import NAME, attend

FAMILIES = ["llama", "llama-mha", "llama-mqa", "qwen2", "qwen3", "mistral"]
DOC_LENS = (7, 1, 12, 3)
# Sums of fp32 in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float().cpu() - wanted).norm() / wanted.norm())


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


def one_document(inputs):
    return _true_reference(replace(inputs, doc_lens=None))


def borders_off_by_one(inputs):
    doc_lens = inputs.doc_lens
    return _true_reference(replace(inputs, doc_lens=(doc_lens[0] + 1, *doc_lens[1:-1], doc_lens[-1] - 1)))


def not_causal(inputs):
    key, value = attention_reference.repeat_kv_heads(*inputs.heads)
    return functional.scaled_dot_product_attention(inputs.query, key, value, scale=inputs.scaling).transpose(1, 2)


_true_reference = attention_reference.reference_attention


@pytest.mark.parametrize("broken", [one_document, borders_off_by_one])
def test_the_leak_probe_catches_attention_that_leaks(broken, monkeypatch):
    monkeypatch.setattr(interface, "reference_attention", broken)

    assert leaks(build_model())


def test_the_causality_probe_catches_attention_that_looks_ahead(monkeypatch):
    monkeypatch.setattr(interface, "reference_attention", not_causal)

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


# Windows, caps and sinks, against a softmax written out by hand


RULES = [
    {"sliding_window": 1},
    {"sliding_window": 5},
    {"sliding_window": 12},
    {"softcap": 2.0},
    {"sinks": True},
    {"sliding_window": 5, "softcap": 2.0, "sinks": True},
]


def by_hand(query, key, value, *, scaling, doc_lens=None, sliding_window=None, softcap=None, s_aux=None):
    """fp64, all at once; queries are the last of the keys. [1, S, H, D]."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    doc_ids = torch.repeat_interleave(torch.arange(len(doc_lens or (1,))), torch.tensor(doc_lens or (num_keys,)))
    behind = torch.arange(num_keys)[:, None] - torch.arange(num_keys)
    visible = (doc_ids[:, None] == doc_ids) & (behind >= 0) & (behind < (sliding_window or num_keys))
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.double().repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[-num_queries:], -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys]
    return (weights @ value).transpose(1, 2).float()


def options_of(rules: dict[str, Any], num_heads: int) -> dict[str, Any]:
    sinks = {"s_aux": torch.linspace(-1, 2, num_heads)} if rules.get("sinks") else {}
    return {name: value for name, value in rules.items() if name != "sinks"} | sinks | {"scaling": 0.4}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("block", [1, 3, 4, 1000])
@pytest.mark.parametrize("num_queries", [None, 1, 6, 23])
def test_rules_of_a_layer_are_those_written_out_by_hand(rules, block, num_queries, monkeypatch):
    """Packed, or as the last queries after a cache; in blocks of any size."""
    monkeypatch.setattr(attention_reference, "BLOCK", block)
    monkeypatch.setattr(attention_reference, "MAX_SCORES", block * 4 * sum(DOC_LENS))
    torch.manual_seed(0)
    query, target = torch.randn(2, 1, 4, sum(DOC_LENS), 8)
    key, value = torch.randn(2, 1, 2, sum(DOC_LENS), 8)
    if num_queries is not None:
        query, target = query[:, :, -num_queries:], target[:, :, -num_queries:]
    options = options_of(rules, 4) | ({"doc_lens": DOC_LENS} if num_queries is None else {})

    found, wanted = [], []
    for results, function in (
        (found, lambda *heads: attend(torch.nn.Module(), *heads, None, **options)[0]),
        (wanted, lambda *heads: by_hand(*heads, **options)),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        out = function(*leaves)
        (out * target.transpose(1, 2)).sum().backward()
        results += [out.detach(), *(leaf.grad for leaf in leaves)]

    for ours, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, reference, **CLOSE)


@pytest.mark.parametrize("wrong", [{"sliding_window": 4}, {"sliding_window": 6}, {"softcap": 2.1}, {"s_aux": None}])
def test_a_rule_off_by_little_would_be_seen(wrong):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 16, 8)
    options = options_of({"sliding_window": 5, "softcap": 2.0, "sinks": True}, 2)

    found = attend(torch.nn.Module(), query, key, value, None, **options)[0]

    assert relative_error(found, by_hand(query, key, value, **options)) < 1e-5
    assert relative_error(found, by_hand(query, key, value, **options | wrong)) > 1e-3


@pytest.mark.parametrize("rules", RULES[1:])
def test_no_tensor_holds_all_scores_of_a_long_document(rules, monkeypatch):
    monkeypatch.setattr(attention_reference, "BLOCK", 8)
    monkeypatch.setattr(attention_reference, "MAX_SCORES", 8 * 4 * 128)
    query = torch.randn(1, 4, 128, 8, requires_grad=True)
    key, value = torch.randn(2, 1, 2, 128, 8)
    options = options_of(rules, 4)

    with Largest() as ours:
        attend(torch.nn.Module(), query, key, value, None, **options, doc_lens=(128,))[0].sum().backward()
    with Largest() as plain:
        by_hand(query, key, value, **options)

    assert plain.elements >= 4 * 128 * 128, "the probe would not see it"
    assert ours.elements <= 8 * 4 * 128


# Refusals


def test_masks_and_scores_of_unknown_kind_are_refused():
    query = torch.randn(1, 2, 4, 8)
    module = torch.nn.Module()

    with pytest.raises(ConfigError, match="does not support 4D attention masks"):
        attend(module, query, query, query, torch.ones(1, 1, 4, 4))
    with pytest.raises(ConfigError, match="uses position_bias"):
        attend(module, query, query, query, None, position_bias=torch.ones(1))
    with pytest.raises(ConfigError, match="attends to later tokens"):
        attend(module, query, query, query, None, is_causal=False)
    module.is_causal = False
    with pytest.raises(ConfigError, match="attends to later tokens"):
        attend(module, query, query, query, None)


@pytest.mark.parametrize("doc_lens", [(3,), (3, 2)])
def test_lengths_that_do_not_cover_the_row_are_refused(doc_lens):
    """As where another trainer splits a packed row over ranks."""
    query = torch.randn(1, 2, 4, 8)

    with pytest.raises(ConfigError, match="context parallelism"):
        attend(torch.nn.Module(), query, query, query, None, doc_lens=doc_lens)
