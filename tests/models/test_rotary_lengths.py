"""RoPE that depends on the length of the input: a document's own, whatever else is or was computed."""

from typing import Any

import pytest
import torch

from factory import CPU, SHAPE, build_model, packed_inputs, random_tokens, save_folder
from unspool.models.load import load_model
from unspool.models.rotary import apply_base, apply_parameters

ORIGINAL = SHAPE["max_position_embeddings"]
LENS = (20, ORIGINAL + 30, 7, ORIGINAL + 9, 12)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.2, 2.0, 3.5, 6.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
SETTINGS = {"longrope": LONGROPE, "dynamic": DYNAMIC}
LAYERS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}


@pytest.fixture(params=["longrope", "dynamic", "dynamic of one layer type"])
def models(request, tmp_path) -> tuple[Any, Any]:
    """Loaded as for training, and plain."""
    settings = SETTINGS[request.param.split()[0]]
    options: dict[str, Any] = {"rope_parameters": settings}
    if "layer" in request.param:
        local = {"rope_type": "default", "rope_theta": 1e4}
        options = {"rope_parameters": {"sliding_attention": local, "full_attention": settings}, **LAYERS}
    family = "Gemma3Text" if "layer" in request.param else "llama"
    if family == "Gemma3Text":
        import transformers

        torch.manual_seed(0)
        config = transformers.Gemma3TextConfig(**SHAPE | options, attn_implementation="eager")
        plain = transformers.Gemma3ForCausalLM(config).eval()
    else:
        plain = build_model(attention="eager", **options)
    return load_model(str(save_folder(tmp_path / "model", plain)), device=CPU, dtype=torch.float32), plain


def plain_states(plain: Any, tokens: torch.Tensor) -> torch.Tensor:
    # A new one: it would remember longer inputs.
    plain.base_model.rotary_emb = type(plain.base_model.rotary_emb)(plain.config)
    return plain.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]


@torch.no_grad()
def test_a_packed_document_is_rotated_as_if_it_were_alone(models):
    model, plain = models
    tokens = random_tokens(sum(LENS))

    found = model.base_model(**packed_inputs(tokens, LENS), use_cache=False).last_hidden_state[0]

    for document, part in zip(tokens.split(LENS, dim=1), found.split(LENS), strict=True):
        torch.testing.assert_close(part, plain_states(plain, document), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_a_model_computed_before_changes_nothing(models):
    model, plain = models
    longer, tokens = random_tokens(3 * ORIGINAL), random_tokens(ORIGINAL + 20, seed=1)

    model.base_model(input_ids=longer, use_cache=False)
    found = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]

    torch.testing.assert_close(found, plain_states(plain, tokens), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_positions_of_the_whole_document_count_and_not_those_at_hand(models):
    model, _ = models
    tokens, length = random_tokens(ORIGINAL + 40), ORIGINAL + 40
    named = {} if "full_attention" not in model.config.rope_parameters else {"layer_type": "full_attention"}
    rotary, hidden = model.base_model.rotary_emb, torch.zeros(1, 1, 1)
    wanted = rotary(hidden, torch.arange(length)[None], **named)

    seen = []
    hook = rotary.register_forward_hook(lambda module, args, out: seen.append(out))
    part = {"input_ids": tokens[:, :30], "position_ids": torch.arange(30)[None]}
    model.base_model(**part, doc_lens=(30,), rope_spans=((30, length),), use_cache=False)
    hook.remove()

    for found, right in zip(seen[-1], wanted, strict=True):
        assert torch.equal(found, right[:, :30])
    short = rotary(hidden, torch.arange(30)[None], **named)
    assert not torch.equal(short[0], wanted[0][:, :30]), "the lengths would not show"


def test_settings_that_are_applied_later_and_replaced_again(tmp_path):
    model = load_model(str(save_folder(tmp_path / "model")), device=CPU, dtype=torch.float32)
    tokens = random_tokens(sum(LENS))

    apply_parameters(model, dict(LONGROPE), 4 * ORIGINAL)
    packed = model.base_model(**packed_inputs(tokens, LENS), use_cache=False).last_hidden_state[0]
    alone = model.base_model(input_ids=tokens[:, : LENS[0]], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(packed[: LENS[0]], alone, rtol=1e-4, atol=1e-5)

    apply_base(model, 5e5)
    plain = build_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, attention="eager")
    found, wanted = (each(input_ids=tokens, use_cache=False).logits for each in (model, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
