"""Tiles are tested on modules that have no weights yet, and without compiling fused ones."""

import pytest
import torch

from factory import CPU
from models.memory_factory import build, trained
from models.test_memory import Mixing
from unspool.core.errors import ConfigError
from unspool.models import fuse
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.policy import MemoryPolicy
from unspool.training.parallel.fsdp import build_empty


def test_a_module_without_weights_is_tested_with_random_ones():
    model = build_empty(build().config)
    apply_memory(model, MemoryPolicy(mlp_tiles=8), device=CPU)
    assert all(parameter.is_meta for parameter in model.parameters())

    model = build_empty(build().config)
    with torch.device("meta"):
        model.base_model.layers[1].mlp = Mixing()
    with pytest.raises(ConfigError, match="mlp_tiles: Mixing does not compute each token separately"):
        apply_memory(model, MemoryPolicy(mlp_tiles=8), device=CPU)


def test_tiles_are_tested_without_compiling_a_fused_module(monkeypatch):
    model, compiled = build(), []
    monkeypatch.setattr(fuse.torch, "compile", lambda function: lambda *args: compiled.append(1) or function(*args))
    fuse.fuse_parts(model)
    apply_memory(model, MemoryPolicy(mlp_tiles=8))
    assert not compiled

    trained(model)
    assert compiled
