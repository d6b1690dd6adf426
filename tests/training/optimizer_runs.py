"""A small model and some steps of it in every mode of the optimizer."""

from itertools import product
from typing import Any

import torch

from factory import build_model, build_stage, random_row
from unspool.training.config import StageConfig
from unspool.training.loader import build_step
from unspool.training.optim.adamw import AdamW
from unspool.training.optim.base import ParamState
from unspool.training.optim.updater import Updater, build_updater
from unspool.training.step import StepResult, train_step

MODES = [
    {"weights": weights, "states": states, "step": step}
    for weights, states, step in product(("fp32", "bf16"), ("fp32", "8bit"), ("after", "in-backward"))
]
ROWS: dict[str, Any] = {"long": [random_row((20, 12), seed) for seed in range(4)]}


def adamw_param(
    name: str,
    weight: torch.Tensor,
    bf16_copy: torch.Tensor | None = None,
    *,
    weight_decay: float = 0.0,
    in_8bit: bool,
) -> ParamState:
    """A parameter with AdamW's state before the first step."""
    param = ParamState(
        name=name,
        weight=weight,
        bf16_copy=bf16_copy,
        weight_decay=weight_decay,
        shape=tuple(weight.shape),
        rows_per_rank=len(weight),
    )
    param.state = AdamW(in_8bit=in_8bit).init_state(param)
    return param


def mode_name(mode: dict[str, str]) -> str:
    return " ".join(mode.values())


def small_model(family: str = "llama") -> Any:
    """Wide enough that some of its moments are quantised, and others, its norms and keys, are not."""
    return build_model(family, hidden_size=64, intermediate_size=96).train()


def stage_of(mode: dict[str, str], **changes: Any) -> StageConfig:
    """One row, one micro-batch per step."""
    return build_stage(**{"batch_tokens": 32, "tokens": 32, "optimizer": mode} | changes)


def start(mode: dict[str, str], *, family: str = "llama", **changes: Any) -> tuple[Any, Updater, StageConfig]:
    model, stage = small_model(family), stage_of(mode, **changes)
    return model, build_updater(stage, model), stage


def take(model: Any, updater: Updater, stage: StageConfig, steps: range) -> list[StepResult]:
    """Every step has a row of its own, so that one that is left out or done twice shows."""
    per_step = stage.batch_tokens // stage.context_length
    return [
        train_step(
            model,
            updater,
            build_step(stage, ROWS, [[("long", (step + slot) % 4)] for slot in range(per_step)]),
            lr=stage.lr,
        )
        for step in steps
    ]


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    differing = [name for name, tensor in wanted.items() if not torch.equal(tensor, found[name])]
    assert differing == []
