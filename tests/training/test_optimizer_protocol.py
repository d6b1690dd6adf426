"""A new optimizer is one class and its config: recipes, training, checkpoints and the planner need no other change."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError

from unspool.planning.cost import Shape
from unspool.planning.footprint import StepSetup, footprint
from unspool.training.optim.base import OptimizerConfig, ParamState, Rates
from unspool.training.optim.config import OPTIMIZERS, AdamWConfig, register_optimizer

from .optimizer_runs import assert_same, copied, stage_of, start, take


class Momentum:
    def init_state(self, param: ParamState) -> torch.Tensor:
        return torch.zeros_like(param.weight, dtype=torch.float32)

    def takes_fp32_grad(self, param: ParamState) -> bool:
        return True

    @torch.no_grad()
    def step(self, params: Sequence[ParamState], rates: Rates) -> None:
        for param in params:
            param.state.mul_(rates.betas[0]).add_(param.grad, alpha=rates.scale)
            param.weight.add_(param.state, alpha=-rates.lr * param.lr_ratio)

    def step_in_backward(self, param: ParamState, rates: Rates, norm: torch.Tensor) -> None:
        if torch.isfinite(norm):
            self.step([param], rates)

    def state_tensors(self, param: ParamState) -> dict[str, torch.Tensor]:
        return {"momentum": param.state}

    def load_state(self, param: ParamState, saved: Mapping[str, torch.Tensor]) -> None:
        if "momentum" in saved:
            param.state.copy_(saved["momentum"])


class MomentumConfig(OptimizerConfig):
    name: Literal["momentum"] = "momentum"

    def build(self) -> Momentum:
        return Momentum()

    def state_bytes(self) -> float:
        return 4


@pytest.fixture
def momentum() -> Iterator[dict[str, str]]:
    register_optimizer(MomentumConfig)
    yield {"name": "momentum"}
    del OPTIMIZERS["momentum"]


@pytest.mark.parametrize("step", ["after", "in-backward"])
def test_it_trains_and_resumes_bit_for_bit(momentum, step):
    mode = momentum | {"step": step}
    model, updater, stage = start(mode, lr=0.1, max_grad_norm=1e9)
    losses = [result.loss for result in take(model, updater, stage, range(4))]
    saved = copied(updater.state_tensors())
    wanted = take(model, updater, stage, range(4, 6))

    again, later, _ = start(mode, lr=0.1, max_grad_norm=1e9)
    later.load_state_tensors(saved)

    assert losses[-1] < losses[0]
    assert {key.rpartition("/")[2] for key in saved} == {"weight", "momentum", "norm_before", "seed"}
    assert take(again, later, stage, range(4, 6)) == wanted
    assert_same(later.state_tensors(), updater.state_tensors())


def test_a_recipe_names_it_and_an_unknown_one_is_refused(momentum):
    assert stage_of(momentum).optimizer == MomentumConfig()
    assert stage_of({}).optimizer == stage_of({"name": "adamw"}).optimizer == AdamWConfig()
    assert stage_of(momentum).model_dump()["optimizer"] == {"name": "momentum", "weights": "fp32", "step": "after"}
    for wrong in ({"name": "sgdd"}, momentum | {"states": "8bit"}):
        with pytest.raises(ValidationError):
            stage_of(wrong)


def test_the_planner_asks_it_for_its_bytes(momentum):
    shape = Shape(num_layers=2, hidden=64, intermediate=96, num_heads=4, num_kv_heads=2, head_dim=16, vocabulary=300)
    found: dict[str, Any] = {
        name: footprint(shape, StepSetup(tokens=32, optimizer=config)).optimizer / shape.params
        for name, config in (("momentum", MomentumConfig()), ("adamw", AdamWConfig()))
    }
    assert found == {"momentum": 4 + 4, "adamw": 4 + 8}
