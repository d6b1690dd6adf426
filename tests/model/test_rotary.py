"""Positions after a stage: what the config says, what is computed and what a later load computes are one."""

import json

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
)

from factory import CPU, SHAPE, build_model, build_tokenizer, packed_inputs, random_tokens, save_folder
from unspool.base.errors import ConfigError
from unspool.model.export import save_model
from unspool.model.load import load_model
from unspool.model.rotary import apply_base, apply_head_bases, apply_position, head_bases, rope_shape, rotate_heads
from unspool.position.scaling import Abf, Harpe, Position, Unchanged

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
FAMILIES = ["llama", "llama-mha", "qwen2", "qwen3", "mistral"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def plain_rope(base: float, **more) -> dict:
    return {"rope_type": "default", "rope_theta": base, **more}


@torch.no_grad()
def logits(model, tokens=None) -> torch.Tensor:
    return model(input_ids=random_tokens(40) if tokens is None else tokens).logits


@torch.no_grad()
def decoded(model, tokens, first: int) -> torch.Tensor:
    """Logits with a cache: `first` tokens at once, then one by one."""
    cache, found = DynamicCache(), []
    for part in torch.split(tokens, [first] + [1] * (tokens.shape[1] - first), dim=1):
        seen = cache.get_seq_length()
        positions = torch.arange(seen, seen + part.shape[1])[None]
        found.append(model(input_ids=part, position_ids=positions, past_key_values=cache, use_cache=True).logits)
    return torch.cat(found, dim=1)


# One base


@pytest.mark.parametrize("family", FAMILIES)
def test_a_raised_base_is_what_a_fresh_model_of_that_base_computes(family):
    model = build_model(family)
    before = logits(model)

    apply_base(model, 8e6)

    fresh = build_model(family, rope_parameters=plain_rope(8e6), attention="eager")
    assert torch.equal(model.base_model.rotary_emb.inv_freq, fresh.base_model.rotary_emb.inv_freq)
    torch.testing.assert_close(logits(model), logits(fresh), **CLOSE)
    assert (logits(model) - before).abs().max() > 1e-2, "the old base would have passed"


def test_a_raised_base_keeps_the_part_of_each_head_that_is_rotated():
    model = build_model("Phi", rope_parameters=plain_rope(1e4, partial_rotary_factor=0.5))

    apply_base(model, 8e6)

    fresh = build_model("Phi", rope_parameters=plain_rope(8e6, partial_rotary_factor=0.5))
    assert torch.equal(model.base_model.rotary_emb.inv_freq, fresh.base_model.rotary_emb.inv_freq)
    torch.testing.assert_close(logits(model), logits(fresh), **CLOSE)


def test_a_raised_base_replaces_an_older_scaling():
    model = build_model(rope_parameters=LLAMA3)

    apply_position(model, Abf(method="abf", base=8e6), 256)

    assert model.config.rope_parameters == plain_rope(8e6)
    torch.testing.assert_close(logits(model), logits(build_model(rope_parameters=plain_rope(8e6))), **CLOSE)


@pytest.mark.parametrize("rope", [plain_rope(1e4), LLAMA3])
def test_unchanged_changes_nothing_but_the_context(rope):
    model = build_model(rope_parameters=rope)
    before = logits(model)

    apply_position(model, Unchanged(), 256)

    assert torch.equal(logits(model), before)
    assert model.config.max_position_embeddings == 256


@pytest.mark.parametrize(
    "position", [Unchanged(), Abf(method="abf", base=8e6), Harpe(method="harpe", low=1e4, high=1e5)]
)
def test_the_longest_context_never_shrinks(position):
    model = build_model()

    apply_position(model, position, 16)

    assert model.config.max_position_embeddings == 64


@pytest.mark.parametrize(
    "rope",
    [
        plain_rope(1e4) | {"rope_type": "dynamic", "factor": 4.0},
        plain_rope(1e4)
        | {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 16,
        },
    ],
)
def test_a_scaling_that_depends_on_the_longest_context_is_not_stretched_in_silence(rope):
    model = build_model(rope_parameters=rope)
    apply_position(model, Unchanged(), 64)

    with pytest.raises(ConfigError, match=f"{rope['rope_type']} scaling changes.*use method abf"):
        apply_position(model, Unchanged(), 65)


# Scalings

SCALED = {
    "ntk": {},
    "pi": {},
    "dynamic": {},
    "ntk-by-parts": {"beta_fast": 4},
    "yarn": {"beta_fast": 4},
    "longrope": {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]},
    "llama3": {},
}


def scaled(method: str, **more):
    return TypeAdapter(Position).validate_python({"method": method} | SCALED[method] | more)


@pytest.mark.parametrize("method", SCALED)
def test_a_scaled_model_is_what_plain_transformers_loads_from_its_folder(method, tmp_path):
    model = build_model()
    shape, before = rope_shape(model.config), logits(model, random_tokens(200))
    settled = scaled(method).settle(shape, 256)

    apply_position(model, scaled(method), 256)

    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    found, again = (each.base_model.rotary_emb for each in (model, plain))
    assert torch.equal(found.inv_freq, again.inv_freq)
    assert found.attention_scaling == again.attention_scaling
    wanted = settled.tables(shape)
    np.testing.assert_allclose(found.inv_freq.numpy(), wanted.inv_freq, rtol=1e-6, atol=1e-9)
    assert found.attention_scaling == pytest.approx(wanted.attention_factor)
    tokens = random_tokens(200)
    torch.testing.assert_close(logits(model, tokens), logits(plain, tokens), **CLOSE)
    assert (logits(model, tokens) - before).abs().max() > 1e-3, "unscaled positions would have passed"
    # Both have seen more than the original length, where `dynamic` and `longrope` change.
    np.testing.assert_allclose(found.inv_freq.numpy(), settled.tables(shape, 200).inv_freq, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", ["pi", "yarn", "longrope", "llama3"])
def test_a_second_stage_counts_from_the_true_original_length(method):
    model = build_model()
    apply_position(model, scaled(method), 128)
    apply_position(model, scaled(method), 256)

    fresh = build_model()
    apply_position(fresh, scaled(method), 256)
    assert model.config.rope_parameters == fresh.config.rope_parameters
    assert model.config.rope_parameters["factor"] == 4
    assert torch.equal(logits(model), logits(fresh))


@pytest.mark.parametrize("method", ["yarn", "longrope", "dynamic"])
def test_a_longer_context_under_a_scaling_that_depends_on_it_must_be_said(method):
    model = build_model()
    apply_position(model, scaled(method), 128)
    before = dict(model.config.rope_parameters)

    with pytest.raises(ConfigError, match=f"{method} scaling changes.*{method} anew"):
        apply_position(model, Unchanged(), 256)

    assert model.config.rope_parameters == before


def test_global_layers_of_gemma_are_extended_and_sliding_ones_keep_their_positions(tmp_path):
    model = build_gemma()
    local = model.base_model.rotary_emb.sliding_attention_inv_freq.clone()
    before = dict(model.config.rope_parameters["sliding_attention"])

    apply_position(model, scaled("yarn"), 256)

    assert model.config.rope_parameters["sliding_attention"] == before
    assert model.config.rope_parameters["full_attention"]["rope_type"] == "yarn"
    assert torch.equal(model.base_model.rotary_emb.sliding_attention_inv_freq, local)
    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name in ("sliding_attention", "full_attention"):
        found, again = (getattr(each.base_model.rotary_emb, f"{name}_inv_freq") for each in (model, plain))
        assert torch.equal(found, again)
    shape = rope_shape(build_gemma().config)
    wanted = scaled("yarn").settle(shape, 256).tables(shape).inv_freq
    np.testing.assert_allclose(model.base_model.rotary_emb.full_attention_inv_freq.numpy(), wanted, rtol=1e-6)


def test_a_base_per_head_is_refused_where_layers_have_positions_of_their_own():
    with pytest.raises(ConfigError, match=r"sliding layers.*use method abf"):
        apply_head_bases(build_gemma(), np.array([1e4, 1e5]))


def build_gemma():
    types = ["sliding_attention", "full_attention"]
    own = {"head_dim": 8, "layer_types": types, "sliding_window": 16, "pad_token_id": 0}
    torch.manual_seed(0)
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE | own)).eval()


@pytest.mark.parametrize("family", ["Olmo2", "Mixtral", "GPTNeoX", "Phi", "Gemma", "Granite", "Cohere"])
@pytest.mark.parametrize("method", ["yarn", "llama3"])
def test_other_families_are_scaled_by_their_configs_alone(family, method, tmp_path):
    model = build_model(family, pad_token_id=0)
    shape = rope_shape(model.config)

    apply_position(model, scaled(method), 256)

    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).base_model.rotary_emb
    assert torch.equal(model.base_model.rotary_emb.inv_freq, again.inv_freq)
    wanted = scaled(method).settle(shape, 256).tables(shape).inv_freq
    np.testing.assert_allclose(again.inv_freq.numpy(), wanted, rtol=1e-6, atol=1e-9)


def test_a_scaling_that_an_architecture_forbids_is_refused_before_training():
    with pytest.raises(ConfigError, match=r"'phi3' does not allow rope_type 'yarn'.*use method abf"):
        apply_position(build_model("Phi3", pad_token_id=0), scaled("yarn"), 256)


@pytest.mark.parametrize("wrong", ["ignores", "bfloat16"])
def test_a_model_that_makes_other_frequencies_of_the_settings_is_refused(wrong, monkeypatch):
    """As an architecture does that knows only plain RoPE, or keeps its tables in bfloat16."""
    model = build_model()
    kind = type(model.base_model.rotary_emb)
    own = kind.__init__

    def other(self, config):
        own(self, config)
        self.inv_freq = self.original_inv_freq * 4 if wrong == "ignores" else self.inv_freq.bfloat16().float()

    monkeypatch.setattr(kind, "__init__", other)
    with pytest.raises(ConfigError, match="computes other frequencies from rope_type 'linear'"):
        apply_position(model, scaled("pi"), 256)


# A base per head


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_bases_per_head_are_one_base_for_all(family):
    ours, reference = build_model(family), build_model(family)
    apply_base(reference, 5e5)

    apply_head_bases(ours, np.full(rope_shape(ours.config).num_kv_heads, 5e5))

    tokens = random_tokens(24)
    torch.testing.assert_close(logits(ours, tokens), logits(reference, tokens), **CLOSE)
    torch.testing.assert_close(decoded(ours, tokens, first=9), logits(reference, tokens), **CLOSE)
    torch.testing.assert_close(decoded(ours, tokens, first=1), logits(reference, tokens), **CLOSE)


@torch.no_grad()
def test_packed_documents_with_a_base_per_head_come_out_as_each_alone():
    model, tokens, doc_lens = build_model(), random_tokens(20), (7, 1, 12)
    apply_head_bases(model, np.array([1e4, 50.0]))

    packed = model.base_model(**packed_inputs(tokens, doc_lens), use_cache=False).last_hidden_state[0]

    alone = [model.base_model(input_ids=part).last_hidden_state[0] for part in torch.split(tokens, list(doc_lens), 1)]
    torch.testing.assert_close(packed, torch.cat(alone), **CLOSE)


@torch.no_grad()
def first_layer_heads(model) -> torch.Tensor:
    """What each query head of the first layer says, [tokens, heads, head_dim]."""
    seen = []
    hook = model.base_model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits(model)
    hook.remove()
    return seen[0][0].reshape(40, 4, -1)


@pytest.mark.parametrize(("family", "bases"), [("llama", [1e6, 50.0]), ("llama-mha", [1e6, 50.0, 1e4, 500.0])])
def test_each_head_turns_by_its_own_base_and_query_heads_by_that_of_their_kv_head(family, bases):
    ours = build_model(family)
    apply_head_bases(ours, np.array(bases))
    found = first_layer_heads(ours)

    for base in bases:
        reference = build_model(family)
        apply_base(reference, base)
        wanted = first_layer_heads(reference)
        for head in range(4):
            own = bases[head * len(bases) // 4] == base
            error = float((found[:, head] - wanted[:, head]).norm() / wanted[:, head].norm())
            assert error < 1e-5 if own else error > 1e-2, (head, base, error)


@pytest.mark.parametrize(("order", "wanted"), [("descending", [1e6, 1e4]), ("ascending", [1e4, 1e6])])
def test_a_stage_gives_heads_the_bases_in_the_order_asked_for(order, wanted):
    model, reference = build_model(), build_model()

    apply_position(model, Harpe(method="harpe", low=1e4, high=1e6, order=order), 256)

    assert head_bases(model) == wanted
    apply_head_bases(reference, np.array(wanted))
    assert torch.equal(logits(model), logits(reference))


def test_a_second_stage_may_give_heads_new_bases():
    model, reference = build_model(), build_model()
    apply_position(model, Harpe(method="harpe", low=1e4, high=1e5), 128)

    apply_position(model, Harpe(method="harpe", low=1e5, high=1e6), 256)

    apply_head_bases(reference, np.array([1e6, 1e5]))
    assert torch.equal(logits(model), logits(reference))


def test_one_base_after_a_base_per_head_is_refused():
    model = build_model()
    apply_position(model, Harpe(method="harpe", low=1e4, high=1e5), 128)

    with pytest.raises(ConfigError, match="already has a base per head"):
        apply_position(model, Abf(method="abf", base=8e6), 256)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Cohere", {}),  # turns neighbours, not halves
        ("SmolLM3", {"no_rope_layers": [1, 0], "pad_token_id": 0}),  # leaves layers unturned
        ("GPTNeoX", {}),  # keeps its attention elsewhere
        ("DeepseekV3", {"q_lora_rank": None}),  # turns a part of its own beside the heads
    ],
)
def test_a_base_per_head_is_refused_where_heads_are_turned_otherwise(family, changes):
    with pytest.raises(ConfigError, match="rotates its heads in another way"):
        apply_position(build_model(family, **changes), Harpe(method="harpe", low=1e4, high=1e5), 128)


def test_a_base_per_head_is_refused_where_our_attention_is_not_used():
    """Any other attention would leave the heads unturned."""
    with pytest.raises(ConfigError, match="rotates its heads in another way"):
        apply_position(build_model(attention="sdpa"), Harpe(method="harpe", low=1e4, high=1e5), 128)


def test_a_base_per_head_is_refused_for_a_wrong_count():
    with pytest.raises(ConfigError, match="3 bases for 2 KV heads"):
        apply_head_bases(build_model(), np.array([1e4, 1e5, 1e6]))
    with pytest.raises(ConfigError, match="bases for 3 layers, and there are 2"):
        apply_head_bases(build_model(), np.full((3, 2), 1e4))


def test_heads_of_which_only_a_part_turns_keep_the_rest_under_a_base_per_head():
    rope = plain_rope(1e4, partial_rotary_factor=0.5)
    ours, reference = (build_model("Phi", rope_parameters=rope, num_key_value_heads=4) for _ in range(2))
    before = logits(ours)
    apply_base(reference, 5e5)

    apply_head_bases(ours, np.full(4, 5e5))

    assert ours.base_model.layers[0].self_attn.head_inv_freq.shape == (4, 2)
    torch.testing.assert_close(logits(ours), logits(reference), **CLOSE)
    assert (logits(ours) - before).abs().max() > 1e-4, "the old base would have passed"


def test_bases_can_move_on_by_one_head_in_each_layer(tmp_path):
    model, reference, still = build_model(), build_model(), build_model()
    options = {"method": "harpe", "low": 50.0, "high": 1e6}
    apply_position(model, Harpe(**options, rotate_by_layer=True), 256)
    apply_position(still, Harpe(**options), 256)

    assert head_bases(model) == [[1e6, 50.0], [50.0, 1e6]]
    assert head_bases(still) == [1e6, 50.0], "equal layers are said once"
    apply_head_bases(reference, head_bases(model))
    assert torch.equal(logits(model), logits(reference))
    assert (logits(model) - logits(still)).abs().max() > 1e-4
    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)
    assert torch.equal(logits(load_model(str(tmp_path), device=CPU, dtype=torch.float32)), logits(model))


def test_the_control_with_one_shared_base_is_plain_rope():
    model = build_model()

    apply_position(model, Harpe(method="harpe", low=1e4, high=3e4, shared=True), 256)

    assert head_bases(model) is None
    assert model.config.rope_parameters == plain_rope(2e4)


def test_a_model_without_rotary_positions_is_refused(tmp_path):
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)
    save_folder(tmp_path, GPT2LMHeadModel(config))

    with pytest.raises(ConfigError, match="'gpt2' has no RoPE base"):
        rope_shape(config)
    with pytest.raises(ConfigError, match="'gpt2' has no RoPE base"):
        load_model(str(tmp_path), device=CPU, dtype=torch.float32)


# Exports


@pytest.mark.parametrize("family", FAMILIES)
def test_a_raised_base_gives_the_same_logits_in_plain_transformers(family, tmp_path):
    model = build_model(family)
    apply_position(model, Abf(method="abf", base=8e6), 256)

    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)

    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert plain.config._attn_implementation == "sdpa"
    assert plain.config.max_position_embeddings == 256
    torch.testing.assert_close(logits(plain), logits(model), **CLOSE)
    assert "unspool" not in (tmp_path / "config.json").read_text()


def test_a_base_per_head_reloads_to_the_same_logits_and_only_with_us(tmp_path):
    model = build_model()
    apply_position(model, Harpe(method="harpe", low=1e4, high=1e6), 256)

    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)

    again = load_model(str(tmp_path), device=CPU, dtype=torch.float32)
    assert torch.equal(logits(again), logits(model))
    assert again.config.max_position_embeddings == 256
    assert json.loads((tmp_path / "config.json").read_text())["head_bases"] == [1e6, 1e4]
    for loader in (AutoModelForCausalLM, AutoConfig):
        with pytest.raises(ValueError, match="custom code"):
            loader.from_pretrained(tmp_path, trust_remote_code=False)


# Precision


def test_tables_stay_fp32_under_bfloat16_autocast_as_in_training_on_a_gpu():
    """In bf16, positions above 256 could not be told apart: 1000 and 1003 are one number."""
    model, tables = build_model(), []
    apply_base(model, 5e5)
    model.base_model.rotary_emb.register_forward_hook(lambda module, args, out: tables.extend(out))
    positions = torch.tensor([[0, 1, 1000, 1003, 50_001]])

    with torch.autocast("cpu", torch.bfloat16):
        model.base_model(input_ids=random_tokens(5), position_ids=positions, use_cache=False)

    exact = np.outer(positions[0].numpy(), 5e5 ** -(np.arange(0, 8, 2) / 8))
    for table, wanted in zip(tables, (np.cos(exact), np.sin(exact)), strict=True):
        assert table.dtype == torch.float32
        assert np.abs(table[0, :, :4].numpy() - wanted).max() < 1e-2
    assert not torch.equal(tables[0][0, 2], tables[0][0, 3])


def test_heads_with_their_own_base_are_turned_in_fp32():
    query, key = torch.randn(2, 1, 2, 3, 8).bfloat16()
    inv_freq = torch.tensor([[1.0, 0.1, 0.01, 0.001], [1.0, 0.2, 0.04, 0.008]])
    positions = torch.tensor([[0, 1000, 1003]])

    turned = rotate_heads(query, key, inv_freq, positions)

    for found, heads in zip(turned, (query, key), strict=True):
        assert found.dtype == torch.float32
        angles = positions[0][None, :, None].double() * inv_freq[:, None].double()
        first, second = heads[0].double().chunk(2, dim=-1)
        wanted = torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )
        torch.testing.assert_close(found[0].double(), wanted, rtol=0, atol=1e-3)


def test_a_model_loaded_in_bfloat16_keeps_its_frequencies_in_fp32(tmp_path):
    save_folder(tmp_path)

    model = load_model(str(tmp_path), device=CPU, dtype=torch.bfloat16)

    assert model.dtype == torch.bfloat16
    assert torch.equal(model.base_model.rotary_emb.inv_freq, build_model().base_model.rotary_emb.inv_freq)
    apply_base(model, 8e6)
    assert model.base_model.rotary_emb.inv_freq.dtype == torch.float32
