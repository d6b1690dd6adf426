"""What a step's gradient does to the weights: clipping, then AdamW.

In: a model, gradients as its backward passes leave them. Out: changed weights, and the gradient's norm.
Promise: the sum over micro-batches is fp32, whatever the model computes in. Stepping after the backward passes, a
gradient that is not finite changes nothing. State goes out and in by name, and what goes on from it has the same bits.
Price: of `step: in-backward`: clipping goes by the norm of the step before, since this one's is known only when all
is done, and what is not finite leaves just the parameters alone whose gradient that is.
Elsewhere: the update itself (adamw.py), what a recipe may ask for (optimizer_config.py).

Where ranks keep a part of each parameter (fsdp.py), so does the updater: weights and moments are those parts, FSDP adds
up the gradients, and the norm is that of all parts.
With `weights: fp32` on a GPU the model's own parameters become bf16, which is what it computes in, and the updater
keeps their fp32 masters. On a CPU the model computes in fp32, so parameters are their own masters.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from unspool.core.errors import ConfigError
from unspool.models.fuse import keep_tables
from unspool.training.config import StageConfig
from unspool.training.optim.adamw import (
    ParamState,
    Rates,
    build_trained,
    collect,
    load_moment,
    moment_tensors,
    update_all,
    update_one,
)
from unspool.training.parallel.dtensor import as_part, own_part
from unspool.training.parallel.sharded_load import own_rows

# Of a step before the first: nothing is clipped.
NO_NORM = 0.0
STATE = "updater"


class Updater:
    """One optimizer step: `begin`, then the backward passes, then `finish`."""

    def __init__(
        self,
        model: Any,
        trained: list[ParamState],
        *,
        betas: tuple[float, float],
        clip: float,
        seed: int,
        in_backward: bool,
    ) -> None:
        self._trained, self._betas, self._clip, self._seed = trained, betas, clip, seed
        self._lr = 0.0
        self._norm_before = NO_NORM
        self._rates_before = self._rates(NO_NORM)
        # True: a step that turns out to be bad has changed weights already; only a checkpoint takes it back.
        self.in_backward = in_backward
        names = {one.name: one for one in trained}
        # Parameters of which this rank keeps a part. FSDP adds their gradients up itself, so that they need no hook.
        self._divided: dict[str, DTensor] = {}
        for name, parameter in model.named_parameters():
            if name in names and isinstance(parameter, DTensor):
                self._divided[name] = parameter
            elif name in names:
                react = self._step_now if in_backward else self._collect
                parameter.register_post_accumulate_grad_hook(partial(react, names[name]))

    def begin(self, lr: float) -> None:
        self._lr = lr
        self._rates_before = self._rates(self._norm_before)
        for one in self._trained:
            one.grad = one.norm = None
        for parameter in self._divided.values():
            parameter.grad = None

    def add(self, grads: Mapping[str, Tensor]) -> None:
        """To those of the backward passes, by name; of what is not trained they are dropped."""
        for one in self._trained:
            if one.name in grads:
                collect(one, grads[one.name])

    def finish(self, *, is_good: bool, max_norm: float = math.inf) -> float:
        """Update the weights, unless the loss was bad or the gradient is not finite or above `max_norm`.

        Returns the norm before clipping.
        """
        self._take_parts()
        with_grad = [one for one in self._trained if one.grad is not None]
        if not self.in_backward and with_grad:
            grads = [one.grad for one in with_grad if one.grad is not None]
            norms = list(torch._foreach_norm(grads, 2, torch.float32))
        else:
            norms = [one.norm for one in self._trained if one.norm is not None]
        # The only time that the device is waited for.
        norm = float(self._of_all_parts(torch.linalg.vector_norm(torch.stack(norms)))) if norms else 0.0
        if not self.in_backward and is_good and math.isfinite(norm) and norm <= max_norm:
            update_all(with_grad, self._rates(norm))
        if math.isfinite(norm):
            self._norm_before = norm
        for one in with_grad:
            one.grad = None
        return norm

    def _take_parts(self) -> None:
        """What FSDP has left of a gradient for this rank; and the part itself, which it may have put elsewhere."""
        for one in self._trained:
            parameter = self._divided.get(one.name)
            if parameter is not None:
                one.weight = own_part(parameter)
                one.grad = None if parameter.grad is None else own_part(parameter.grad)
                parameter.grad = None

    def _of_all_parts(self, norm: Tensor) -> Tensor:
        """The norm over all parts, the same on every rank."""
        some = next(iter(self._divided.values()), None)
        if some is None:
            return norm
        mesh = some.device_mesh
        # The last axis divides weights; copies of them have the same parts.
        square = norm.to(mesh.device_type, torch.float64).square()
        dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))
        return square.sqrt()

    def _collect(self, one: ParamState, parameter: Tensor) -> None:
        collect(one, _taken(parameter))

    def _step_now(self, one: ParamState, parameter: Tensor) -> None:
        assert one.norm is None, f"{one.name} got a second gradient in one step, of which the first is used already"
        collect(one, _taken(parameter))
        assert one.grad is not None
        one.norm = torch.linalg.vector_norm(one.grad, dtype=torch.float32)
        update_one(one, self._rates_before, one.norm)
        one.grad = None

    def _rates(self, norm: float) -> Rates:
        # In fp32 and with the small number, as torch's own clipping does it.
        scale = (self._clip / (torch.tensor(norm) + 1e-6)).clamp(max=1.0).item()
        return Rates(lr=self._lr, betas=self._betas, seed=self._seed, scale=scale)

    # What checkpoints and exports hold

    @property
    def is_divided(self) -> bool:
        return bool(self._divided)

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained weight in the precision it is kept in, divided where it is."""
        for one in self._trained:
            parameter = self._divided.get(one.name)
            yield one.name, one.weight if parameter is None else parameter.detach()

    def moment_tensors(self) -> dict[str, Tensor]:
        """AdamW's moments and counts by name: what a stage hands on to the next."""
        found: dict[str, Tensor] = {}
        for one in self._trained:
            parameter = self._divided.get(one.name)
            found |= {
                # Counts belong to the whole.
                key: value if parameter is None or not value.dim() else as_part(value, parameter)
                for key, value in moment_tensors(one).items()
            }
        return found

    def load_moments(self, saved: Mapping[str, Tensor]) -> None:
        """Moments of another updater, of whatever kind; parameters that are not in `saved` start from nothing."""
        for one in self._trained:
            load_moment(one, saved)

    def state_tensors(self) -> dict[str, Tensor]:
        """All that a resumed run needs, by name. These are the tensors in use, not copies."""
        weights = {f"{name}/weight": weight for name, weight in self.named_masters()}
        own = {
            f"{STATE}/norm_before": torch.tensor(self._norm_before, dtype=torch.float64),
            f"{STATE}/seed": torch.tensor(self._seed),
        }
        return weights | self.moment_tensors() | own

    @torch.no_grad()
    def load_state_tensors(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from `state_tensors` of an updater that was built alike."""
        self._take_parts()
        for one in self._trained:
            one.weight.copy_(own_part(saved[f"{one.name}/weight"]))
            if one.computed is not None:
                one.computed.copy_(one.weight)
        self.load_moments(saved)
        self._norm_before = float(saved[f"{STATE}/norm_before"])
        self._seed = int(saved[f"{STATE}/seed"])


def build_updater(stage: StageConfig, model: Any, *, seed: int = 0) -> Updater:
    """AdamW; norms and biases are not decayed, and what `lr_overrides` sets to 0 is not trained at all.

    The model's parameters (not its buffers: tables of positions stay fp32) become what the stage computes in.
    """
    some = next(model.parameters())
    is_divided = isinstance(some, DTensor)
    _check(stage, [name for name, _ in model.named_parameters()], is_divided=is_divided)
    # Where ranks keep a part each, layers are given their weights in bf16 and the parts are the masters.
    in_bf16 = stage.optimizer.weights == "bf16" or (some.is_cuda and not is_divided)
    if in_bf16 or (is_divided and some.device_mesh.device_type == "cuda"):
        keep_tables(model)
    trained = []
    for name, parameter in model.named_parameters():
        lr = _lr(stage, name)
        parameter.requires_grad_(lr > 0)
        # The memory that was loaded becomes the master, so that nothing is held twice on the way.
        loaded = own_part(parameter)
        if in_bf16:
            parameter.data = loaded.to(torch.bfloat16).contiguous()
        if lr > 0:
            has_master = in_bf16 and stage.optimizer.weights == "fp32"
            one = build_trained(
                name,
                loaded.float().contiguous() if has_master else own_part(parameter),
                parameter.data if has_master else None,
                share=lr / stage.lr,
                decay=stage.weight_decay if parameter.dim() > 1 else 0.0,
                in_8bit=stage.optimizer.states == "8bit",
            )
            one.rows = own_rows(parameter) if is_divided else None
            trained.append(one)
    return Updater(
        model,
        trained,
        betas=stage.betas,
        clip=stage.max_grad_norm,
        seed=seed,
        in_backward=stage.optimizer.step == "in-backward",
    )


def _check(stage: StageConfig, names: list[str], *, is_divided: bool) -> None:
    for part in stage.lr_overrides:
        if not any(part in name for name in names):
            raise ConfigError(
                f"stage {stage.name}: lr_overrides has {part!r}, which is in no parameter's name; they read "
                f"{names[1]} …"
            )
    if not any(_lr(stage, name) for name in names):
        raise ConfigError(f"stage {stage.name}: lr_overrides sets every parameter to 0, so nothing is trained.")
    if is_divided and (stage.optimizer.weights, stage.optimizer.states) != ("fp32", "fp32"):
        raise ConfigError(
            f"stage {stage.name}: optimizer.weights {stage.optimizer.weights} and states {stage.optimizer.states} are "
            "not supported on several devices yet, which divide weights and states among them; set both to fp32."
        )
    if is_divided and stage.optimizer.step == "in-backward":
        raise ConfigError(
            f"stage {stage.name}: optimizer.step in-backward is not supported on several devices, of which each would "
            "judge its own part of a gradient; set it to after: gradients are divided among them anyway."
        )


def _lr(stage: StageConfig, name: str) -> float:
    return next((lr for part, lr in stage.lr_overrides.items() if part in name), stage.lr)


def _taken(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    parameter.grad = None
    return grad
