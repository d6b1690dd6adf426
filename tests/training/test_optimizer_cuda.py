"""The update on a GPU: the kernel against plain operators, masters beside a model of bf16, nothing waited for."""

from itertools import product
from typing import Any

import pytest
import torch

from unspool.training.optim.adamw import (
    AdamW,
    factors_of,
    rounding_key,
    update_by_operators,
)
from unspool.training.optim.adamw8bit import Quantized
from unspool.training.optim.base import ParamState, Rates
from unspool.training.optim.updater import build_updater

from .optimizer_runs import MODES, adamw_param, assert_same, copied, mode_name, small_model, stage_of, take

pytestmark = pytest.mark.gpu
RATES = Rates(lr=1e-3, betas=(0.9, 0.95), seed=3, scale=0.7)
# A whole number of blocks, more than one program's; and one that is neither.
KINDS = list(product((torch.float32, torch.bfloat16), (True, False), ((96, 160), (33, 61))))


def build_one(dtype: torch.dtype, in_8bit: bool, shape: tuple[int, ...]) -> ParamState:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(0.02).cuda()
    computed = weight.to(torch.bfloat16) if dtype == torch.float32 else None
    return adamw_param("w", weight.to(dtype), computed, weight_decay=0.1, in_8bit=in_8bit)


def gradient(shape: tuple[int, ...], step: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(step)
    return (torch.randn(shape, generator=rng) * 10 ** torch.randn(shape, generator=rng)).to(torch.bfloat16).cuda()


def parts(one: ParamState) -> dict[str, torch.Tensor]:
    found = {"weight": one.weight} | ({} if one.bf16_copy is None else {"computed": one.bf16_copy})
    for name, moment in (("first", one.state.first), ("second", one.state.second)):
        if isinstance(moment, Quantized):
            found |= {f"{name} codes": moment.codes, f"{name} scales": moment.scales}
        else:
            found[name] = moment
    return found


@pytest.mark.parametrize(("dtype", "in_8bit", "shape"), KINDS, ids=str)
def test_the_kernel_computes_what_plain_operators_do(dtype, in_8bit, shape):
    from unspool.training.optim.kernels import update_in_one_pass

    plain, fused = (build_one(dtype, in_8bit, shape) for _ in range(2))
    for step in range(1, 6):
        factors, key = factors_of(RATES, 1.0, 0.1, step), rounding_key(RATES.seed, step, "w")
        update_by_operators(plain, gradient(shape, step), factors, key)
        update_in_one_pass(fused, gradient(shape, step), factors, key, None)

    # The same roundings in the same order. Should a compiler fuse two of them, a few values differ by their last bit,
    # and of codes and of bf16 fewer still.
    for name, wanted in parts(plain).items():
        found = parts(fused)[name]
        differing = float((found != wanted).float().mean())
        print(f"{name}: {differing:.2%} of {wanted.numel()} differ")
        if wanted.dtype == torch.uint8:
            assert differing < 1e-3
            assert (found.int() - wanted.int()).abs().max() <= 1
        elif wanted.dtype == torch.bfloat16:
            assert differing < 1e-3
            torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("in_8bit", [True, False])
def test_the_same_update_on_the_cpu_has_the_same_random_bits(in_8bit):
    there = build_one(torch.bfloat16, in_8bit, (96, 160))
    here = adamw_param("w", there.weight.cpu().clone(), None, weight_decay=0.1, in_8bit=in_8bit)
    there.grad, here.grad = gradient((96, 160), 1), gradient((96, 160), 1).cpu()

    for one in (there, here):
        AdamW().step([one], RATES)

    assert float((there.weight.cpu() != here.weight).float().mean()) < 1e-3


@pytest.mark.parametrize(("dtype", "in_8bit", "shape"), KINDS, ids=str)
@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype, in_8bit, shape, norm):
    one = build_one(dtype, in_8bit, shape)
    before = copied(parts(one))
    one.grad = gradient(shape, 1).float() * norm

    AdamW().step_in_backward(one, RATES, torch.tensor(norm, device="cuda"))

    assert_same(parts(one), before)


def start_on_gpu(mode: dict[str, str], **changes: Any):
    model, stage = small_model().cuda(), stage_of(mode, **changes)
    return model, build_updater(stage, model), stage


def test_masters_are_fp32_beside_a_model_of_bf16():
    loaded = {name: weight.detach().clone() for name, weight in small_model().named_parameters()}
    model, updater, stage = start_on_gpu({})
    for name, master in updater.named_masters():
        assert torch.equal(master.cpu(), loaded[name])

    take(model, updater, stage, range(3))

    masters = dict(updater.named_masters())
    assert {master.dtype for master in masters.values()} == {torch.float32}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, masters[name].to(torch.bfloat16))
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert any((master.to(torch.bfloat16) != master).any() for master in masters.values())


@pytest.mark.parametrize("mode", MODES, ids=mode_name)
def test_every_mode_goes_on_from_its_state_and_trains_as_on_the_cpu(mode):
    model, updater, stage = start_on_gpu(mode, lr=5e-3)
    losses = [result.loss for result in take(model, updater, stage, range(8))]
    saved = copied(updater.state_tensors())
    again, later, _ = start_on_gpu(mode, lr=5e-3)
    later.load_state_tensors(saved)
    assert_same(later.state_tensors(), saved)
    assert_same(dict(again.named_parameters()), dict(model.named_parameters()))
    losses += [result.loss for result in take(again, later, stage, range(8, 16))]

    cpu_model, cpu_stage = small_model(), stage_of({"step": mode["step"]}, lr=5e-3)
    wanted = [result.loss for result in take(cpu_model, build_updater(cpu_stage, cpu_model), cpu_stage, range(16))]
    assert abs(sum(losses[-4:]) - sum(wanted[-4:])) / 4 < 0.1 * (wanted[0] - wanted[-1])


def test_stepping_in_the_backward_pass_waits_for_nothing():
    model, updater, stage = start_on_gpu({"weights": "bf16", "states": "8bit", "step": "in-backward"})
    take(model, updater, stage, range(1))  # compiles
    loss = torch.stack([parameter.float().square().sum() for parameter in model.parameters()]).sum()
    updater.begin(1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert updater.finish(is_good=True) > 0
