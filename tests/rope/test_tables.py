"""Frequencies equal those of `transformers`, whichever way a config spells them."""

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, Phi3Config, PhiConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from unspool.core.errors import ConfigError
from unspool.rope.methods import PI, Dynamic, Llama3, LongRoPE, NTKByParts, YaRN
from unspool.rope.tables import frequencies, global_parameters, old_fields, shape_of, tables

K = 1024
CLOSE = 1e-6
# Head size and the part of it that turns.
SIZES = [(32, 1.0), (64, 1.0), (80, 0.4), (96, 0.75), (128, 1.0)]
BASES = [10_000.0, 500_000.0, 1.28e8]


def config(head_dim: int, partial: float, base: float, length: int = 8 * K, **more) -> LlamaConfig:
    rope = {"rope_type": "default", "rope_theta": base} | ({"partial_rotary_factor": partial} if partial != 1 else {})
    return LlamaConfig(
        hidden_size=4 * head_dim,
        head_dim=head_dim,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        rope_parameters=rope,
        **more,
    )


def methods(dim: int):
    rng = np.random.default_rng(0)
    short, long = (tuple(rng.uniform(1, high, dim // 2).tolist()) for high in (1.2, 40))
    return [
        PI(method="pi"),
        Dynamic(method="dynamic"),
        Dynamic(method="dynamic", factor=2.5),
        NTKByParts(method="ntk-by-parts"),
        YaRN(method="yarn"),
        YaRN(method="yarn", beta_fast=16, beta_slow=2, truncate=False, attention_factor=1.1),
        LongRoPE(method="longrope", short_factor=short, long_factor=long),
        Llama3(method="llama3"),
        Llama3(method="llama3", factor=3, low_freq_factor=2, high_freq_factor=9),
    ]


def theirs(parameters: dict, plain: LlamaConfig, max_positions: int, seq_len: int | None):
    plain.rope_parameters = dict(parameters)
    plain.max_position_embeddings = max_positions
    inv_freq, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](plain, device=torch.device("cpu"), seq_len=seq_len)
    return inv_freq.double().numpy(), factor


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("head_dim", "partial"), SIZES)
def test_tables_are_those_of_transformers(head_dim, partial, base):
    dim, plain = int(head_dim * partial), config(head_dim, partial, base)
    shape = shape_of(plain.to_dict())
    for position in methods(dim):
        for context_len in (16 * K, 96 * K, 1024 * K):
            settled = position.resolve(shape, context_len)
            parameters = settled.parameters | ({"partial_rotary_factor": partial} if partial != 1 else {})
            for seq_len in (None, 8 * K, 8 * K + 1, context_len):
                wanted, factor = theirs(parameters, plain, settled.max_positions, seq_len)

                found = settled.tables(shape, seq_len)

                assert found.inv_freq.dtype == np.float32
                assert found.inv_freq.shape == (dim // 2,)
                # The second part is for theirs: in float32 a blend of two frequencies loses a digit.
                np.testing.assert_allclose(found.inv_freq, wanted, rtol=CLOSE, atol=1e-9)
                assert found.attention_factor == pytest.approx(factor, rel=CLOSE)


def test_tables_in_bfloat16_would_not_pass():
    found = tables({"rope_type": "linear", "rope_theta": 1e4, "factor": 8}, 64, max_positions=8 * K).inv_freq
    rounded = torch.from_numpy(found).bfloat16().double().numpy()

    with pytest.raises(AssertionError):
        np.testing.assert_allclose(rounded, found, rtol=CLOSE, atol=0)
    assert np.abs(rounded / found - 1).max() > 1e-3


def test_frequencies_are_powers_of_the_base_computed_by_hand_and_rounded_once():
    assert frequencies(np.array([10_000.0, 16.0]), 4).tolist() == [[1.0, np.float32(0.01)], [1.0, 0.25]]
    exact = [8e6 ** (-2 * index / 128) for index in range(64)]
    assert frequencies(np.array([8e6]), 128)[0].tolist() == [float(np.float32(value)) for value in exact]


# Reading and writing configs


@pytest.mark.parametrize(("head_dim", "partial"), [(64, 1.0), (80, 0.4)])
def test_old_fields_and_rope_parameters_are_read_to_the_same_tables_by_us_and_by_transformers(head_dim, partial):
    shape = shape_of(config(head_dim, partial, 5e5).to_dict())
    for position in methods(int(head_dim * partial)):
        settled = position.resolve(shape, 64 * K)
        parameters = settled.parameters | ({"partial_rotary_factor": partial} if partial != 1 else {})
        beside = {"hidden_size": 4 * head_dim, "head_dim": head_dim, "num_attention_heads": 4}
        beside |= {"num_key_value_heads": 2, "max_position_embeddings": settled.max_positions}
        wanted = settled.tables(shape, 64 * K)
        for spelled in (old_fields(parameters, settled.max_positions), {"rope_parameters": parameters}):
            for values in ({**beside, **spelled}, LlamaConfig(**beside, **spelled).to_dict()):
                again, read = shape_of(values), global_parameters(values)
                found = tables(read, again.rotary_dim, max_positions=again.max_positions, seq_len=64 * K)
                assert np.array_equal(found.inv_freq, wanted.inv_freq), position
                assert found.attention_factor == wanted.attention_factor
                assert again.original_len == 8 * K, "a later stage would count from elsewhere"


def test_old_fields_of_plain_rope_are_one_number():
    assert old_fields({"rope_type": "default", "rope_theta": 8e6}, 64 * K) == {"rope_theta": 8e6, "rope_scaling": None}


def test_layers_of_gemma_have_two_bases_and_the_global_one_is_read_and_written():
    values = Gemma3TextConfig(num_hidden_layers=6).to_dict()
    assert shape_of(values).base == 1e6

    nested = values["rope_parameters"] | {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    old = old_fields(nested, 64 * K)

    assert old["rope_local_base_freq"] == 10_000.0
    read = Gemma3TextConfig(num_hidden_layers=6, **old).rope_parameters
    assert read["full_attention"]["factor"] == 8
    assert read["sliding_attention"]["rope_theta"] == 10_000.0
    assert (
        old_fields({"full_attention": nested["full_attention"], "other": nested["sliding_attention"]}, 64 * K) is None
    )


def test_parts_of_heads_and_lengths_beside_the_settings_are_found():
    partial = PhiConfig(hidden_size=320, num_attention_heads=4, partial_rotary_factor=0.4)
    assert shape_of(partial.to_dict()).rotary_dim == 32
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    phi = Phi3Config(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=128 * K,
        original_max_position_embeddings=4 * K,
        rope_scaling={"type": "longrope", **factors},
        pad_token_id=0,
    )
    assert shape_of(phi.to_dict()).original_len == 4 * K


def test_a_model_without_rope_and_an_unknown_scaling_are_refused():
    with pytest.raises(ConfigError, match="'gpt2' has no RoPE base"):
        shape_of(GPT2Config().to_dict())
    with pytest.raises(ConfigError, match="Did you mean 'yarn'"):
        tables({"rope_type": "yarm", "rope_theta": 1e4}, 64, max_positions=8 * K)
