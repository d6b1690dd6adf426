"""Families of `transformers`, by construction: random small models, ours against its own eager attention.

Windows are shorter than the documents, caps low enough to matter.
"""

from typing import Any

import pytest
import torch
import transformers

from factory import SHAPE, packed_inputs, random_tokens
from unspool.core.errors import ConfigError
from unspool.data.packing.row import IGNORE
from unspool.models.attention.interface import NAME, register
from unspool.models.checks import check_attention, check_trainable
from unspool.models.generation.greedy import answer
from unspool.models.loss import read_head, summed_loss

DOC_LENS = (7, 1, 12, 3)
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": EXPERTS | {"num_experts": 4, "head_dim": 8},
    "Mistral": {"sliding_window": 5},
    "Mixtral": {"num_local_experts": 2, "sliding_window": 5},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 5},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi": {},
    "Phi3": {"sliding_window": 5},
    "Cohere": {"logit_scale": 0.25},
    "Cohere2": {"sliding_window": 5, "logit_scale": 0.25},
    "Granite": {"logits_scaling": 4.0},
    "GptOss": {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5},
    "Glm4": {"head_dim": 8},
    "Starcoder2": {"sliding_window": 5},
    "GPTNeoX": {},
}
# Several times the usual cost, and nothing that the others do not try.
SLOW = ("Qwen3Moe", "Mixtral", "Olmo3", "Cohere2", "Glm4", "Starcoder2", "Gemma")


def build(family: str, *, attention: str = NAME, **changes: Any) -> Any:
    register()
    settings = SHAPE | FAMILIES.get(family, {}) | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | changes
    config = getattr(transformers, f"{family}Config")(**settings, attn_implementation=attention)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        # Biases, norms and sinks start at 0 and 1, where leaving them out would not be noticed.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    return model


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAMILIES])
def family(request) -> str:
    return request.param


def test_packed_documents_give_logits_and_gradients_of_each_alone_in_stock_transformers(family):
    """Through the chunked loss, so with all that is done to the logits."""
    tokens = random_tokens(sum(DOC_LENS))
    labels = torch.cat([part[0].roll(-1) for part in torch.split(tokens, list(DOC_LENS), dim=1)])
    labels[torch.tensor(DOC_LENS).cumsum(0) - 1] = IGNORE
    ours, stock = build(family), build(family, attention="eager")

    hidden = ours.base_model(**packed_inputs(tokens, DOC_LENS), use_cache=False).last_hidden_state[0]
    total, _ = summed_loss(hidden, read_head(ours), labels, chunk=5)
    total.backward()
    wanted = torch.cat([stock(input_ids=part).logits[0] for part in torch.split(tokens, list(DOC_LENS), dim=1)])
    wanted_total = torch.nn.functional.cross_entropy(wanted, labels, ignore_index=IGNORE, reduction="sum")
    wanted_total.backward()

    torch.testing.assert_close(read_head(ours).logits(hidden), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(total, wanted_total, rtol=1e-5, atol=0)
    expected = {name: parameter.grad for name, parameter in stock.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
    for name, parameter in ours.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5 * largest, msg=name)


def test_families_pass_the_trials(family):
    model = build(family)
    windows = [getattr(part, "sliding_window", None) for part in (model.config, *model.modules())]

    check_attention(model, NAME)
    check_trainable(model)

    assert [getattr(part, "sliding_window", None) for part in (model.config, *model.modules())] == windows
    assert model.config._attn_implementation == NAME


@pytest.mark.parametrize("family", ["Mistral", "Gemma2", "Gemma3Text", "GptOss"])
@torch.no_grad()
def test_answers_on_a_cache_equal_stock_transformers_without_one(family):
    context, question = random_tokens(20), random_tokens(4, seed=1)
    stock = build(family, attention="eager")
    ids = torch.cat([context, question], dim=1)
    for _ in range(4):
        ids = torch.cat([ids, stock(input_ids=ids, use_cache=False).logits[:, -1:].argmax(dim=-1)], dim=1)

    found = answer(
        build(family), context[0].numpy(), [question[0].numpy()], max_new_tokens=4, stop_ids=(), prefill_chunk=6
    )

    assert found == [ids[0, 24:].tolist()]


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Phimoe", {"num_local_experts": 2, "sliding_window": 5}), ("Qwen2", {"sliding_window": 5})],
)
def test_a_window_that_our_attention_is_not_told_of_is_refused(family, changes):
    model = build(family, **changes)
    if family == "Qwen2":
        for layer in model.base_model.layers:
            layer.self_attn.sliding_window = None

    with pytest.raises(ConfigError, match="needs its own attention masks"):
        check_attention(model, NAME)

    assert model.config._attn_implementation == NAME
    assert model.config.sliding_window == 5


def test_layers_without_rotation_are_left_alone():
    """SmolLM3's second layer here; a changed base must not reach it."""
    model = build("SmolLM3")

    assert [layer.self_attn.use_rope for layer in model.base_model.layers] == [1, 0]
