"""Checkpoints of a stage in progress: weights, optimizer moments and the step they belong to.

Promise: a checkpoint folder is complete or absent; after a kill at any moment the last complete one
loads. What is trained next needs no state, since the order of rows is a function of the step.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
# One more than needed, in case the newest is lost with the disk it was written to.
KEEP = 2


def save_checkpoint(folder: Path, model: Any, optimizer: Optimizer, *, step: int) -> None:
    """Publish `folder/step-000123` and remove all but the newest few."""
    out_dir = folder / f"step-{step:06d}"
    partial = out_dir.with_name(out_dir.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(dict(_parameters(model)), partial / WEIGHTS)
    save_moments(partial / OPTIMIZER, model, optimizer)
    (partial / "step.json").write_text(json.dumps({"step": step}))
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(out_dir, ignore_errors=True)
    partial.rename(out_dir)
    for old in checkpoints(folder)[:-KEEP]:
        shutil.rmtree(old)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".partial")


def load_checkpoint(folder: Path, model: Any, optimizer: Optimizer) -> int:
    """Put the newest checkpoint's state into model and optimizer; returns its step, 0 if there is none."""
    found = checkpoints(folder)
    if not found:
        return 0
    weights = load_file(found[-1] / WEIGHTS)
    with torch.no_grad():
        for name, parameter in _parameters(model):
            parameter.copy_(weights[name])
    load_moments(found[-1] / OPTIMIZER, model, optimizer)
    return int(json.loads((found[-1] / "step.json").read_text())["step"])


def save_moments(path: Path, model: Any, optimizer: Optimizer) -> None:
    """AdamW's moments by parameter name."""
    state: dict[str, Tensor] = {}
    for name, parameter in _parameters(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}/{key}"] = value.detach().float().cpu().contiguous()
    save_file(state, path)


def load_moments(path: Path, model: Any, optimizer: Optimizer) -> None:
    """Give `optimizer` the moments in `path`; rows added to an embedding since then start at zero."""
    saved = load_file(path)
    for name, parameter in _parameters(model):
        state = {}
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"{name}/{key}" not in saved:
                break
            value = saved[f"{name}/{key}"]
            if key == "step":
                state[key] = value
                continue
            moments = torch.zeros_like(parameter, dtype=torch.float32)
            moments[: value.shape[0]] = value.to(parameter.device)
            state[key] = moments
        else:
            if optimizer.defaults.get("fused"):
                state["step"] = state["step"].to(parameter.device)
            optimizer.state[parameter] = state


def _parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Named parameters, tied ones once."""
    yield from model.named_parameters()
