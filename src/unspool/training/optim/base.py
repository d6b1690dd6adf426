"""The optimizer interface: a config, the state kept for each parameter, and the update itself.

A new optimizer is one file with an `OptimizerConfig` and an `Optimizer`, and one line in `OPTIMIZERS` (config.py).
This file does not import torch, because recipes are checked without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from pydantic import Field

from unspool.core.config import Config

if TYPE_CHECKING:
    from torch import Tensor

BF16_BYTES, FP32_BYTES = 2, 4


class OptimizerConfig(Config):
    """Base class of optimizer configs. Subclasses give the planner memory and traffic in bytes per parameter."""

    name: str = Field(description="Name of the optimizer.")
    weights: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="`fp32` keeps fp32 master weights in addition to the bf16 copy; `bf16` keeps none and rounds "
        "updates stochastically.",
    )
    step: Literal["after", "in-backward"] = Field(
        "after",
        description="`in-backward` updates each parameter as soon as its gradient exists, then frees the gradient; "
        "`after` updates all parameters after the backward pass.",
    )

    def build(self) -> "Optimizer":
        """Build the implementation. Import it here, so that the config needs no torch."""
        raise NotImplementedError

    def state_bytes(self) -> float:
        """Bytes of optimizer state, without weights and gradient."""
        raise NotImplementedError

    def state_bytes_moved(self) -> float:
        """Bytes of optimizer state that one update reads and writes."""
        return 2 * self.state_bytes()

    def grad_bytes(self) -> int:
        """Bytes of the gradient that `Optimizer.step` receives after a single micro-batch on a GPU."""
        return FP32_BYTES if self.weights == "fp32" else BF16_BYTES

    def master_bytes(self) -> int:
        """Bytes of the master weight that one GPU keeps in addition to the weight that it computes with."""
        return FP32_BYTES if self.weights == "fp32" else 0

    def weight_bytes_moved(self) -> int:
        """Bytes of the weight that one update reads and writes, the bf16 copy included."""
        return 2 * FP32_BYTES + BF16_BYTES if self.weights == "fp32" else 2 * BF16_BYTES

    def alternatives(self) -> "Sequence[OptimizerConfig]":
        """Settings that need less memory, in the order in which the planner should try them."""
        return ()

    def sharding_problem(self) -> str | None:
        """Return why these settings do not work if ranks shard weights and states; None if they do."""
        if self.weights != "fp32":
            return f"optimizer.weights {self.weights} is not supported on several devices yet; set it to fp32."
        if self.step == "in-backward":
            return (
                "optimizer.step in-backward is not supported on several devices: each would clip by the norm of its "
                "own shard. Set it to after; gradients are sharded anyway."
            )
        return None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The values of one step that all parameters share."""

    lr: float
    betas: tuple[float, float]
    seed: int
    scale: float  # factor for the gradient, from clipping


@dataclass(eq=False, kw_only=True)
class ParamState:
    """The state of one trained parameter. Holds the parameter's memory, not the parameter, whose hook refers to it."""

    name: str
    weight: "Tensor"  # the tensor that is updated: the fp32 master, or the parameter's own memory
    bf16_copy: "Tensor | None" = None  # the parameter's own memory, if `weight` is a master
    lr_ratio: float = 1.0  # this parameter's learning rate ÷ the stage's
    weight_decay: float = 0.0
    rows: slice | None = None  # rows of the full parameter that this rank holds, if it is sharded
    shape: tuple[int, ...] = ()  # of the full parameter
    rows_per_rank: int = 0  # on all ranks but the last ones, which have fewer; all rows if it is not sharded
    grad: "Tensor | None" = None  # of the current step
    grad_norm: "Tensor | None" = None  # norm of a gradient that was used in the backward pass
    state: Any = None  # belongs to the optimizer
    # Number of rows of full state tensors with fewer rows than the parameter, by name. Set by the optimizer.
    state_rows: dict[str, int] = field(default_factory=dict)


class Optimizer(Protocol):
    """An update rule. It alone reads and writes `ParamState.state`."""

    def init_state(self, param: ParamState) -> Any:
        """Create the state before the first step, on the weight's device."""

    def takes_fp32_grad(self, param: ParamState) -> bool:
        """Return whether gradients are converted to fp32 before the step; otherwise they keep the model's precision."""

    def step(self, params: Sequence[ParamState], rates: Rates) -> None:
        """Update every parameter that has a gradient. All gradients are finite."""

    def step_in_backward(self, param: ParamState, rates: Rates, norm: "Tensor") -> None:
        """Update one parameter unless the `norm` of its gradient is not finite, without waiting for a GPU."""

    def state_tensors(self, param: ParamState) -> "dict[str, Tensor]":
        """Return the state by name, for checkpoints: the tensors in use, not copies.

        Scalars belong to the full parameter; all other tensors are sharded by rows, like the weight.
        """

    def load_state(self, param: ParamState, saved: "Mapping[str, Tensor]") -> None:
        """Load `state_tensors`, also those of other settings or of fewer embedding rows. Missing state stays zero.

        Tensors are shards (`DTensor`) or full; of full ones this rank takes `param.rows`.
        """


@runtime_checkable
class StepsOnDevice(Protocol):
    """An `Optimizer` that can update before the host knows the gradient, so that no step waits for the one before."""

    def step_if_finite(self, params: Sequence[ParamState], rates: Rates, norm: "Tensor", clip: "Tensor") -> None:
        """`step` with gradients times `clip`, unless `norm` is not finite, without waiting for a GPU.

        Counts a step in any case; `uncount` takes it back.
        """

    def uncount(self, params: Sequence[ParamState]) -> None:
        """Forget the last `step_if_finite` of these parameters, because its norm was not finite."""
