"""The FP8 products of the benchmark, on a CPU, where torch casts and multiplies."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from unspool.models.memory import kept
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.policy import MemoryPolicy

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import fp8_layer
import fp8_model
from fp8_operands import E4M3, Cast


def random_part(tokens: int = 48, width: int = 64, outputs: tuple[int, ...] = (32, 16, 16)):
    return fp8_layer.random_part(tokens, width, outputs, "cpu")


def dequantized(*matrices: Tensor) -> Tensor:
    """What FP8 with one scale keeps of matrices, in fp32, in plain torch."""
    scale = max(float(matrix.detach().abs().max()) for matrix in matrices) / 448
    return torch.cat([(matrix.detach().float() / scale).to(E4M3).float() * scale for matrix in matrices])


def test_products_equal_those_of_the_rounded_operands():
    hidden, weights, grads = random_part()
    found = fp8_layer.run(fp8_layer.fp8, hidden, weights, grads)
    inputs, weight = dequantized(hidden[0]), dequantized(*weights)
    grad = dequantized(*(grad[0].t() for grad in grads)).t()
    expected = (inputs @ weight.t(), grad @ weight, grad.t() @ inputs)
    joined = (torch.cat(found[:3], dim=-1)[0], found[3][0], torch.cat(found[4:]))
    for one, other in zip(joined, expected, strict=True):
        assert fp8_layer.relative(one, other) < 0.005  # bf16 rounding and the order of a division


def test_products_are_near_those_in_full_precision_and_not_equal():
    for values in fp8_layer.errors(*random_part()).values():
        assert all(0.01 < value < 0.1 for value in values)


def test_powers_of_two_only_change_the_exponent():
    hidden, weights, grads = random_part()
    found = fp8_layer.run(fp8_layer.fp8, hidden, weights, grads)
    scaled = fp8_layer.run(fp8_layer.fp8, (hidden.detach() * 2**-9).requires_grad_(), weights, grads)
    for one, other, factor in zip(found, scaled, (2**-9,) * 3 + (1,) + (2**-9,) * 3, strict=True):
        assert torch.equal(one * factor, other)


def test_a_matrix_that_is_not_transposed_is_detected(monkeypatch: pytest.MonkeyPatch):
    """A gradient from the wrong layout has the right shape if the matrix is square."""
    part = random_part(64, 64, (64,))
    right = max(fp8_layer.errors(*part)["fp8"])

    class Wrong(Cast):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            if self.columns is not None:
                self.columns = self.columns.t().contiguous()

    monkeypatch.setattr(fp8_model, "Cast", Wrong)
    assert max(fp8_layer.errors(*part)["fp8"]) > 10 * right


def test_zeros_stay_zeros():
    hidden, weights, grads = random_part()
    found = fp8_layer.run(fp8_layer.fp8, torch.zeros_like(hidden).requires_grad_(), weights, grads)
    assert not any(each.any() for each in found[:3])
    assert all(each.isfinite().all() for each in found)


def test_sizes_that_fp8_cannot_multiply_are_refused():
    hidden, weights, _ = random_part(tokens=40)
    with pytest.raises(AssertionError, match="a multiple of 16 tokens"):
        fp8_layer.fp8(hidden, *weights)


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["fp8_layer.py", "--small"])
    fp8_layer.main()
    assert "times as fast as bf16" in capsys.readouterr().out


def gradients(policy: MemoryPolicy) -> dict[str, Tensor]:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    fp8_model.use_fp8(model)
    apply_memory(model, policy)
    ids = torch.arange(48)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("memory", [{}, {"keep_products": 2, "keep_on_host": 1}, {"keep_products": 3, "offload": True}])
def test_recomputation_gives_the_same_gradients(memory: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept, "_OPERATORS", kept._OPERATORS)  # `use_fp8` adds to it
    expected = gradients(MemoryPolicy())
    found = gradients(MemoryPolicy(activation_checkpointing="keep-attention", **memory))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
