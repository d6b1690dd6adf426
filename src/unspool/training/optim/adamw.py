"""AdamW on one parameter: what it keeps, and one step of it.

In: a gradient (fp32 or bf16), the step's rates. Out: changed weight and moments.
Promise: with fp32 weight and moments it is torch's AdamW itself (fused on a GPU); with 8-bit moments it computes what
torchao's `AdamW8bit` does. A weight in bf16 is updated in fp32 and rounded stochastically.
Elsewhere: quantised moments (adam8.py), rounding (rounding.py), one pass for it all on a GPU (adamw_kernel.py),
when steps are taken (optimizer.py).
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

from unspool.training.optim.adamw8bit import Quantized, is_quantized

# Stochastic rounding to bf16: up or down with probabilities that make the mean exact.


_MASK = 0xFFFFFFFF


def rounding_key(seed: int, step: int, name: str) -> tuple[int, int]:
    """Two words of 32 bits for one parameter in one step."""
    words = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(words[:4], "little"), int.from_bytes(words[4:], "little")


def random_bits(key: tuple[int, int], size: int, device: torch.device) -> Tensor:
    """int64[size] of 16 random bits each: a hash of the key and the place."""
    word = _mixed(torch.arange(size, device=device) ^ key[0])
    return _mixed(word ^ key[1]) >> 16


def round_stochastic(value: Tensor, key: tuple[int, int]) -> Tensor:
    """bf16 is the upper half of fp32's bits; adding a random lower half carries as often as what is cut off says."""
    bits = value.contiguous().view(torch.int32).long().view(-1) + random_bits(key, value.numel(), value.device)
    kept = (bits >> 16).to(torch.int16)
    return kept.view(torch.bfloat16).view(value.shape)


def _mixed(word: Tensor) -> Tensor:
    """A bijection of 32 bits in which every bit of the input moves every bit of the output (Wellons, lowbias32)."""
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D & _MASK
    word = word ^ (word >> 15)
    word = word * 0x846CA68B & _MASK
    return word ^ (word >> 16)


EPS = 1e-8
Moment = Tensor | Quantized


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What is the same for all parameters of a step."""

    lr: float
    betas: tuple[float, float]
    seed: int
    scale: float  # of the gradient: what clipping leaves of it


@dataclass(eq=False, kw_only=True)
class ParamState:
    """A trained parameter. It holds the parameter's memory, not the parameter, whose hook holds it."""

    name: str
    weight: Tensor  # what is updated: the fp32 master, or the parameter's own memory
    computed: Tensor | None  # the parameter's own memory, where `weight` is a master
    share: float  # of the stage's learning rate
    decay: float
    first: Moment
    second: Moment
    steps: Tensor  # fp32 scalar beside the weight: torch's AdamW counts in it
    count: int = 0  # the same number without asking the device
    grad: Tensor | None = None  # of the step under way
    norm: Tensor | None = None  # of that gradient, where it has been used already
    rows: slice | None = None  # of the whole parameter, where each rank keeps a part of it

    def set_count(self, count: int) -> None:
        self.count = count
        self.steps.fill_(count)


def build_trained(
    name: str, weight: Tensor, computed: Tensor | None, *, share: float, decay: float, in_8bit: bool
) -> ParamState:
    in_8bit = in_8bit and is_quantized(weight)
    first, second = (
        Quantized.zeros(weight, signed=signed) if in_8bit else torch.zeros_like(weight, dtype=torch.float32)
        for signed in (True, False)
    )
    # torch's AdamW without a fused kernel keeps counts on the CPU.
    steps = torch.zeros((), device=weight.device if weight.is_cuda else None)
    return ParamState(
        name=name, weight=weight, computed=computed, share=share, decay=decay, first=first, second=second, steps=steps
    )


def collect(one: ParamState, grad: Tensor) -> None:
    """Add to the gradient of the step under way. From the second part on the sum is fp32, whatever the parts are."""
    if one.grad is None:
        one.grad = grad.float() if _is_plain(one) else grad
    else:
        one.grad = one.grad.float().add_(grad)


@torch.no_grad()
def update_all(trained: Sequence[ParamState], rates: Rates) -> None:
    """One step of all that have a gradient, which must be finite."""
    groups: dict[tuple[float, float], list[ParamState]] = defaultdict(list)
    for one in trained:
        if one.grad is None:
            continue
        if not one.weight.numel():
            # Of a parameter with fewer rows than there are ranks, some have none; they count as the others do.
            one.set_count(one.count + 1)
        elif _is_plain(one):
            groups[one.share, one.decay].append(one)
        else:
            _update_by_us(one, one.grad, rates, None)
    for group in groups.values():
        _update_by_torch(group, rates, None)


@torch.no_grad()
def update_one(one: ParamState, rates: Rates, norm: Tensor) -> None:
    """One step of one, unless the `norm` of its gradient is not finite; a GPU decides that without being waited for."""
    assert one.grad is not None
    if not norm.is_cuda and not math.isfinite(norm):
        return
    if _is_plain(one):
        _update_by_torch([one], rates, norm)
    else:
        _update_by_us(one, one.grad, rates, norm)


def _is_plain(one: ParamState) -> bool:
    return one.weight.dtype == torch.float32 and isinstance(one.first, Tensor)


def _update_by_torch(group: list[ParamState], rates: Rates, norm: Tensor | None) -> None:
    on_gpu = group[0].weight.is_cuda
    grads = [one.grad for one in group if one.grad is not None]
    if rates.scale != 1:
        torch._foreach_mul_(grads, rates.scale)
    adamw(
        [one.weight for one in group],
        grads,
        [one.first for one in group if isinstance(one.first, Tensor)],
        [one.second for one in group if isinstance(one.second, Tensor)],
        [],
        [one.steps for one in group],
        foreach=False,
        # One pass over parts that wait in host memory, too; a CPU that trains alone keeps the bits it has always had.
        fused=on_gpu or group[0].rows is not None,
        # The fused kernel reads this number itself, and does nothing where it is 1.
        found_inf=None if norm is None or not on_gpu else (~norm.isfinite()).float(),
        amsgrad=False,
        beta1=rates.betas[0],
        beta2=rates.betas[1],
        lr=rates.lr * group[0].share,
        weight_decay=group[0].decay,
        eps=EPS,
        maximize=False,
    )
    masters = [one for one in group if one.computed is not None]
    if masters:
        torch._foreach_copy_(
            [one.computed for one in masters if one.computed is not None], [one.weight for one in masters]
        )
    for one in group:
        one.count += 1


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What an update multiplies and divides by, each rounded to fp32 as torchao rounds it."""

    lr: float
    shrink: float  # of the weight, by decay
    pull_first: float
    pull_second: float
    bias_first: float
    root_second: float
    scale: float


@lru_cache(maxsize=64)
def numbers_of(rates: Rates, share: float, decay: float, count: int) -> Numbers:
    """Made once for all parameters of a kind, since hundreds of them are updated in some milliseconds."""
    lr = torch.tensor(rates.lr * share)
    step = torch.tensor(float(count))
    first, second = (1 - beta**step for beta in rates.betas)
    return Numbers(
        lr=lr.item(),
        shrink=(lr * decay).item(),
        pull_first=1 - rates.betas[0],
        pull_second=1 - rates.betas[1],
        bias_first=first.item(),
        root_second=second.sqrt().item(),
        scale=rates.scale,
    )


def _update_by_us(one: ParamState, grad: Tensor, rates: Rates, norm: Tensor | None) -> None:
    one.count += 1
    numbers = numbers_of(rates, one.share, one.decay, one.count)
    key = rounding_key(rates.seed, one.count, one.name)
    if one.weight.is_cuda and _has_triton():
        from unspool.training.optim.kernels import update_in_one_pass

        update_in_one_pass(one, grad, numbers, key, norm)
    elif norm is None or math.isfinite(norm):
        update_by_operators(one, grad, numbers, key)


def update_by_operators(one: ParamState, grad: Tensor, numbers: Numbers, key: tuple[int, int]) -> None:
    """The update in plain torch, on any device: what the kernel is compared with."""
    grad = grad.float()
    if numbers.scale != 1:
        grad = grad * numbers.scale
    weight = one.weight.float()
    weight = weight - numbers.shrink * weight
    first = _read(one.first).lerp(grad, numbers.pull_first)
    second = _read(one.second).lerp(grad.square(), numbers.pull_second)
    _write(one.first, first)
    _write(one.second, second)
    # With the moments as they were before they were rounded to 8 bits.
    weight = weight - numbers.lr * (first / numbers.bias_first) / (second.sqrt() / numbers.root_second + EPS)
    one.weight.copy_(weight if one.weight.dtype == torch.float32 else round_stochastic(weight, key))
    if one.computed is not None:
        one.computed.copy_(weight)


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


# AdamW's moments by name, for checkpoints and for the stage that comes next.


FIRST, SECOND = "exp_avg", "exp_avg_sq"


def moment_tensors(one: ParamState) -> dict[str, Tensor]:
    found = {f"{one.name}/step": torch.tensor(float(one.count))}
    for name, moment in ((FIRST, one.first), (SECOND, one.second)):
        if isinstance(moment, Quantized):
            found |= {f"{one.name}/{name}.codes": moment.codes, f"{one.name}/{name}.scales": moment.scales}
        else:
            found[f"{one.name}/{name}"] = moment
    return found


@torch.no_grad()
def load_moment(one: ParamState, saved: Mapping[str, Tensor]) -> None:
    """Also of the other kind, and where rows have been added to an embedding since: these start at zero.

    Moments of a whole parameter go to the part of it that this rank keeps.
    """
    if f"{one.name}/step" not in saved:
        return
    one.set_count(int(saved[f"{one.name}/step"]))
    for name, moment in ((FIRST, one.first), (SECOND, one.second)):
        _load(moment, f"{one.name}/{name}", saved, rows=one.rows or slice(None))


def _load(moment: Moment, key: str, saved: Mapping[str, Tensor], *, rows: slice) -> None:
    codes = saved.get(f"{key}.codes")
    if codes is None:
        value = saved[key]
    elif isinstance(moment, Quantized) and moment.codes.shape == codes.shape:
        # As they are: quantising what was read from them could move a scale by a rounding.
        moment.codes.copy_(codes)
        moment.scales.copy_(saved[f"{key}.scales"])
        return
    else:
        value = Quantized(codes, saved[f"{key}.scales"], signed=key.endswith(f"/{FIRST}")).read()
    target = moment.codes if isinstance(moment, Quantized) else moment
    value = value.to_local() if isinstance(value, DTensor) else value[rows]
    found = torch.zeros(target.shape, device=target.device)
    found[: len(value)] = value.to(target.device)
    if isinstance(moment, Quantized):
        moment.write(found)
    else:
        moment.copy_(found)
