"""Stochastic rounding: exact on average, and the same for the same key."""

import pytest
import torch

from factory import CPU
from unspool.training.optim.adamw import random_bits, round_stochastic, rounding_key


def test_the_mean_over_keys_is_the_value():
    values = torch.tensor([1.0, 1.001, 1.0039, -1.001, 3e-5, -0.7777, 123.456, 1e-38])
    repeated = values.repeat(4096, 1)
    rounded = torch.stack([round_stochastic(repeated, rounding_key(0, step, "weight")) for step in range(16)]).double()

    gap = values.double().abs() * 2.0**-7  # at least the distance of two bf16 neighbours
    error = (rounded.mean(dim=(0, 1)) - values.double()).abs()

    # 65,536 draws of a number that is up to half a gap wide: four standard deviations.
    assert (error < gap * 4 * 0.5 / 256).all()
    nearest = (values.bfloat16().double() - values.double()).abs()
    assert (nearest > gap * 4 * 0.5 / 256).sum() >= 4, "rounding to the nearest would not have been noticed"


def test_only_the_two_neighbours_come_out():
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    below = (values.view(torch.int32) >> 16 << 16).view(torch.float32)
    above = ((values.view(torch.int32) >> 16) + 1 << 16).view(torch.float32)

    rounded = round_stochastic(values, rounding_key(0, 1, "weight")).float()

    assert ((rounded == below) | (rounded == above)).all()
    assert 0.4 < (rounded == below).float().mean() < 0.6


def test_what_bf16_can_say_stays():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()

    assert torch.equal(round_stochastic(values.float(), rounding_key(0, 1, "weight")), values)


def test_the_same_key_gives_the_same_bits_and_any_other_does_not():
    def bits(*key):
        return random_bits(rounding_key(*key), 1000, CPU)

    assert torch.equal(bits(0, 1, "a"), bits(0, 1, "a"))
    for other in ((1, 1, "a"), (0, 2, "a"), (0, 1, "b")):
        assert (bits(*other) == bits(0, 1, "a")).float().mean() < 0.01


@pytest.mark.parametrize("shift", [1, 2, 4096])
def test_neighbours_and_steps_are_independent(shift):
    draws = torch.stack([random_bits(rounding_key(0, step, "a"), 20_000, CPU) for step in range(4)]).double()
    draws = (draws - draws.mean()) / draws.std()

    assert abs((draws[:, shift:] * draws[:, :-shift]).mean()) < 0.02
    assert abs((draws[1:] * draws[:-1]).mean()) < 0.02
    counts = torch.histc(random_bits(rounding_key(0, 9, "a"), 1 << 16, CPU).double(), bins=64)
    assert (counts / 1024 - 1).abs().max() < 0.15
