"""CoPE: which frequencies are tapered, and by how much."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from unspool.core.errors import ConfigError
from unspool.rope.cope import CoPE, taper
from unspool.rope.methods import ABF
from unspool.rope.tables import RopeShape

K = 1024
SHAPE = RopeShape(rotary_dim=128, num_kv_heads=4, base=500_000.0, original_len=8 * K, max_positions=8 * K)


def plain_reference(base: float, dim: int, tapered: int) -> list[float]:
    """The frequencies, one at a time, as the paper defines them."""
    found = []
    for pair in range(dim // 2):
        frequency = base ** (-2 * pair / dim)
        step = pair - (dim // 2 - tapered)
        if step >= 0 and tapered > 1:
            frequency *= 0.5 * (1 + math.cos(math.pi * step / (tapered - 1)))
        found.append(frequency)
    return found


@pytest.mark.parametrize(("base", "tapered"), [(1e7, 20), (5e5, 64), (5e5, 2), (1e16, 33)])
def test_frequencies_are_those_of_a_plain_reference(base, tapered):
    found = CoPE(base=base, tapered=tapered).resolve(SHAPE, 64 * K).tables(SHAPE)

    np.testing.assert_allclose(found.inv_freq, plain_reference(base, 128, tapered), rtol=1e-6, atol=1e-19)
    assert found.attention_factor == 1
    assert (found.inv_freq > 0).all(), "0 cannot be stored as a divisor"


def test_the_frozen_frequency_rotates_nothing_in_fp32_at_any_position():
    slowest = CoPE().resolve(SHAPE, 64 * K).tables(SHAPE).inv_freq[-1]

    angle = np.float32(slowest) * np.float32(1e9)

    assert np.cos(angle) == 1
    assert np.float32(1) + np.sin(angle) == 1


def test_the_default_tapers_twenty_of_64_frequencies_and_keeps_the_models_base():
    assert CoPE().resolve(SHAPE, 64 * K) == CoPE(base=5e5, tapered=20).resolve(SHAPE, 64 * K)


@pytest.mark.parametrize("tapered", [0, 1])
def test_without_a_taper_it_is_plain_rope(tapered):
    assert CoPE(base=8e6, tapered=tapered).resolve(SHAPE, 64 * K) == ABF(base=8e6).resolve(SHAPE, 64 * K)


def test_input_length_and_the_two_lengths_in_the_config_change_nothing():
    """Readers that compute the attention factor from the two lengths must get 1 too."""
    found = CoPE().resolve(SHAPE, 64 * K)

    short, long = (found.tables(SHAPE, length) for length in (1, 128 * K))
    assert np.array_equal(short.inv_freq, long.inv_freq)
    assert found.max_positions == found.parameters["original_max_position_embeddings"] == 64 * K
    assert found.parameters["attention_factor"] == found.parameters["factor"] == 1


def test_the_taper_falls_from_one_to_zero():
    assert taper(5) == pytest.approx([1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4, 0])
    assert (taper(20)[0], taper(20)[-1]) == (1, 0)


def test_the_method_describes_itself():
    method = CoPE(base=1e7)
    assert method.describe(SHAPE) == "cope with base 1e7, 20 tapered"
    assert method.resolve(SHAPE, 64 * K).summary(SHAPE, 64 * K) == "base 1e7, 19 of 64 frequencies lowered"


def test_more_frequencies_than_the_model_has_are_refused():
    with pytest.raises(ConfigError, match=r"tapered 65 exceeds the 64 frequencies.*give at most 64"):
        CoPE(tapered=65).resolve(SHAPE, 64 * K)


@pytest.mark.parametrize(("plain", "wanted"), [({"tapered": -1}, "greater than"), ({"base": 1}, "greater than 1")])
def test_impossible_settings_are_refused(plain, wanted):
    with pytest.raises(ValidationError, match=wanted):
        CoPE(**plain)
