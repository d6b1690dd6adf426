"""What is refused without weights is also refused with them, for every family that `unspool verify` knows."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from factory import build_stage
from unspool.core.errors import ConfigError
from unspool.models.load import load_model
from unspool.models.rotary import apply_rope
from unspool.recipe.check_stages import check_stages
from unspool.rope.methods import ABF, HARPE, PI, Llama3, Unchanged, YaRN
from unspool.training.config import StageConfig
from unspool.training.optim.updater import build_updater
from unspool.verification.fixtures import FAMILIES, build_small_models

METHODS = [Unchanged(), ABF(base=1e5), PI(), YaRN(), YaRN(factor=1.01), Llama3(), HARPE(low=1e4, high=1e5)]
LENGTH = 4096  # more than any of them claims


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    build_small_models(folder, seed=0, wide=False, names=list(FAMILIES))
    return folder


def stages(*methods: Any) -> list[StageConfig]:
    sizes = {"context_length": LENGTH, "tokens": LENGTH, "batch_tokens": LENGTH}
    return [build_stage(name=f"stage-{at}", rope=method, **sizes) for at, method in enumerate(methods)]


def refused_early(ref: str, chosen: list[StageConfig]) -> str | None:
    context: Any = SimpleNamespace(model=ref, recipe=SimpleNamespace(stages=chosen))
    try:
        check_stages(context)
    except ConfigError as error:
        return str(error)
    return None


def refused_later(ref: str, chosen: list[StageConfig]) -> str | None:
    """The stages one after another, as a run trains them."""
    try:
        model = load_model(ref, device=torch.device("cpu"), dtype=torch.float32)
        for stage in chosen:
            apply_rope(model, stage.rope, stage.context_length)
            build_updater(stage, model)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_an_early_refusal_is_the_refusal_of_the_stage(family, folder, caplog):
    caplog.set_level(logging.DEBUG, logger="unspool")
    for first in METHODS:
        for chosen in (stages(first), stages(first, ABF(base=1e6))):
            early, later = (refused(str(folder / family), chosen) for refused in (refused_early, refused_later))
            if early is not None:
                assert later is not None and early.endswith(later.removeprefix(f"stage {chosen[-1].name}: ")), early
            elif later is not None:
                # Only HARPE computes with the weights to find this out.
                assert isinstance(first, HARPE), later
    assert not [record for record in caplog.records if "not checked" in record.getMessage()], caplog.text
