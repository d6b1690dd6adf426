"""A gain of attention scores: as by hand, of which layers, with which method, and where it is refused."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from factory import CPU, SHAPE, build_model, build_tokenizer, packed_inputs, random_tokens
from unspool.core.errors import ConfigError
from unspool.models import attention_scale
from unspool.models.attention_scale import scale_attention
from unspool.models.export import save_model
from unspool.models.load import load_model
from unspool.models.rotary import apply_rope
from unspool.rope.cope import CoPE
from unspool.rope.drope import DroPE
from unspool.rope.harpe import HARPE
from unspool.rope.methods import ABF, Unchanged, YaRN

from .rotary_cases import CLOSE, FAMILIES, logits

OTHERS = {
    "Phi3": {"pad_token_id": 0},
    "Olmo2": {"pad_token_id": 0},
    "Cohere": {"pad_token_id": 0},
    "Gemma": {},
    "DeepseekV3": {"q_lora_rank": None},
}


def gemma3():
    types = ["sliding_attention", "full_attention"]
    own = {"head_dim": 8, "layer_types": types, "sliding_window": 16, "pad_token_id": 0, "query_pre_attn_scalar": 8}
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE | own, attn_implementation="unspool")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    return model


def by_hand(model, gains):
    """The same weights, with the gains as factors of the score scale of each layer."""
    scaled = copy.deepcopy(model)
    for layer, gain in zip(scaled.base_model.layers, gains, strict=True):
        layer.self_attn.scaling *= gain
    return logits(scaled)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_folded_gains_are_gains_of_the_scores(family):
    model = build_model(family, **OTHERS.get(family, {}))
    before, wanted = logits(model), by_hand(model, [1.75, 1.75])

    scale_attention(model, 1.75)

    torch.testing.assert_close(logits(model), wanted, **CLOSE)
    assert (wanted - before).abs().max() > 1e-2, "no gain would have passed"


def test_scores_of_plain_python_are_multiplied():
    """One layer, one head, three tokens: softmax(g · q·k / √d) written out."""
    model = build_model("llama-mha", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    attention, seen = model.model.layers[0].self_attn, {}
    for name in ("q_proj", "k_proj"):
        part = getattr(attention, name)
        part.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out[0].double()}))
    model.base_model.rotary_emb.inv_freq.zero_()  # no rotation, so that scores are plain products
    logits(model, random_tokens(3))
    before = seen["q_proj"] @ seen["k_proj"].T

    scale_attention(model, 1.5)

    logits(model, random_tokens(3))
    after = seen["q_proj"] @ seen["k_proj"].T
    for row in range(3):
        for column in range(3):
            assert float(after[row, column]) == pytest.approx(1.5 * float(before[row, column]), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_with_stock_attention_are_scaled_too(attention):
    model = build_model(attention=attention)
    wanted = by_hand(model, [1.75, 1.75])

    apply_rope(model, Unchanged(attention_scale=1.75), 64)

    torch.testing.assert_close(logits(model), wanted, **CLOSE)


def test_each_layer_has_its_own_gain():
    model = build_model()
    wanted = by_hand(model, [2.0, 0.5])

    scale_attention(model, [2.0, 0.5])

    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=2e-5)


def test_only_layers_with_full_attention_are_scaled_where_layers_differ():
    """Gemma scales by 1 + weight, so the gain is not a factor of the weight."""
    model = gemma3()
    wanted = by_hand(model, [1.0, 1.5])

    scale_attention(model, 1.5)

    torch.testing.assert_close(logits(model), wanted, **CLOSE)


@pytest.mark.parametrize("gain", [1, 1.0, [1.0, 1.0]])
def test_a_gain_of_one_changes_no_bit(gain):
    model = build_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    scale_attention(model, gain)

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_two_gains_are_their_product():
    once, twice = build_model(), build_model()

    scale_attention(once, 3.0)
    scale_attention(twice, 2.0)
    scale_attention(twice, 1.5)

    torch.testing.assert_close(logits(once), logits(twice), **CLOSE)


METHODS = {
    "unchanged": Unchanged,
    "abf": lambda **more: ABF(base=1e6, **more),
    "yarn": lambda **more: YaRN(beta_fast=4, **more),
    "cope": lambda **more: CoPE(base=1e6, tapered=3, **more),
    "drope": DroPE,
    "harpe": lambda **more: HARPE(low=1e4, high=1e6, **more),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_a_gain_and_plain_transformers_computes_it(method, tmp_path):
    model, reference = build_model(), build_model()
    apply_rope(reference, METHODS[method](), 256)
    wanted = by_hand(reference, [1.25, 1.25])

    apply_rope(model, METHODS[method](attention_scale=1.25), 256)

    torch.testing.assert_close(logits(model), wanted, **CLOSE)
    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)
    ours = load_model(str(tmp_path), device=CPU, dtype=torch.float32)
    torch.testing.assert_close(logits(ours), wanted, **CLOSE)
    if method != "harpe":  # whose folder needs trust_remote_code; its logits are compared by `unspool export`
        torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), wanted, **CLOSE)


@torch.no_grad()
def test_packed_documents_with_a_gain_come_out_as_each_alone():
    model, tokens, doc_lens = build_model(), random_tokens(20), (7, 1, 12)
    scale_attention(model, 1.75)

    packed = model.base_model(**packed_inputs(tokens, doc_lens), use_cache=False).last_hidden_state[0]

    alone = [model.base_model(input_ids=part).last_hidden_state[0] for part in torch.split(tokens, list(doc_lens), 1)]
    torch.testing.assert_close(packed, torch.cat(alone), **CLOSE)


def test_a_model_in_bf16_is_scaled_and_rounded_once():
    model = build_model().bfloat16()
    before = model.model.layers[0].self_attn.q_proj.weight.clone()

    scale_attention(model, 1.1)

    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, (before.double() * 1.1).bfloat16())


@pytest.mark.parametrize("wrong", ["normalized", "clipped", "no scaling"])
def test_a_model_whose_queries_do_not_follow_their_weights_is_refused_and_left_as_it_was(wrong, monkeypatch):
    model = build_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attention = model.model.layers[0].self_attn
    if wrong == "no scaling":
        attention.scaling = None
    else:
        change = {"normalized": torch.nn.functional.normalize, "clipped": lambda out: out.clamp(-0.1, 0.1)}[wrong]
        attention.q_proj.register_forward_hook(lambda _, args, out: change(out))

    with pytest.raises(ConfigError, match="no gain of the weights scales exactly; remove attention_scale"):
        scale_attention(model, 1.5)

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("family", "changes"), [("GPTNeoX", {}), ("DeepseekV3", {"q_lora_rank": 16})])
def test_other_attention_modules_are_refused(family, changes):
    model = build_model(family, **changes)

    with pytest.raises(ConfigError, match=f"attention_scale: {family}ForCausalLM computes its queries"):
        scale_attention(model, 1.5)


def test_gains_of_another_number_of_layers_are_refused():
    with pytest.raises(ConfigError, match="attention_scale holds 3 gains, but the model has 2 layers"):
        apply_rope(build_model(), ABF(base=1e6, attention_scale=[1.1, 1.2, 1.3]), 256)


def test_a_gain_that_is_folded_twice_is_caught(monkeypatch):
    plain = attention_scale.fold_gain

    def twice(*args):
        plain(*args)
        plain(*args)

    monkeypatch.setattr(attention_scale, "fold_gain", twice)
    with pytest.raises(ConfigError, match="remove attention_scale"):
        scale_attention(build_model(), 1.5)
