"""Each method: what it asks `transformers` for, and what it refuses."""

import json
import math
from typing import Literal

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from unspool.core.errors import ConfigError
from unspool.rope.methods import ROPE_METHODS, AnyRopeMethod, Unchanged, method_name, register_rope_method
from unspool.rope.tables import RopeMethod, RopeSettings, RopeShape

K = 1024
SHAPE = RopeShape(rotary_dim=128, num_kv_heads=4, base=500_000.0, original_len=8 * K, max_positions=8 * K)


def position(**plain):
    return TypeAdapter(AnyRopeMethod).validate_python(plain)


def settled(context_len=64 * K, rope=SHAPE, **plain):
    return position(**plain).resolve(rope, context_len)


def test_unchanged_is_the_default_method():
    assert position(method="unchanged") == Unchanged()


def test_one_base_is_plain_rope():
    found = settled(method="abf", base=8e6)

    assert found.parameters == {"rope_type": "default", "rope_theta": 8e6}
    assert found.max_positions == 64 * K


def test_ntk_gives_prolongs_four_million_from_8k_to_64k():
    found = settled(method="ntk")

    assert found.parameters["rope_type"] == "default"
    assert found.parameters["rope_theta"] == pytest.approx(5e5 * 8 ** (128 / 126))
    assert 4.0e6 < found.parameters["rope_theta"] < 4.2e6


def test_ntk_slows_the_slowest_dimension_by_the_factor_and_leaves_the_fastest():
    own = 5e5 ** -(np.arange(0, 128, 2) / 128)

    found = settled(method="ntk").tables(SHAPE).inv_freq

    assert found[0] == 1
    assert own[-1] / found[-1] == pytest.approx(8, rel=1e-6)


def test_two_ntk_stages_end_where_one_does():
    """Each counts from what the last one wrote, and the rule composes."""
    first = settled(method="ntk")
    between = RopeShape(
        rotary_dim=128,
        num_kv_heads=4,
        base=first.parameters["rope_theta"],
        original_len=first.max_positions,
        max_positions=first.max_positions,
    )

    again = settled(512 * K, between, method="ntk")

    wanted = settled(512 * K, method="ntk").parameters["rope_theta"]
    assert again.parameters["rope_theta"] == pytest.approx(wanted)


@pytest.mark.parametrize("method", ["pi", "dynamic", "ntk-by-parts", "yarn", "llama3"])
def test_the_factor_counts_from_the_original_length_unless_given(method):
    assert settled(method=method).parameters["factor"] == 8
    assert settled(method=method, factor=16).parameters["factor"] == 16
    assert settled(method=method, original="4K").parameters["factor"] == 16


def test_an_already_scaled_model_is_scaled_from_its_true_original_length():
    scaled = RopeShape(rotary_dim=128, num_kv_heads=4, base=5e5, original_len=8 * K, max_positions=64 * K)

    found = settled(512 * K, scaled, method="yarn")

    assert found.parameters["factor"] == 64
    assert found.parameters["original_max_position_embeddings"] == 8 * K


@pytest.mark.parametrize("method", ["pi", "ntk-by-parts", "yarn"])
def test_factor_original_and_longest_context_agree(method):
    """Some versions of `transformers` compute the factor of YaRN from the two lengths."""
    for found in (settled(method=method), settled(method=method, factor=10), settled(96 * K, method=method)):
        assert found.max_positions == found.parameters["factor"] * 8 * K


def test_dynamic_leaves_the_longest_context_since_that_is_where_its_scaling_begins():
    assert settled(method="dynamic").max_positions == 8 * K


def test_ntk_by_parts_is_yarn_without_temperature():
    parts, yarn = settled(method="ntk-by-parts").tables(SHAPE), settled(method="yarn").tables(SHAPE)

    assert np.array_equal(parts.inv_freq, yarn.inv_freq)
    assert (parts.attention_factor, yarn.attention_factor) == (1.0, pytest.approx(0.1 * math.log(8) + 1))
    assert settled(method="yarn", attention_factor=1.5).tables(SHAPE).attention_factor == 1.5


def test_yarn_keeps_what_turns_often_and_interpolates_what_does_not():
    own = 5e5 ** -(np.arange(0, 128, 2) / 128)

    ratio = own / settled(method="yarn").tables(SHAPE).inv_freq

    turns = 8 * K * own / (2 * math.pi)
    assert ratio[turns > 40] == pytest.approx(1, rel=1e-6)
    assert ratio[turns < 0.8] == pytest.approx(8, rel=1e-6)
    assert (np.diff(ratio) > -1e-5).all()


def test_longrope_takes_its_factors_from_the_recipe_or_from_a_file(tmp_path):
    factors = {"short_factor": [1.0] * 64, "long_factor": [4.0] * 64}
    plain, nested = tmp_path / "plain.json", tmp_path / "config.json"
    plain.write_text(json.dumps(factors))
    nested.write_text(json.dumps({"model_type": "phi3", "rope_scaling": {"type": "longrope", **factors}}))

    given = position(method="longrope", **factors)

    for file in (plain, nested):
        read = position(method="longrope", file=str(file))
        assert read.resolve(SHAPE, 64 * K) == given.resolve(SHAPE, 64 * K)
        assert position(**read.model_dump()) == read, "a recipe that was written down must be read again"
    found = given.resolve(SHAPE, 64 * K)
    short, long = (found.tables(SHAPE, length) for length in (8 * K, 8 * K + 1))
    assert short.inv_freq / long.inv_freq == pytest.approx(np.full(64, 4.0))
    assert short.attention_factor == pytest.approx(math.sqrt(1 + math.log(8) / math.log(8 * K)))


@pytest.mark.parametrize(
    ("plain", "wanted"),
    [
        ({"method": "abf", "base": 1}, "greater than 1"),
        ({"method": "abf"}, "base"),
        ({"method": "harpe", "low": 5e5, "high": 1e4}, "low 500000 exceeds high 10000"),
        ({"method": "harpe", "low": 1e4, "high": float("inf")}, "finite"),
        ({"method": "harpe"}, "bases uniform needs low and high"),
        ({"method": "harpe", "bases": "printed", "low": 1e6, "high": 5e6}, "printed is a fixed list"),
        ({"method": "harpe", "low": 1e4, "high": 1e5, "shared": True, "rotate_by_layer": True}, "no effect"),
        ({"method": "yarn", "factor": 0.5}, "greater than or equal to 1"),
        ({"method": "yarn", "beta_fast": 1, "beta_slow": 2}, "beta_slow 2 must be below beta_fast 1"),
        ({"method": "llama3", "low_freq_factor": 4}, "low_freq_factor must be below"),
        ({"method": "longrope"}, "needs short_factor and long_factor"),
        ({"method": "longrope", "file": "nowhere.json"}, "file nowhere.json is not readable JSON"),
        ({"method": "alibi"}, "'unchanged', 'abf', 'ntk', 'pi'"),
    ],
)
def test_impossible_settings_are_refused(plain, wanted):
    with pytest.raises(ValidationError, match=wanted):
        position(**plain)


@pytest.mark.parametrize("method", ["ntk", "pi", "dynamic", "ntk-by-parts", "yarn", "llama3"])
def test_a_context_that_needs_no_extension_is_refused(method):
    with pytest.raises(ConfigError, match=f"rope {method}: context 4K is shorter .* 8K.*use method unchanged"):
        settled(4 * K, method=method)


@pytest.mark.parametrize("method", ["ntk", "pi", "ntk-by-parts", "yarn"])
def test_a_factor_that_does_not_reach_the_context_is_refused(method):
    with pytest.raises(ConfigError, match=r"factor 4 × original 8K is only 32K.* 64K; give factor 8"):
        settled(method=method, factor=4)


def test_longrope_refuses_factors_for_another_head_size():
    with pytest.raises(ConfigError, match="long_factor holds 32 numbers, but this model rotates 64"):
        settled(method="longrope", short_factor=[1] * 64, long_factor=[1] * 32)


# The registry


class Halved(RopeMethod):
    method: Literal["halved"]
    times: int = 1

    def resolve(self, rope, context_len):
        parameters = {"rope_type": "linear", "factor": 2.0**self.times, "rope_theta": rope.base}
        return RopeSettings(parameters=parameters, max_positions=context_len)


@pytest.fixture
def halved():
    register_rope_method(Halved)
    yield
    del ROPE_METHODS["halved"]


def test_names_are_those_of_the_methods():
    assert {name: method_name(cls) for name, cls in ROPE_METHODS.items()} == {name: name for name in ROPE_METHODS}


def test_a_registered_method_is_read_listed_and_written(halved):
    adapter = TypeAdapter(AnyRopeMethod)

    found = position(method="halved", times=3)

    assert found == Halved(method="halved", times=3)
    assert adapter.dump_python(found) == {"method": "halved", "times": 3}
    assert adapter.json_schema()["discriminator"]["mapping"]["halved"] == "#/$defs/Halved"
    assert found.resolve(SHAPE, 64 * K).tables(SHAPE).inv_freq[0] == 1 / 8
    with pytest.raises(ValidationError, match="'self-extend', 'halved'"):
        position(method="alibi")
    with pytest.raises(ValidationError, match=r"halved\.time\n.*Extra inputs"):
        position(method="halved", time=3)


def test_a_method_that_is_not_registered_is_refused():
    with pytest.raises(ValidationError, match="does not match any of the expected tags"):
        position(method="halved")


def test_two_methods_cannot_have_one_name():
    class YaRN(RopeMethod):
        method: Literal["yarn"]

    with pytest.raises(ConfigError, match="'yarn' is already registered"):
        register_rope_method(YaRN)
