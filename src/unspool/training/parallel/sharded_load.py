"""Weights read straight into the parts that ranks keep.

In: a config, a folder with safetensors. Out: a model whose every rank has read its own rows of each weight.
Promise: no rank ever holds more than its parts and one of them in the file's precision; the numbers are those of plain
loading, bit by bit.
How: `build_empty` → `parallelize` → `load_shards`, then positions as ever (they are buffers, not weights).
Price: only what lies in the files as the model has it: families whose weights `transformers` puts together on loading,
and GGUF files, are loaded whole.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
from transformers import AutoModelForCausalLM

from unspool.core.errors import ConfigError
from unspool.models.attention.interface import NAME, register

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def build_empty(config: Any, *, dtype: torch.dtype = torch.float32) -> Any:
    """The model with our attention, in evaluation mode, without memory for its weights."""
    register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    return model.eval()


@torch.no_grad()
def load_shards(model: Any, folder: Path, device: torch.device) -> None:
    """Give the parts of `model` memory on `device` and the weights of `folder`."""
    model.to_empty(device=device)
    _fill_buffers(model, device)
    files = _files(folder)
    with ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in sorted(set(files.values()))}
        for name, parameter in model.named_parameters():
            stored = _stored_name(name, files, model, folder)
            piece = opened[files[stored]].get_slice(stored)
            if tuple(piece.get_shape()) != tuple(parameter.shape):
                raise ConfigError(
                    f"model {folder}: {name} has the shape {tuple(piece.get_shape())} in its file and "
                    f"{tuple(parameter.shape)} by its config; get it again."
                )
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if local.numel():
                local.copy_(read_rows(piece, own_rows(parameter)))


def why_not_by_parts(config: Any, folder: Path) -> str | None:
    """What keeps the model of these files from being read part by part; None if nothing does."""
    model = build_empty(config)
    try:
        _refuse_tables(model)
        files = _files(folder)
        for name, _ in model.named_parameters():
            _stored_name(name, files, model, folder)
    except ConfigError as error:
        return str(error)
    return None


def read_rows(piece: Any, rows: slice) -> Tensor:
    """Rows of a tensor in a file, read from there without the others."""
    found: Tensor = piece[rows]
    return found


def own_rows(parameter: Tensor) -> slice:
    """Which rows of a parameter lie on this rank: equally many on each but the last ones, as torch divides."""
    if not isinstance(parameter, DTensor):
        return slice(0, len(parameter))
    rows = slice(0, len(parameter))
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "weights are divided by rows"
            size = -(-len(parameter) // parameter.device_mesh.size(axis))
            start = parameter.device_mesh.get_local_rank(axis) * size
            rows = slice(min(start, len(parameter)), min(start + size, len(parameter)))
    assert rows.stop - rows.start == parameter.to_local().shape[0], "torch divides otherwise"
    return rows


def _files(folder: Path) -> dict[str, Path]:
    """The file of every weight."""
    if (folder / INDEX).is_file():
        by_name = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in by_name.items()}
    if not (folder / SINGLE).is_file():
        raise ConfigError(f"model {folder}: holds neither {SINGLE} nor {INDEX}; convert it to safetensors.")
    with safe_open(folder / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / SINGLE)


def _stored_name(name: str, files: dict[str, Path], model: Any, folder: Path) -> str:
    """The name under which the files have a parameter; of tied ones they may have either."""
    if name in files:
        return name
    parameter = model.get_parameter(name)
    same: list[str] = [other for other, found in model.named_parameters(remove_duplicate=False) if found is parameter]
    for other in same:
        if other in files:
            return other
    raise ConfigError(
        f"model {folder}: its files have no {name}, so that its weights cannot be read part by part; export "
        "it with plain transformers first, or train it on one device."
    )


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Tables that are computed and not stored: those of the rotary module. Others are refused: they would be empty."""
    _refuse_tables(model)
    backbone = model.base_model
    backbone.rotary_emb = type(backbone.rotary_emb)(model.config).to(device)


def _refuse_tables(model: Any) -> None:
    others = [name for name, _ in model.named_buffers() if not name.rpartition(".")[0].endswith("rotary_emb")]
    if others:
        raise ConfigError(
            f"{type(model).__name__} has tables besides its weights ({others[0]}), which cannot be made without "
            "loading it whole; train it on one device."
        )
