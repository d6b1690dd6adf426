"""Promise 6: with `precision: fp8`, linear layers compute products of rounded operands, forward and backward.

The reference rounds every operand in plain torch, with one scale from the operand's own largest value, and multiplies
in float64. Joined gradients differ in scale by powers of 2, and the weights that they multiply by the reciprocals.
Every product of a small model is compared twice, the second time with inputs and gradients of another size, so that a
scale kept from the first time shows. Layouts that are swapped, scales that are missing or applied twice, and parts of
joined products in a wrong order are errors above 10%; operands that are not rounded are an error near 3%.
"""

import math
from collections.abc import Sequence

import torch
import transformers
from torch import Tensor, nn

from unspool.models.checks import layers_of
from unspool.models.fp8.linear import use_fp8
from unspool.models.fp8.support import refuse_device, shared_inputs
from unspool.models.fuse import cast_parameters
from unspool.verification.case import Case, Measured
from unspool.verification.tolerance import FP32

# Relative error of products with bf16 results: one rounding, and the fewer bits of sums in the forward pass on a GPU.
BF16 = 1e-2
TOKENS = 16 * 27  # several tiles of the casts, the last one incomplete
SIZES = ((1.0, 1e-3), (37.0, 1e-5))  # of inputs and of gradients
QUANTITIES = ("output", "input gradient", "weight gradient")


def check_fp8(case: Case) -> list[Measured]:
    """Compare the products of a small model with biases."""
    refuse_device(case.device)
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    model = _small_model(case.seed, case.device, dtype)
    groups = [linears for layer in layers_of(model) for linears in shared_inputs(layer)]
    use_fp8(model)
    generator = torch.Generator().manual_seed(case.seed)
    worst = dict.fromkeys(QUANTITIES, 0.0)
    for size, grad_size in SIZES:
        for linears in groups:
            hidden = size * torch.randn(1, TOKENS, linears[0].in_features, generator=generator)
            grads = [torch.randn(1, TOKENS, each.out_features, generator=generator) for each in linears]
            grads = [grad_size * 0.01**number * grad for number, grad in enumerate(grads)]
            found = _errors(linears, hidden.to(case.device, dtype), [each.to(case.device, dtype) for each in grads])
            worst = {name: max(worst[name], found[name]) for name in QUANTITIES}
    tolerance = BF16 if case.dtype == "bf16" else FP32
    return [Measured(quantity=name, error=error, tolerance=tolerance) for name, error in worst.items()]


def _small_model(seed: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    config = transformers.Qwen2Config(
        vocab_size=16, hidden_size=192, intermediate_size=272, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen2ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
    cast_parameters(model, dtype)
    moved: nn.Module = model.to(device).train()
    return moved


def _errors(linears: Sequence[nn.Linear], hidden: Tensor, grads: Sequence[Tensor]) -> dict[str, float]:
    """Return the largest relative error of each quantity, over linear layers with the same input."""
    hidden.requires_grad_()
    weights = [linear.weight for linear in linears]
    outputs = [linear(hidden) for linear in linears]
    to_hidden, *to_weights = torch.autograd.grad(outputs, (hidden, *weights), grads)
    with torch.no_grad():
        (given,) = _rounded([hidden[0]])
        divisors = _powers_of_two(grads)
        weight, divided = _rounded(weights), _rounded(weights, divisors)
        grad = _rounded([each[0] for each in grads], [1 / divisor for divisor in divisors])
        biases = [0.0 if linear.bias is None else linear.bias.cpu().double() for linear in linears]
        wanted_outputs = [given @ each.t() + bias for each, bias in zip(weight, biases, strict=True)]
        wanted_hidden = sum(one @ other for one, other in zip(grad, divided, strict=True))
        wanted_weights = [each.t() @ given for each in grad]
        return {
            "output": max(map(_relative, outputs, wanted_outputs)),
            "input gradient": _relative(to_hidden, torch.as_tensor(wanted_hidden)),
            "weight gradient": max(map(_relative, to_weights, wanted_weights)),
        }


def _rounded(matrices: Sequence[Tensor], divisors: Sequence[float] | None = None) -> list[Tensor]:
    """Round matrices to FP8 with the scale of the largest value of all, times `divisors`; float64, on the CPU."""
    on_cpu = [each.detach().cpu().float() for each in matrices]
    factor = torch.tensor(448.0) / torch.stack([each.abs().max() for each in on_cpu]).max()
    factors = [factor / divisor for divisor in divisors or [1.0] * len(on_cpu)]
    pairs = zip(on_cpu, factors, strict=True)
    return [(each * own).to(torch.float8_e4m3fn).double() / own.double() for each, own in pairs]


def _powers_of_two(grads: Sequence[Tensor]) -> list[float]:
    """Return how many times smaller each gradient is than the largest, rounded down to a power of 2."""
    sizes = [float(grad.abs().max()) for grad in grads]
    return [2.0 ** math.floor(math.log2(max(sizes) / size)) for size in sizes]


def _relative(found: Tensor, wanted: Tensor) -> float:
    difference = found.detach().cpu().double().reshape(wanted.shape) - wanted
    return float(difference.norm() / wanted.norm())
