"""Positions after a stage: what the config says, what is computed and what a later load computes are one."""

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
)

from factory import CPU, SHAPE, build_model, build_tokenizer, packed_inputs, random_tokens, save_folder
from unspool.core.errors import ConfigError
from unspool.models.export import save_model
from unspool.models.load import load_model
from unspool.models.rotary import (
    apply_base,
    apply_head_bases,
    apply_rope,
    decide_by_document,
    depends_on_length,
    rope_shape,
)
from unspool.reporting.model_card import describe_positions
from unspool.rope.harpe import HARPE
from unspool.rope.methods import ABF, AnyRopeMethod, Unchanged
from unspool.rope.tables import config_frequencies

from .rotary_cases import CLOSE, FAMILIES, logits, plain_rope

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


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

    apply_rope(model, ABF(method="abf", base=8e6), 256)

    assert model.config.rope_parameters == plain_rope(8e6)
    torch.testing.assert_close(logits(model), logits(build_model(rope_parameters=plain_rope(8e6))), **CLOSE)


@pytest.mark.parametrize("rope", [plain_rope(1e4), LLAMA3])
def test_unchanged_changes_nothing_but_the_context(rope):
    model = build_model(rope_parameters=rope)
    before = logits(model)

    apply_rope(model, Unchanged(), 256)

    assert torch.equal(logits(model), before)
    assert model.config.max_position_embeddings == 256


@pytest.mark.parametrize(
    "position", [Unchanged(), ABF(method="abf", base=8e6), HARPE(method="harpe", low=1e4, high=1e5)]
)
def test_the_longest_context_never_shrinks(position):
    model = build_model()

    apply_rope(model, position, 16)

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
    apply_rope(model, Unchanged(), 64)

    with pytest.raises(ConfigError, match=f"{rope['rope_type']} scaling depends on max_position.*use method abf"):
        apply_rope(model, Unchanged(), 65)


# Scalings

SCALED = {
    "ntk": {},
    "pi": {},
    "dynamic": {},
    "ntk-by-parts": {"beta_fast": 4},
    "yarn": {"beta_fast": 4},
    "longrope": {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]},
    "llama3": {},
    "cope": {"base": 1e6, "tapered": 3},
    "drope": {},
}


def scaled(method: str, **more):
    return TypeAdapter(AnyRopeMethod).validate_python({"method": method} | SCALED[method] | more)


@pytest.mark.parametrize("method", SCALED)
def test_a_scaled_model_is_what_plain_transformers_loads_from_its_folder(method, tmp_path):
    model = build_model()
    shape, before = rope_shape(model.config), logits(model, random_tokens(200))
    settled = scaled(method).resolve(shape, 256)

    apply_rope(model, scaled(method), 256)

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
    apply_rope(model, scaled(method), 128)
    apply_rope(model, scaled(method), 256)

    fresh = build_model()
    apply_rope(fresh, scaled(method), 256)
    assert model.config.rope_parameters == fresh.config.rope_parameters
    assert model.config.rope_parameters["factor"] == 4
    assert torch.equal(logits(model), logits(fresh))


@pytest.mark.parametrize("method", ["yarn", "longrope", "dynamic"])
def test_a_longer_context_under_a_scaling_that_depends_on_it_must_be_said(method):
    model = build_model()
    apply_rope(model, scaled(method), 128)
    before = dict(model.config.rope_parameters)

    with pytest.raises(ConfigError, match=f"{method} scaling depends on max_position_embeddings.*{method} again"):
        apply_rope(model, Unchanged(), 256)

    assert model.config.rope_parameters == before


def test_global_layers_of_gemma_are_extended_and_sliding_ones_keep_their_positions(tmp_path):
    model = build_gemma()
    local = model.base_model.rotary_emb.sliding_attention_inv_freq.clone()
    before = dict(model.config.rope_parameters["sliding_attention"])

    apply_rope(model, scaled("yarn"), 256)

    assert model.config.rope_parameters["sliding_attention"] == before
    assert model.config.rope_parameters["full_attention"]["rope_type"] == "yarn"
    assert torch.equal(model.base_model.rotary_emb.sliding_attention_inv_freq, local)
    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name in ("sliding_attention", "full_attention"):
        found, again = (getattr(each.base_model.rotary_emb, f"{name}_inv_freq") for each in (model, plain))
        assert torch.equal(found, again)
    shape = rope_shape(build_gemma().config)
    wanted = scaled("yarn").resolve(shape, 256).tables(shape).inv_freq
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

    apply_rope(model, scaled(method), 256)

    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).base_model.rotary_emb
    assert torch.equal(model.base_model.rotary_emb.inv_freq, again.inv_freq)
    wanted = scaled(method).resolve(shape, 256).tables(shape).inv_freq
    np.testing.assert_allclose(again.inv_freq.numpy(), wanted, rtol=1e-6, atol=1e-9)


def test_a_scaling_that_an_architecture_forbids_is_refused_before_training():
    with pytest.raises(ConfigError, match=r"'phi3' does not allow rope_type 'yarn'.*use method abf"):
        apply_rope(build_model("Phi3", pad_token_id=0), scaled("yarn"), 256)


@torch.no_grad()
@pytest.mark.parametrize("family", [*FAMILIES, "Phi3"])
def test_cope_rotates_as_a_model_whose_frequencies_were_multiplied_by_the_taper(family):
    changes = {"pad_token_id": 0} if family == "Phi3" else {}
    model, reference = (build_model(family, **changes) for _ in range(2))
    apply_base(reference, 1e6)
    reference.base_model.rotary_emb.inv_freq[-2:] *= torch.tensor([0.5, 0])

    apply_rope(model, scaled("cope"), 256)

    tokens = random_tokens(200)
    torch.testing.assert_close(logits(model, tokens), logits(reference, tokens), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("family", [*FAMILIES, "Phi3"])
def test_drope_computes_what_frequencies_of_zero_compute(family):
    changes = {"pad_token_id": 0} if family == "Phi3" else {}
    model, reference = (build_model(family, **changes) for _ in range(2))
    reference.base_model.rotary_emb.inv_freq.zero_()

    apply_rope(model, scaled("drope"), 256)

    tokens = random_tokens(200)
    assert torch.equal(logits(model, tokens), logits(reference, tokens))
    far = model(input_ids=tokens, position_ids=torch.arange(10**6, 10**6 + 200)[None]).logits
    assert torch.equal(far, logits(model, tokens))


@pytest.mark.parametrize(
    ("method", "wanted"), [("cope", "base 1e6, 2 of 4 frequencies lowered"), ("drope", "no rotation")]
)
def test_a_config_and_its_model_card_tell_tapered_and_removed_frequencies(method, wanted):
    model = build_model()
    apply_rope(model, scaled(method), 256)

    assert config_frequencies(model.config.to_dict(), 256)[1] == wanted
    assert describe_positions(model.config.to_dict()) == f"RoPE, {wanted}"


@pytest.mark.parametrize("method", ["cope", "drope"])
def test_a_method_without_lengths_is_stretched_by_unchanged(method, tmp_path):
    model, fresh = build_model(), build_model()
    apply_rope(model, scaled(method), 128)
    apply_rope(fresh, scaled(method), 256)

    apply_rope(model, Unchanged(), 256)

    assert model.config.rope_parameters == fresh.config.rope_parameters
    assert model.config.max_position_embeddings == 256
    assert torch.equal(logits(model), logits(fresh))
    assert not depends_on_length(model), "so shared prefixes and other trainers' rows need no document lengths"


@torch.no_grad()
@pytest.mark.parametrize("method", ["cope", "drope"])
def test_packed_documents_come_out_as_each_alone_with_divided_frequencies(method):
    model, tokens, doc_lens = build_model(), random_tokens(90), (70, 1, 19)
    apply_rope(model, scaled(method), 64)
    decide_by_document(model)

    packed = model.base_model(**packed_inputs(tokens, doc_lens), use_cache=False).last_hidden_state[0]

    alone = [model.base_model(input_ids=part).last_hidden_state[0] for part in torch.split(tokens, list(doc_lens), 1)]
    torch.testing.assert_close(packed, torch.cat(alone), **CLOSE)


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
    with pytest.raises(ConfigError, match="computes unexpected frequencies from rope_type 'linear'"):
        apply_rope(model, scaled("pi"), 256)


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
    apply_rope(model, ABF(method="abf", base=8e6), 256)

    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)

    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert plain.config._attn_implementation == "sdpa"
    assert plain.config.max_position_embeddings == 256
    torch.testing.assert_close(logits(plain), logits(model), **CLOSE)
    assert "unspool" not in (tmp_path / "config.json").read_text()


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


def test_a_model_loaded_in_bfloat16_keeps_its_frequencies_in_fp32(tmp_path):
    save_folder(tmp_path)

    model = load_model(str(tmp_path), device=CPU, dtype=torch.bfloat16)

    assert model.dtype == torch.bfloat16
    assert torch.equal(model.base_model.rotary_emb.inv_freq, build_model().base_model.rotary_emb.inv_freq)
    apply_base(model, 8e6)
    assert model.base_model.rotary_emb.inv_freq.dtype == torch.float32
