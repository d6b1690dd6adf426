"""Distances and gradients are those of stock attention, written out query by query, family by family."""

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from factory import SHAPE, packed_inputs, random_tokens
from unspool.core.errors import ConfigError
from unspool.models.attention.interface import NAME, register
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.policy import MemoryPolicy
from unspool.models.rotary import apply_rope
from unspool.rope.harpe import HARPE
from unspool.rope.methods import ABF, YaRN
from unspool.training.distill import layers as distillation_attention
from unspool.training.distill.layers import QueryKey, compare_layers, divergence, fitted_parameters

DOC_LENS = (7, 1, 12)
# The name in `transformers`, and what makes it what the case is about.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {}),
    "biases": ("Qwen2", {}),
    "norms of queries and keys": ("Qwen3", {"head_dim": 16}),
    "local and global layers": (
        "Gemma3Text",
        {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "capped scores": ("Gemma2", {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 2.0}),
    "one matrix for all": ("Phi3", {"sliding_window": 5}),
    "norms after attention": ("Olmo2", {}),
    "sinks": ("GptOss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5}),
}


def build(case: str = "plain", *, attention: str = NAME) -> Any:
    register()
    family, own = CASES[case]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**SHAPE | special | own, attn_implementation=attention)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    return model


def fitted(teacher, student, tokens: Tensor, doc_lens=DOC_LENS) -> tuple[float, dict[str, Tensor]]:
    """By the code under test: the sum of KL over layers, heads and queries, and its gradients."""
    layers, grads, total = fitted_parameters(student), {}, []

    def use(number: int, wanted: QueryKey, found: QueryKey) -> None:
        apart, *by = divergence(wanted, found, doc_lens)
        total.append(float(apart))
        got = torch.autograd.grad((found.query, found.key), list(layers[number].values()), by)
        grads.update(zip(layers[number], got, strict=True))

    compare_layers(teacher, student, packed_inputs(tokens, doc_lens), use)
    return math.fsum(total), grads


def plain_kl(wanted: Tensor, found: Tensor, *, has_sink: bool) -> Tensor:
    """[H, n, n] of attention weights, one query of one head at a time, in double precision."""
    total = torch.zeros((), dtype=torch.float64)
    for head in range(wanted.shape[0]):
        for query in range(wanted.shape[1]):
            p, q = wanted[head, query].double(), found[head, query].double()
            seen = p > 0
            total = total + (p[seen] * (p[seen] / q[seen]).log()).sum()
            if has_sink:
                total = total + (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log()
    return total


def by_the_book(teacher, student, tokens: Tensor, *, has_sink: bool) -> tuple[float, dict[str, Tensor]]:
    """Stock eager attention on each document alone, the student's layers given the teacher's inputs by hooks."""
    total = torch.zeros((), dtype=torch.float64)
    for part in torch.split(tokens, list(DOC_LENS), dim=1):
        with torch.no_grad():
            own = teacher.base_model(part, output_attentions=True, output_hidden_states=True, use_cache=False)

        hooks = [
            layer.register_forward_pre_hook(
                lambda layer, args, kwargs, hidden=hidden: ((hidden, *args[1:]), kwargs), with_kwargs=True
            )
            for layer, hidden in zip(student.base_model.layers, own.hidden_states, strict=False)
        ]
        found = student.base_model(part, output_attentions=True, use_cache=False)
        for hook in hooks:
            hook.remove()
        for wanted, got in zip(own.attentions, found.attentions, strict=True):
            total = total + plain_kl(wanted[0], got[0], has_sink=has_sink)
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_divergence_and_gradients_are_those_of_stock_attention_query_by_query(case):
    tokens = random_tokens(sum(DOC_LENS))
    teacher, student = build(case), build(case)
    stock = [build(case, attention="eager") for _ in range(2)]
    for model in (student, stock[1]):
        apply_rope(model, ABF(method="abf", base=50.0), 64)

    total, grads = fitted(teacher, student, tokens)
    wanted, wanted_grads = by_the_book(*stock, tokens, has_sink=case == "sinks")

    assert wanted > 0.1, "positions hardly differ, so the next lines would check little"
    assert total == pytest.approx(wanted, rel=1e-4)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    assert any("q" in name for name in grads)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted_grads[name], rtol=1e-3, atol=1e-5 * largest, msg=name)


def rotated(heads: Tensor, bases: Tensor) -> Tensor:
    """[H, n, D], each head by its own base."""
    half = heads.shape[-1] // 2
    angles = torch.arange(heads.shape[1])[None, :, None] * bases[:, None, None] ** (-torch.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def test_a_base_per_head_is_rotated_as_written_out():
    """No stock model has such positions, so Llama's attention is written out."""
    tokens = random_tokens(sum(DOC_LENS))
    teacher, student, plain = build(), build(), build(attention="eager")
    apply_rope(student, HARPE(method="harpe", low=10.0, high=200.0), 64)
    bases = torch.tensor(student.base_model.head_bases, dtype=torch.float64)
    assert bases.shape == (2,) and bases[0] != bases[1]

    total, grads = fitted(teacher, student, tokens)

    wanted = torch.zeros((), dtype=torch.float64)
    for part in torch.split(tokens, list(DOC_LENS), dim=1):
        with torch.no_grad():
            own = plain.base_model(part, output_attentions=True, output_hidden_states=True, use_cache=False)
        for number, layer in enumerate(plain.base_model.layers):
            hidden = layer.input_layernorm(own.hidden_states[number][0].detach())
            query = layer.self_attn.q_proj(hidden).view(-1, 4, 8).transpose(0, 1)
            key = layer.self_attn.k_proj(hidden).view(-1, 2, 8).transpose(0, 1)
            query = rotated(query.double(), bases.repeat_interleave(2))
            key = rotated(key.double(), bases).repeat_interleave(2, 0)
            scores = query @ key.transpose(1, 2) / math.sqrt(8)
            causal = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
            weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
            wanted = wanted + plain_kl(own.attentions[number][0], weights, has_sink=False)
    wanted.backward()
    wanted = wanted.detach()
    assert float(wanted) > 0.1
    assert total == pytest.approx(float(wanted), rel=1e-4)
    expected = dict(plain.named_parameters())
    assert all("q_proj" in name or "k_proj" in name for name in grads) and len(grads) == 4
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name].grad, rtol=1e-3, atol=1e-5 * float(grad.abs().max()), msg=name)


@pytest.mark.parametrize("case", CASES)
def test_without_a_change_of_positions_the_gradient_is_exactly_zero(case):
    teacher, student = build(case), build(case)

    total, grads = fitted(teacher, student, random_tokens(sum(DOC_LENS)))

    assert total == 0
    assert grads and all(bool((grad == 0).all()) for grad in grads.values())


def test_values_and_norms_of_layers_are_no_part_of_it_and_rows_of_values_get_no_gradient():
    assert [name.split(".", 3)[-1] for name in fitted_parameters(build("norms of queries and keys"))[1]] == [
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    ]
    phi = [build("one matrix for all") for _ in range(2)]
    apply_rope(phi[1], ABF(method="abf", base=50.0), 64)
    _, grads = fitted(*phi, random_tokens(sum(DOC_LENS)))
    grad = grads["model.layers.0.self_attn.qkv_proj.weight"]
    assert bool((grad[:48] != 0).any()) and bool((grad[48:] == 0).all())


def test_what_values_are_made_of_too_is_left_alone():
    model = build()
    for layer in model.base_model.layers:
        layer.self_attn.v_proj = layer.self_attn.k_proj

    assert [list(layer) for layer in fitted_parameters(model)] == [
        [f"model.layers.{number}.self_attn.q_proj.weight"] for number in range(2)
    ]


def test_documents_do_not_see_each_other():
    teacher, student = build(), build()
    apply_rope(student, YaRN(method="yarn", factor=4.0), 256)
    tokens = random_tokens(sum(DOC_LENS))
    parts = torch.split(tokens, list(DOC_LENS), dim=1)

    packed, _ = fitted(teacher, student, tokens)
    alone = [fitted(teacher, student, part, (part.shape[1],))[0] for part in parts]
    whole, _ = fitted(teacher, student, tokens, (sum(DOC_LENS),))

    assert packed == pytest.approx(sum(alone), rel=1e-5)
    assert abs(whole - packed) > 0.01 * packed


@pytest.mark.parametrize("window", [None, 5])
def test_blocks_of_queries_change_nothing(window, monkeypatch):
    rng = torch.Generator().manual_seed(0)
    teacher, student = (
        QueryKey(
            query=torch.randn(4, 20, 8, generator=rng),
            key=torch.randn(2, 20, 8, generator=rng),
            scale=8**-0.5,
            window=window,
            softcap=3.0,
            sinks=torch.zeros(4),
        )
        for _ in range(2)
    )
    whole = divergence(teacher, student, DOC_LENS)
    # Three queries of the longest document at a time.
    monkeypatch.setattr(distillation_attention, "SCORES_AT_ONCE", 4 * 12 * 3)
    blocks = []
    true_block = distillation_attention._block
    monkeypatch.setattr(
        distillation_attention, "_block", lambda *args: blocks.append(args[1].query.shape[1]) or true_block(*args)
    )

    torch.testing.assert_close(divergence(teacher, student, DOC_LENS), whole)

    assert blocks == [5, 2, 1, 3, 3, 3, 3]


@pytest.mark.parametrize(
    "policy",
    [
        MemoryPolicy(activation_checkpointing="full"),
        MemoryPolicy(activation_checkpointing="keep-attention", keep_products=1, attention_heads_at_once=1),
        MemoryPolicy(activation_checkpointing="full", layers_per_checkpoint=2, mlp_tiles=3),
    ],
)
def test_memory_settings_of_the_student_change_nothing_and_stay_as_they_were(policy):
    tokens = random_tokens(sum(DOC_LENS))
    teacher, plain, wrapped = build(), build(), build()
    for model in (plain, wrapped):
        apply_rope(model, ABF(method="abf", base=50.0), 64)
    apply_memory(wrapped, policy)
    before = [(vars(layer).get("forward"), dict(vars(layer.self_attn))) for layer in wrapped.base_model.layers]

    total, grads = fitted(teacher, wrapped, tokens)
    wanted, wanted_grads = fitted(teacher, plain, tokens)

    assert total == pytest.approx(wanted, rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted_grads[name])
    assert [(vars(layer).get("forward"), dict(vars(layer.self_attn))) for layer in wrapped.base_model.layers] == before


def test_a_model_whose_attention_is_not_ours_is_refused():
    with pytest.raises(ConfigError, match=r"the queries and keys of LlamaForCausalLM cannot be computed .* remove"):
        fitted_parameters(build(attention="eager"))


def test_a_model_whose_layers_give_more_than_hidden_states_to_each_other_is_refused():
    model = build()
    first, second = model.base_model.layers
    last: dict[str, Tensor] = {}
    first.register_forward_hook(lambda layer, args, out: last.update(out=out))
    second.self_attn.q_proj.register_forward_hook(lambda module, args, out: out + last["out"])

    with pytest.raises(ConfigError, match="remove attention_distillation"):
        fitted_parameters(model)
