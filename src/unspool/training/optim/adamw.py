"""AdamW, with weights in fp32 or bf16 and moments in fp32 or 8 bits.

With fp32 weights and moments it is torch's own AdamW (fused on a GPU). With 8-bit moments it computes the same as
torchao's `AdamW8bit`. A bf16 weight is updated in fp32 and rounded stochastically.
"""

import hashlib
import importlib.util
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from unspool.training.optim.adamw8bit import Quantized, group_shape, is_quantized
from unspool.training.optim.base import ParamState, Rates

EPS = 1e-8
FIRST, SECOND = "exp_avg", "exp_avg_sq"  # names in checkpoints
_MASK = 0xFFFFFFFF
Moment = Tensor | Quantized


def rounding_key(seed: int, step: int, name: str) -> tuple[int, int]:
    """Return the key of stochastic rounding for one parameter in one step: two 32-bit words."""
    words = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(words[:4], "little"), int.from_bytes(words[4:], "little")


def random_bits(key: tuple[int, int], size: int, device: torch.device) -> Tensor:
    """Return int64[size] with 16 random bits each: a hash of the key and the index."""
    word = _mixed(torch.arange(size, device=device) ^ key[0])
    return _mixed(word ^ key[1]) >> 16


def round_stochastic(value: Tensor, key: tuple[int, int]) -> Tensor:
    """Round fp32 to bf16, up or down with probabilities that make the mean exact.

    bf16 is the upper half of the bits of fp32. Adding a random lower half carries with the probability that the
    discarded bits require.
    """
    bits = value.contiguous().view(torch.int32).long().view(-1) + random_bits(key, value.numel(), value.device)
    kept = (bits >> 16).to(torch.int16)
    return kept.view(torch.bfloat16).view(value.shape)


def _mixed(word: Tensor) -> Tensor:
    """Mix 32 bits: a bijection in which every input bit changes every output bit (Wellons, lowbias32)."""
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D & _MASK
    word = word ^ (word >> 15)
    word = word * 0x846CA68B & _MASK
    return word ^ (word >> 16)


@dataclass(eq=False, kw_only=True)
class AdamWState:
    first: Moment
    second: Moment
    steps: Tensor  # fp32 scalar on the weight's device, in which torch's AdamW counts
    count: int = 0  # the same number on the host

    def set_count(self, count: int) -> None:
        self.count = count
        self.steps.fill_(count)

    @property
    def moments(self) -> tuple[tuple[str, Moment], ...]:
        return (FIRST, self.first), (SECOND, self.second)


class AdamW:
    """AdamW as an `Optimizer` (base.py)."""

    def __init__(self, *, in_8bit: bool = False) -> None:
        self._in_8bit = in_8bit

    def init_state(self, param: ParamState) -> AdamWState:
        weight = param.weight
        in_8bit = self._in_8bit and is_quantized(param.shape, param.rows_per_rank)
        if in_8bit:
            num_groups = param.shape[0] // group_shape(param.shape)[0]
            param.state_rows = {f"{name}.scales": num_groups for name in (FIRST, SECOND)}
        first, second = (
            Quantized.zeros(weight, signed=signed) if in_8bit else torch.zeros_like(weight, dtype=torch.float32)
            for signed in (True, False)
        )
        # torch's AdamW without a fused kernel keeps counts on the CPU.
        steps = torch.zeros((), device=weight.device if weight.is_cuda else None)
        return AdamWState(first=first, second=second, steps=steps)

    def takes_fp32_grad(self, param: ParamState) -> bool:
        return param.weight.dtype == torch.float32 and isinstance(param.state.first, Tensor)

    def step(self, params: Sequence[ParamState], rates: Rates) -> None:
        self._step(params, rates, None, None)

    def step_if_finite(self, params: Sequence[ParamState], rates: Rates, norm: Tensor, clip: Tensor) -> None:
        if norm.is_cuda or math.isfinite(norm):
            self._step(params, rates, norm, clip)
        else:
            for param in params:
                param.state.count += 1

    def uncount(self, params: Sequence[ParamState]) -> None:
        for param in params:
            # The count on the device is right: the kernel has not counted this step.
            param.state.count -= 1

    @torch.no_grad()
    def _step(self, params: Sequence[ParamState], rates: Rates, norm: Tensor | None, clip: Tensor | None) -> None:
        groups: dict[tuple[float, float], list[ParamState]] = defaultdict(list)
        for param in params:
            if param.grad is None:
                continue
            if not param.weight.numel():
                # If a parameter has fewer rows than there are ranks, some ranks have no rows; they only count steps.
                param.state.set_count(param.state.count + 1)
            elif self.takes_fp32_grad(param):
                groups[param.lr_ratio, param.weight_decay].append(param)
            else:
                _update_one(param, param.grad, rates, norm, clip)
        for group in groups.values():
            _update_by_torch(group, rates, norm, clip)

    @torch.no_grad()
    def step_in_backward(self, param: ParamState, rates: Rates, norm: Tensor) -> None:
        assert param.grad is not None
        if not norm.is_cuda and not math.isfinite(norm):
            return
        if self.takes_fp32_grad(param):
            _update_by_torch([param], rates, norm)
        else:
            _update_one(param, param.grad, rates, norm)

    def state_tensors(self, param: ParamState) -> dict[str, Tensor]:
        found = {"step": torch.tensor(float(param.state.count))}
        for name, moment in param.state.moments:
            if isinstance(moment, Quantized):
                found |= {f"{name}.codes": moment.codes, f"{name}.scales": moment.scales}
            else:
                found[name] = moment
        return found

    @torch.no_grad()
    def load_state(self, param: ParamState, saved: Mapping[str, Tensor]) -> None:
        if "step" not in saved:
            return
        param.state.set_count(int(saved["step"]))
        for name, moment in param.state.moments:
            _load_moment(moment, name, saved, rows=param.rows or slice(None))


def _load_moment(moment: Moment, name: str, saved: Mapping[str, Tensor], *, rows: slice) -> None:
    codes = saved.get(f"{name}.codes")
    if codes is None:
        value = saved[name]
    elif isinstance(moment, Quantized) and (own := _own_codes(moment, codes, saved[f"{name}.scales"], rows)):
        # Copy the codes: quantizing decoded values again could change a scale by rounding.
        moment.codes.copy_(own.codes)
        moment.scales.copy_(own.scales)
        return
    else:
        value = Quantized(codes, saved[f"{name}.scales"], signed=name == FIRST).read()
    target = moment.codes if isinstance(moment, Quantized) else moment
    value = value.to_local() if isinstance(value, DTensor) else value[rows]
    # Rows added to an embedding since then start at zero.
    found = torch.zeros(target.shape, device=target.device)
    found[: len(value)] = value.to(target.device)
    _write(moment, found)


def _own_codes(moment: Quantized, codes: Tensor, scales: Tensor, rows: slice) -> Quantized | None:
    """Return this rank's part of saved codes; None if they belong to a parameter with fewer rows."""
    size, blocks = group_shape(codes.shape)
    groups = slice(*(None if row is None else row // size for row in (rows.start, rows.stop)))
    own = codes.to_local() if isinstance(codes, DTensor) else codes[rows]
    own_scales = scales.to_local() if isinstance(scales, DTensor) else scales.view(-1, blocks)[groups]
    return Quantized(own, own_scales, moment.signed) if own.shape == moment.codes.shape else None


def _update_by_torch(group: list[ParamState], rates: Rates, norm: Tensor | None, clip: Tensor | None = None) -> None:
    on_gpu = group[0].weight.is_cuda
    states: list[AdamWState] = [param.state for param in group]
    grads = [param.grad for param in group if param.grad is not None]
    if clip is not None or rates.scale != 1:
        torch._foreach_mul_(grads, rates.scale if clip is None else clip)
    adamw(
        [param.weight for param in group],
        grads,
        [state.first for state in states if isinstance(state.first, Tensor)],
        [state.second for state in states if isinstance(state.second, Tensor)],
        [],
        [state.steps for state in states],
        foreach=False,
        # Shards in host memory are also updated in one pass. One CPU alone is not, which would change its results.
        fused=on_gpu or group[0].rows is not None,
        # The fused kernel reads this number itself, and does nothing if it is 1.
        found_inf=None if norm is None or not on_gpu else (~norm.isfinite()).float(),
        amsgrad=False,
        beta1=rates.betas[0],
        beta2=rates.betas[1],
        lr=rates.lr * group[0].lr_ratio,
        weight_decay=group[0].weight_decay,
        eps=EPS,
        maximize=False,
    )
    masters = [param for param in group if param.bf16_copy is not None]
    if masters:
        torch._foreach_copy_(
            [param.bf16_copy for param in masters if param.bf16_copy is not None], [param.weight for param in masters]
        )
    for state in states:
        state.count += 1


@dataclass(frozen=True, kw_only=True)
class Factors:
    """The factors of one update, each rounded to fp32 as in torchao."""

    lr: float
    shrink: float  # factor of the weight, for weight decay
    pull_first: float
    pull_second: float
    bias_first: float
    root_second: float
    scale: float


@lru_cache(maxsize=64)
def factors_of(rates: Rates, lr_ratio: float, weight_decay: float, count: int) -> Factors:
    """Compute the factors once for all parameters of a kind: hundreds of them are updated in a few milliseconds."""
    lr = torch.tensor(rates.lr * lr_ratio)
    step = torch.tensor(float(count))
    first, second = (1 - beta**step for beta in rates.betas)
    return Factors(
        lr=lr.item(),
        shrink=(lr * weight_decay).item(),
        pull_first=1 - rates.betas[0],
        pull_second=1 - rates.betas[1],
        bias_first=first.item(),
        root_second=second.sqrt().item(),
        scale=rates.scale,
    )


def _update_one(param: ParamState, grad: Tensor, rates: Rates, norm: Tensor | None, clip: Tensor | None = None) -> None:
    """Update a parameter that torch's AdamW does not cover: a bf16 weight, or 8-bit moments."""
    param.state.count += 1
    factors = factors_of(rates, param.lr_ratio, param.weight_decay, param.state.count)
    key = rounding_key(rates.seed, param.state.count, param.name)
    if param.weight.is_cuda and _has_triton():
        from unspool.training.optim.kernels import update_in_one_pass

        update_in_one_pass(param, grad, factors, key, norm, clip)
    elif norm is None or math.isfinite(norm):
        update_by_operators(param, grad if clip is None else grad.float() * clip, factors, key)


def update_by_operators(param: ParamState, grad: Tensor, factors: Factors, key: tuple[int, int]) -> None:
    """Update in plain torch, on any device: the reference for the kernel."""
    state: AdamWState = param.state
    grad = grad.float()
    if factors.scale != 1:
        grad = grad * factors.scale
    weight = param.weight.float()
    weight = weight - factors.shrink * weight
    first = _read(state.first).lerp(grad, factors.pull_first)
    second = _read(state.second).lerp(grad.square(), factors.pull_second)
    _write(state.first, first)
    _write(state.second, second)
    # Uses the moments before they are rounded to 8 bits.
    weight = weight - factors.lr * (first / factors.bias_first) / (second.sqrt() / factors.root_second + EPS)
    param.weight.copy_(weight if param.weight.dtype == torch.float32 else round_stochastic(weight, key))
    if param.bf16_copy is not None:
        param.bf16_copy.copy_(weight)


def _read(moment: Moment) -> Tensor:
    return moment.read() if isinstance(moment, Quantized) else moment


def _write(moment: Moment, value: Tensor) -> None:
    if isinstance(moment, Quantized):
        moment.write(value)
    else:
        moment.copy_(value)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
