"""Update the weights: gradient accumulation, clipping, the optimizer step, and its checkpoint.

Gradients of micro-batches are summed in fp32, regardless of the model's precision. With `step: after`, a gradient that
is not finite changes nothing. With `step: in-backward`, clipping uses the norm of the previous step, because this
step's norm is known only at its end. A gradient that is not finite leaves only its own parameter unchanged. State is
saved and loaded by name, and training continues from it bit for bit.

With `weights: fp32` on a GPU, the model's parameters become bf16 for computing, and the updater keeps fp32 masters. On
a CPU, and if ranks shard weights (fsdp.py), parameters are their own masters. FSDP then sums the gradients, and the
norm covers all shards.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from unspool.core.errors import ConfigError
from unspool.models.fuse import keep_tables
from unspool.training.config import StageConfig
from unspool.training.optim.base import Optimizer, ParamState, Rates, StepsOnDevice
from unspool.training.parallel.dtensor import as_shard_of, local_rows, local_shard, rows_per_rank

# The norm before the first step, which clips nothing.
NO_NORM = 0.0
STATE = "updater"


class Updater:
    """Runs optimizer steps: `begin`, then the backward passes, then `finish`."""

    def __init__(
        self,
        model: Any,
        params: list[ParamState],
        optimizer: Optimizer,
        *,
        betas: tuple[float, float],
        max_grad_norm: float,
        seed: int,
        in_backward: bool,
    ) -> None:
        self._params, self._optimizer = params, optimizer
        self._betas, self._max_grad_norm, self._seed = betas, max_grad_norm, seed
        self._lr = 0.0
        self._previous_norm = NO_NORM
        self._unsettled: list[ParamState] = []
        self._previous_rates = self._rates(NO_NORM)
        # True: a step found to be bad has already changed weights; only a checkpoint restores them.
        self.in_backward = in_backward
        # Called before weights or states change, because a checkpoint may still be copying them.
        self.before_update: Callable[[], None] = lambda: None
        by_name = {param.name: param for param in params}
        # FSDP sums the gradients of sharded parameters itself, so they need no hook.
        self._sharded: dict[str, DTensor] = {}
        for name, parameter in model.named_parameters():
            if name in by_name and isinstance(parameter, DTensor):
                self._sharded[name] = parameter
            elif name in by_name:
                react = self._step_now if in_backward else self._accumulate
                parameter.register_post_accumulate_grad_hook(partial(react, by_name[name]))

    def begin(self, lr: float) -> None:
        self._lr = lr
        if self.in_backward:
            self.before_update()
        self._previous_rates = self._rates(self._previous_norm)
        for param in self._params:
            param.grad = param.grad_norm = None
        for parameter in self._sharded.values():
            parameter.grad = None

    def add(self, grads: Mapping[str, Tensor]) -> None:
        """Add gradients by parameter name to those of the backward passes. Frozen parameters are skipped."""
        for param in self._params:
            if param.name in grads:
                self._add(param, grads[param.name])

    def finish(self, *, is_good: bool, max_norm: float = math.inf) -> float:
        """Update the weights, unless the loss was bad or the gradient is not finite or above `max_norm`.

        Returns the norm before clipping.
        """
        self._read_shards()
        with_grad = [param for param in self._params if param.grad is not None]
        if not self.in_backward and with_grad:
            grads = [param.grad for param in with_grad if param.grad is not None]
            norms = list(torch._foreach_norm(grads, 2, torch.float32))
        else:
            norms = [param.grad_norm for param in self._params if param.grad_norm is not None]
        # The only synchronization with the device.
        norm = float(self._norm_over_shards(torch.linalg.vector_norm(torch.stack(norms)))) if norms else 0.0
        if not self.in_backward and is_good and math.isfinite(norm) and norm <= max_norm:
            self.before_update()
            self._optimizer.step(with_grad, self._rates(norm))
        if math.isfinite(norm):
            self._previous_norm = norm
        for param in with_grad:
            param.grad = None
        return norm

    @property
    def can_finish_on_device(self) -> bool:
        """Return whether `finish_on_device` works with these settings."""
        return not (self.in_backward or self._sharded) and isinstance(self._optimizer, StepsOnDevice)

    def finish_on_device(self, loss: Tensor) -> Tensor:
        """`finish` without waiting for the device: nothing changes if `loss` or the gradient is not finite.

        Returns the norm before clipping. When it has arrived, `settle` follows, before the next update.
        """
        assert isinstance(self._optimizer, StepsOnDevice)
        with_grad = [param for param in self._params if param.grad is not None]
        grads = [param.grad for param in with_grad if param.grad is not None]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, torch.float32)))
        clip = (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        self.before_update()
        is_finite = loss.isfinite() & norm.isfinite()
        self._optimizer.step_if_finite(with_grad, self._rates(NO_NORM), norm.where(is_finite, math.inf), clip)
        for param in with_grad:
            param.grad = None
        self._unsettled = with_grad
        return norm

    def settle(self, loss: float, norm: float) -> None:
        """Process the numbers that `finish_on_device` did not wait for."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            assert isinstance(self._optimizer, StepsOnDevice)
            self._optimizer.uncount(self._unsettled)
        if math.isfinite(norm):
            self._previous_norm = norm
        self._unsettled = []

    def _read_shards(self) -> None:
        """Read the gradients that FSDP has reduced, and the shards themselves, which FSDP may have moved."""
        for param in self._params:
            parameter = self._sharded.get(param.name)
            if parameter is not None:
                param.weight = local_shard(parameter)
                param.grad = None if parameter.grad is None else local_shard(parameter.grad)
                parameter.grad = None

    def _norm_over_shards(self, norm: Tensor) -> Tensor:
        """Return the norm over all shards, which is the same on every rank."""
        some = next(iter(self._sharded.values()), None)
        if some is None:
            return norm
        mesh = some.device_mesh
        # The last axis shards weights; replicas hold the same shards.
        square = norm.to(mesh.device_type, torch.float64).square()
        dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))
        return square.sqrt()

    def _add(self, param: ParamState, grad: Tensor) -> None:
        """Accumulate a micro-batch's gradient. From the second micro-batch on, the sum is fp32."""
        if param.grad is None:
            param.grad = grad.float() if self._optimizer.takes_fp32_grad(param) else grad
        else:
            param.grad = param.grad.float().add_(grad)

    def _accumulate(self, param: ParamState, parameter: Tensor) -> None:
        assert parameter.grad is not None
        grad, parameter.grad = parameter.grad, None
        self._add(param, grad)

    def _step_now(self, param: ParamState, parameter: Tensor) -> None:
        assert param.grad_norm is None, f"{param.name} got a second gradient in one step; the first is already used"
        self._accumulate(param, parameter)
        assert param.grad is not None
        param.grad_norm = torch.linalg.vector_norm(param.grad, dtype=torch.float32)
        self._optimizer.step_in_backward(param, self._previous_rates, param.grad_norm)
        param.grad = None

    def _rates(self, norm: float) -> Rates:
        # As torch clips: in fp32, with the same small constant.
        scale = (self._max_grad_norm / (torch.tensor(norm) + 1e-6)).clamp(max=1.0).item()
        return Rates(lr=self._lr, betas=self._betas, seed=self._seed, scale=scale)

    # Checkpoints and exports

    @property
    def is_sharded(self) -> bool:
        return bool(self._sharded)

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Return every trained weight in its stored precision, as a `DTensor` if it is sharded."""
        for param in self._params:
            parameter = self._sharded.get(param.name)
            yield param.name, param.weight if parameter is None else parameter.detach()

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer state by name, from which the next stage continues."""
        found: dict[str, Tensor] = {}
        for param in self._params:
            parameter = self._sharded.get(param.name)
            for key, value in self._optimizer.state_tensors(param).items():
                if parameter is not None and value.dim():
                    value = as_shard_of(value, parameter, num_rows=param.state_rows.get(key))
                found[f"{param.name}/{key}"] = value
        return found

    def load_optimizer(self, saved: Mapping[str, Tensor]) -> None:
        """Load `optimizer_tensors`, also those of other settings. Parameters missing in `saved` start without state."""
        by_param: dict[str, dict[str, Tensor]] = {}
        for key, tensor in saved.items():
            name, _, own_key = key.rpartition("/")
            by_param.setdefault(name, {})[own_key] = tensor
        for param in self._params:
            self._optimizer.load_state(param, by_param.get(param.name, {}))

    def state_tensors(self) -> dict[str, Tensor]:
        """Return all tensors that a resumed run needs, by name: the tensors in use, not copies."""
        weights = {f"{name}/weight": weight for name, weight in self.named_masters()}
        own = {
            f"{STATE}/norm_before": torch.tensor(self._previous_norm, dtype=torch.float64),
            f"{STATE}/seed": torch.tensor(self._seed),
        }
        return weights | self.optimizer_tensors() | own

    @torch.no_grad()
    def load_state_tensors(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from the `state_tensors` of an updater with the same settings."""
        self._read_shards()
        for param in self._params:
            param.weight.copy_(local_shard(saved[f"{param.name}/weight"]))
            if param.bf16_copy is not None:
                param.bf16_copy.copy_(param.weight)
        self.load_optimizer(saved)
        self._previous_norm = float(saved[f"{STATE}/norm_before"])
        self._seed = int(saved[f"{STATE}/seed"])


def build_updater(stage: StageConfig, model: Any, *, seed: int = 0) -> Updater:
    """Prepare `model` for training. Norms and biases get no weight decay; an `lr_overrides` of 0 freezes a parameter.

    Parameters are cast to the precision that the stage computes in. Buffers are not: RoPE tables stay fp32.
    """
    some = next(model.parameters())
    is_sharded = isinstance(some, DTensor)
    _check(stage, [name for name, _ in model.named_parameters()], is_sharded=is_sharded)
    # FSDP casts the weights of layers to bf16, so shards are the masters.
    in_bf16 = stage.optimizer.weights == "bf16" or (some.is_cuda and not is_sharded)
    if in_bf16 or (is_sharded and some.device_mesh.device_type == "cuda"):
        keep_tables(model)
    has_master = in_bf16 and stage.optimizer.weights == "fp32"
    optimizer = stage.optimizer.build()
    params = []
    for name, parameter in model.named_parameters():
        lr = _lr(stage, name)
        parameter.requires_grad_(lr > 0)
        # The loaded memory becomes the master, so that no weight exists twice in fp32.
        loaded = local_shard(parameter)
        if in_bf16:
            parameter.data = loaded.to(torch.bfloat16).contiguous()
        if lr > 0:
            param = ParamState(
                name=name,
                weight=loaded.float().contiguous() if has_master else local_shard(parameter),
                bf16_copy=parameter.data if has_master else None,
                lr_ratio=lr / stage.lr,
                weight_decay=stage.weight_decay if parameter.dim() > 1 else 0.0,
                rows=local_rows(parameter) if is_sharded else None,
                shape=tuple(parameter.shape),
                rows_per_rank=rows_per_rank(parameter),
            )
            param.state = optimizer.init_state(param)
            params.append(param)
    return Updater(
        model,
        params,
        optimizer,
        betas=stage.betas,
        max_grad_norm=stage.max_grad_norm,
        seed=seed,
        in_backward=stage.optimizer.step == "in-backward",
    )


def _check(stage: StageConfig, names: list[str], *, is_sharded: bool) -> None:
    for part in stage.lr_overrides:
        if not any(part in name for name in names):
            raise ConfigError(
                f"stage {stage.name}: lr_overrides has {part!r}, which no parameter name contains; names look like "
                f"{names[1]}."
            )
    if not any(_lr(stage, name) for name in names):
        raise ConfigError(
            f"stage {stage.name}: lr_overrides sets every parameter to 0, so nothing is trained; keep one above 0."
        )
    problem = stage.optimizer.sharding_problem() if is_sharded else None
    if problem is not None:
        raise ConfigError(f"stage {stage.name}: {problem}")


def _lr(stage: StageConfig, name: str) -> float:
    return next((lr for part, lr in stage.lr_overrides.items() if part in name), stage.lr)
