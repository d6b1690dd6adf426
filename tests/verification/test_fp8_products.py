"""The check `fp8` passes, and detects mistakes that are common in products in FP8."""

from dataclasses import replace

import pytest

import unspool.models.fp8.linear as linear
import unspool.models.fp8.operands as operands


@pytest.fixture
def found(case, results):
    return lambda: {result.quantity: result for result in results("fp8", case("llama"))}


def failed(found) -> set[str]:
    assert all(result.status != "skipped" for result in found.values())
    return {quantity for quantity, result in found.items() if result.status == "failed"}


def test_products_of_rounded_operands_pass(found):
    assert [result.status for result in found().values()] == ["passed"] * 3


def change_operands(monkeypatch, change):
    """Change what every cast returns."""
    right = linear.round_to_fp8
    monkeypatch.setattr(linear, "round_to_fp8", lambda *args, **options: change(right(*args, **options)))


def test_a_scale_applied_twice(monkeypatch, found):
    change_operands(monkeypatch, lambda operand: replace(operand, scale=operand.scale**2))
    assert failed(found()) == {"output", "input gradient", "weight gradient"}


def test_rows_and_columns_that_are_swapped(monkeypatch, found):
    """Only square matrices hide this from a check of shapes."""

    def swapped(operand):
        square = len(operand.columns) == operand.columns.shape[1]
        return replace(operand, columns=operand.columns.t().contiguous()) if square else operand

    change_operands(monkeypatch, swapped)
    assert "input gradient" in failed(found())


def test_a_largest_value_of_an_earlier_step(monkeypatch, found):
    right, known = operands.largest_value, {}

    def stale(matrices):
        return known.setdefault(tuple(matrix.shape for matrix in matrices), right(matrices))

    monkeypatch.setattr(operands, "largest_value", stale)
    assert failed(found()) == {"output", "input gradient", "weight gradient"}


def test_a_largest_value_of_the_first_matrix_only(monkeypatch, found):
    right = operands.largest_value
    monkeypatch.setattr(operands, "largest_value", lambda matrices: right(matrices[:1]))
    assert "output" in failed(found())


def test_joined_products_in_another_order(monkeypatch, found):
    right = linear._Multiply.backward

    def turned(ctx, *grads):
        *others, first, second = right(ctx, *grads)
        swaps = first is not None and second is not None and first.shape == second.shape
        return (*others, second, first) if swaps else (*others, first, second)

    monkeypatch.setattr(linear._Multiply, "backward", turned)
    assert failed(found()) == {"weight gradient"}


def test_a_factor_that_is_rounded_twice(monkeypatch, found):
    """`448 / tensor` is a reciprocal and a product in torch: some values round to a neighbor."""

    def inexact(matrix, amax):
        factor = operands.LIMIT * (1 / amax) * (1 + 2**-22)
        return (matrix.float() * factor).clamp(-448, 448).to(operands.E4M3)

    monkeypatch.setattr(operands, "reference_cast", inexact)
    assert failed(found())


def test_one_scale_for_joined_gradients(monkeypatch, found):
    """Gradients of queries and keys are far smaller than those of values, and would round to 0."""
    monkeypatch.setattr(operands, "LEAST_SHARE", 1.0)
    assert failed(found()) == {"weight gradient"}
