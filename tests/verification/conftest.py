"""One case for each family, built once: a small model, its rows and the truth about them."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from unspool.models.export import PlainProcess
from unspool.verification.case import Case, build_case
from unspool.verification.fixtures import build_small_models
from unspool.verification.run import Result, build_checks, run_check

DEVICE = torch.device("cpu")


@pytest.fixture(scope="session")
def plain() -> Iterator[PlainProcess]:
    with PlainProcess() as process:
        yield process


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Callable[[str], Case]:
    @cache
    def build(family: str) -> Case:
        folder = tmp_path_factory.mktemp("models")
        (subject,) = build_small_models(folder, seed=0, wide=False, names=[family])
        return build_case(subject, device=DEVICE, seed=0)

    return build


@pytest.fixture
def case(built) -> Callable[[str], Case]:
    """A case whose model may be broken: no other test sees it."""
    return lambda family: replace(built(family), model=copy.deepcopy(built(family).model))


@pytest.fixture
def results(plain) -> Callable[[str, Case], list[Result]]:
    return lambda name, case: run_check(build_checks(plain)[name], case)
