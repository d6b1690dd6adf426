"""Moments in 8 bits: the nearest of 256 levels in blocks of 256, as torchao has them where it is installed."""

import pytest
import torch

from factory import CPU
from unspool.training.optim import adamw8bit
from unspool.training.optim.adamw import AdamW
from unspool.training.optim.adamw8bit import BLOCK, Quantized, is_quantized, quantize, tables
from unspool.training.optim.base import Rates

from .optimizer_runs import adamw_param


def heavy_tailed(*shape: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng) * 10 ** torch.randn(shape, generator=rng)


@pytest.mark.parametrize("signed", [True, False])
def test_a_value_gets_the_nearest_level(signed):
    levels, _ = tables(signed, CPU)
    assert levels.unique().numel() == 256
    values = heavy_tailed(64, BLOCK) if signed else heavy_tailed(64, BLOCK).abs()

    codes, scales = quantize(values, signed=signed)

    scaled = values / scales[:, None]
    nearest = (scaled[..., None].double() - levels.double()).abs().amin(-1)
    found = (scaled.double() - levels[codes.int()].double()).abs()
    kept = signed | (codes > 1)  # a second moment is not rounded to zero, however near that is
    # Ties are decided by fp32 differences, which may take the farther one by a rounding.
    torch.testing.assert_close(found[kept], nearest[kept], rtol=0, atol=1e-7)
    assert (scaled.abs().amax(-1) == 1).all()


def test_bounds_are_where_rounding_turns_to_the_next_level():
    for signed in (True, False):
        levels, bounds = tables(signed, CPU)
        low, high = levels[:-1], levels[1:]
        if not signed:
            assert 0 < bounds[0] < 1e-30
            low, high, bounds = low[1:], high[1:], bounds[1:]

        assert ((low < bounds) & (bounds <= high)).all()
        assert adamw8bit._rounds_up(bounds, low, high).all()
        assert not adamw8bit._rounds_up(torch.nextafter(bounds, low), low, high).any()


@pytest.mark.parametrize("signed", [True, False])
def test_what_was_read_is_written_back_the_same(signed):
    moment = Quantized.zeros(torch.empty(32, BLOCK), signed=signed)
    moment.write(heavy_tailed(32, BLOCK) if signed else heavy_tailed(32, BLOCK).abs())
    first = moment.read()

    moment.write(first)

    torch.testing.assert_close(moment.read(), first, rtol=1e-2, atol=0)


def test_an_error_is_at_most_half_the_distance_of_two_levels():
    values = heavy_tailed(64, BLOCK).abs().clip(1e-2, 1)
    moment = Quantized.zeros(values, signed=False)

    moment.write(values)

    error = (moment.read() - values).abs()
    # 128 levels from a tenth of the block's largest on, 64 in the decade below.
    assert error.max() <= 0.9 / 128 / 2 + 1e-6
    assert error[values < 0.1].max() <= 0.09 / 64 / 2 + 1e-6


def test_zeros_stay_zeros():
    moment = Quantized.zeros(torch.empty(16, BLOCK), signed=True)
    assert (moment.read() == 0).all()
    moment.write(torch.zeros(16, BLOCK))
    assert (moment.read() == 0).all()


@pytest.mark.parametrize(
    ("shape", "expected"), [((4096,), True), ((64, 64), True), ((16, 255), False), ((4095,), False), ((17, 255), False)]
)
def test_small_tensors_and_those_that_are_no_whole_blocks_stay_fp32(shape, expected):
    assert is_quantized(shape, shape[0]) is expected


# What never becomes zero


def torchaos_tables(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    levels = adamw8bit._levels(signed)
    return levels.to(device), adamw8bit._bounds(levels).to(device)


def largest_step(share: float) -> float:
    """In units of lr: a weight whose gradient is `share` of its block's largest, and then a step without one."""
    one = adamw_param("w", torch.zeros(4096), None, weight_decay=0.0, in_8bit=True)
    for scale in (1.0, 0.0):
        one.grad = torch.full((4096,), scale)
        one.grad[::2] *= share
        before = one.weight.clone()
        AdamW().step([one], Rates(lr=1.0, betas=(0.9, 0.95), seed=0, scale=1.0))
    return float((one.weight - before).abs().max())


def test_a_small_gradient_beside_large_ones_makes_no_jump(monkeypatch):
    assert largest_step(1e-4) < 1
    monkeypatch.setattr(adamw8bit, "tables", torchaos_tables)
    assert largest_step(1e-4) > 100, "the rule is not needed"


# Against torchao


@pytest.fixture
def torchao():
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    # Its step is compiled, which fuses roundings away.
    torch.compiler.set_stance("force_eager")
    yield optim
    torch.compiler.set_stance("default")


def steps_beside_torchao(torchao, num_steps: int):
    torch.manual_seed(0)
    matrix, vector = (torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in ((64, 128), (100,)))
    decays = {matrix: 0.1, vector: 0.0}
    theirs = torchao.AdamW8bit(
        [{"params": [one], "weight_decay": decay} for one, decay in decays.items()], lr=1e-3, betas=(0.9, 0.95)
    )
    ours = [
        adamw_param(str(number), one.data.clone(), None, weight_decay=decay, in_8bit=True)
        for number, (one, decay) in enumerate(decays.items())
    ]
    for step in range(num_steps):
        lr = 1e-3 * (step + 1) / num_steps
        for group in theirs.param_groups:
            group["lr"].fill_(lr)
        for one, own in zip(decays, ours, strict=True):
            one.grad = heavy_tailed(*one.shape, seed=step)
            own.grad = one.grad.clone()
        theirs.step()
        AdamW().step(ours, Rates(lr=lr, betas=(0.9, 0.95), seed=0, scale=1.0))
    return theirs.state[matrix], (matrix, vector), ours


def test_by_torchaos_own_rule_states_and_weights_are_those_of_torchao_bit_for_bit(torchao, monkeypatch):
    monkeypatch.setattr(adamw8bit, "tables", torchaos_tables)
    state, (matrix, vector), (own, small) = steps_beside_torchao(torchao, 30)

    assert isinstance(own.state.first, Quantized)
    assert isinstance(own.state.second, Quantized)
    assert torch.equal(own.state.first.codes, state["exp_avg"].codes)
    assert torch.equal(own.state.first.scales.view(-1), state["exp_avg"].scale)
    assert torch.equal(own.state.second.codes, state["exp_avg_sq"].codes)
    assert torch.equal(own.state.second.scales.view(-1), state["exp_avg_sq"].scale)
    assert torch.equal(own.weight, matrix.data)
    # Not quantised, so torch's own AdamW, which multiplies in another order.
    torch.testing.assert_close(small.weight, vector.data, rtol=1e-6, atol=1e-8)


def test_levels_are_those_of_torchao_and_codes_but_for_those_of_zero(torchao):
    from torchao.optim import quant_utils

    for signed in (True, False):
        levels, bounds = tables(signed, CPU)
        assert levels.tolist() == torch.tensor(quant_utils.create_dynamic_map(signed)).tolist()
        values = torch.cat([bounds, torch.nextafter(bounds, levels[:-1]), torch.linspace(-1, 1, 100_001)])
        values = values if signed else values.abs()
        codes = torch.bucketize(values, bounds, right=True).to(torch.uint8)
        theirs = quant_utils.quantize_8bit_with_qmap(values, levels)
        if not signed:
            lost = (theirs == 0) & (values >= torch.finfo(torch.float32).tiny)
            assert codes[lost].eq(1).all()
            codes, theirs = codes[~lost], theirs[~lost]
        assert torch.equal(codes, theirs)
