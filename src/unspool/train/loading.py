"""A model from its files straight into the parts that ranks keep, where that can be done.

In: a stage, the folder of its model. Out: the divided model with the stage's positions; None where it has to be loaded
whole: GGUF files and Hub ids, families whose weights `transformers` puts together, knots that are to be added, a base
per head, and settings that are tried on whole weights.
Promise: the same numbers as loading whole. The leader loads the model once, in the precision of its files, and tries
it as any model is tried (model/trial.py); no other rank ever holds more than its parts.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, GenerationConfig

from unspool.base.artefact import read_manifest
from unspool.model.export import HARPE_TYPE
from unspool.model.load import load_model
from unspool.model.rotary import apply_position
from unspool.model.trial import check_trainable
from unspool.position.harpe import Harpe
from unspool.train.config import StageConfig
from unspool.train.parallelize import parallelize
from unspool.train.shards import build_empty, load_shards, why_not_by_parts
from unspool.train.team import Team

GENERATION = "generation_config.json"


def load_by_parts(
    stage: StageConfig, model: Any, rows: dict[str, Path], *, device: torch.device, team: Team
) -> Any | None:
    """All ranks call this, and all get a model or none."""
    mesh = team.mesh
    if mesh is None or not isinstance(model, str) or _needs_whole(stage, rows):
        return None
    folder = Path(model)
    if not team.from_leader(lambda: _can_be_read(folder)):
        return None
    return _read(stage, folder, mesh, device)


def _needs_whole(stage: StageConfig, rows: dict[str, Path]) -> bool:
    """Settings that are tried on weights, or that change whole ones."""
    memory = stage.memory
    tried = memory.mlp_tiles or memory.offload or memory.keep_on_host or stage.compile
    knots = any((read_manifest(folder) or {}).get("counts", {}).get("added_tokens") for folder in rows.values())
    return bool(tried or knots or stage.parallel.offload or isinstance(stage.position, Harpe))


def _can_be_read(folder: Path) -> bool:
    """Whether its files have what the model has; if so, it is tried."""
    if not (folder / "config.json").is_file():
        return False
    content = (folder / "config.json").read_text()
    if HARPE_TYPE in content or '"text_config"' in content or why_not_by_parts(_config(folder), folder) is not None:
        return False
    whole = load_model(str(folder), device=torch.device("cpu"), dtype=_config(folder).dtype or torch.float32)
    check_trainable(whole)
    return True


def _read(stage: StageConfig, folder: Path, mesh: DeviceMesh, device: torch.device) -> Any:
    model = parallelize(build_empty(_config(folder)), mesh, stage.parallel, memory=stage.memory)
    load_shards(model, folder, device)
    if (folder / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    apply_position(model, stage.position, stage.context)
    return model


def _config(folder: Path) -> Any:
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)
