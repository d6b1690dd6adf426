"""Casts to FP8: values, scales and layouts, on a CPU and with the Triton kernels in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from fractions import Fraction

import pytest
import torch

from unspool.models.fp8.operands import E4M3, LEAST, LIMIT, multiply, reference_cast, round_gradients, round_to_fp8


def random(*shape, seed=0, size=1.0, dtype=torch.float32):
    return (size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def same_bits(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_casts_by_hand():
    operand = round_to_fp8((torch.tensor([[1.0, -2.0, 0.5, 0.0]]),))
    assert operand.rows.float().tolist() == [[224.0, -448.0, 112.0, 0.0]]
    assert operand.columns.float().tolist() == [[224.0], [-448.0], [112.0], [0.0]]
    assert operand.scale.tolist() == [float(torch.tensor(2.0) / torch.tensor(448.0))]


def test_the_factor_is_rounded_once():
    """`448 / tensor` is a reciprocal and a product, so it is rounded twice."""
    different = 0
    for seed in range(20):
        matrix = random(64, 64, seed=seed)
        amax = matrix.abs().max()[None]
        exact = Fraction(448) / Fraction(float(amax))
        factor = torch.full_like(amax, LIMIT) / amax
        steps = [Fraction(float(each)) for each in (factor, factor.nextafter(factor - 1), factor.nextafter(factor + 1))]
        assert abs(steps[0] - exact) <= min(abs(step - exact) for step in steps[1:])
        assert same_bits(round_to_fp8((matrix,)).rows, (matrix * factor).clamp(-448, 448).to(E4M3))
        different += int(float(factor) != float(LIMIT / amax))
    assert different, "with this many draws, two roundings must differ from one"


def test_matrices_are_joined_with_one_scale():
    first, second = random(16, 32), random(48, 32, seed=1, size=5.0)
    below = round_to_fp8((first, second))
    assert same_bits(below.rows, reference_cast(torch.cat((first, second)), second.abs().max()[None]))
    assert same_bits(below.columns, below.rows.t().contiguous())


def test_gradients_of_any_size_keep_their_digits():
    parts = [random(32, 16), random(32, 48, seed=1, size=1e-6), torch.zeros(32, 16)]
    found = round_gradients(parts, rows=True, columns=True)
    assert same_bits(found.rows.t().contiguous(), torch.cat(found.columns))
    for part, columns, divisor in zip(parts, found.columns, found.divisors, strict=True):
        assert float(divisor).hex().startswith("0x1.0000000000000p"), "not a power of 2"
        back = columns.t().float() * (found.scale / divisor)
        assert (back - part).norm() <= 0.04 * part.norm()
    assert 2**18 < found.divisors[1] < 2**22
    assert round_gradients([torch.zeros(16, 16)], rows=True, columns=True).scale.isfinite()


def test_divided_weights_keep_their_digits():
    """So that the gradient of an input is one product of gradients with different scales."""
    matrix = random(32, 16)
    whole, divided = round_to_fp8((matrix,)), round_to_fp8((matrix,), divisors=[torch.tensor([16.0])])
    assert torch.equal(whole.scale, divided.scale)
    normal = divided.rows.float().abs() >= 2**-6
    assert normal.float().mean() > 0.8
    assert torch.equal(whole.rows.float()[normal] / 16, divided.rows.float()[normal])


def test_layouts_that_are_not_written_take_no_memory():
    operand = round_to_fp8((random(16, 32),), columns=False)
    assert operand.columns.shape == (32, 16) and operand.columns.untyped_storage().nbytes() == 1
    assert operand.rows.untyped_storage().nbytes() == 16 * 32


@pytest.mark.parametrize("size", [0.0, 1e-38, 2**-110, 3e38])
def test_the_scale_of_extreme_values_is_finite(size):
    matrix = torch.full((16, 16), size)
    operand = round_to_fp8((matrix,))
    assert operand.scale.isfinite() and operand.scale > 0
    back = operand.rows.float() * operand.scale
    assert torch.allclose(back, matrix, rtol=1e-6, atol=LEAST / 448)


def test_values_that_are_not_finite_stay_visible():
    matrix = random(16, 16)
    matrix[3, 4] = torch.nan
    assert round_to_fp8((matrix,)).rows.float().isnan().any()
    matrix[3, 4] = torch.inf
    operand = round_to_fp8((matrix,))
    assert not multiply(operand.rows, operand.scale, operand.rows, operand.scale, dtype=torch.float32).isfinite().all()


# Interpreted casts write fp32, because the interpreter rounds to FP8 wrongly.
INTERPRETED = """
import torch
from unspool.models.fp8.kernels import cast, raise_to_largest
from unspool.models.fp8.operands import E4M3, LEAST, LIMIT, reference_cast

generator = torch.Generator().manual_seed(0)
for rows, columns in ((200, 144), (17, 300), (256, 64), (1, 16)):
    for size in (1e-12, 1e-3, 1.0, 700.0):
        for dtype in (torch.bfloat16, torch.float32):
            wide = (size * torch.randn(rows, columns + 16, generator=generator)).to(dtype)
            matrix = wide[:, 16:]
            amax = torch.zeros(1)
            raise_to_largest(amax, matrix)
            assert amax == matrix.abs().max().float(), ("largest value", rows, columns, size, dtype)
            whole = torch.zeros(rows, columns + 32)
            by_rows, by_columns = whole[:, 32:], torch.zeros(columns, rows)
            cast(matrix, amax, by_rows, by_columns, limit=LIMIT, least=LEAST)
            wanted = (matrix.float() * (torch.full_like(amax, LIMIT) / amax)).clamp(-LIMIT, LIMIT)
            wrong = int((by_rows != wanted).sum())
            assert wrong == 0, ("values before rounding", wrong, rows, columns, size, dtype)
            assert torch.equal(by_rows.to(E4M3).float(), reference_cast(matrix, amax).float())
            assert torch.equal(by_columns, by_rows.t()), ("transpose", rows, columns)
            assert not whole[:, :32].any(), "wrote outside of its slice"
matrix = torch.ones(16, 16)
matrix[3, 4] = torch.nan
cast(matrix, torch.ones(1), matrix, None, limit=LIMIT, least=LEAST)
assert matrix.isnan().sum() == 1, "lost a NaN"
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_interpreted_kernels_equal_torch():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
