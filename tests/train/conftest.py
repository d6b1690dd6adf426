"""One small stage for all tests of stages: what it is made of, and its result when nothing disturbs it."""

from pathlib import Path

import pytest

from factory import (
    save_folder,
    save_rows,
)
from unspool.train.stage import StageInputs

from .stage_runs import LONG, SHORT, run


@pytest.fixture(scope="session")
def materials(tmp_path_factory) -> StageInputs:
    folder = tmp_path_factory.mktemp("materials")
    rows = {"long": save_rows(folder / "rows" / "long", LONG), "short": save_rows(folder / "rows" / "short", SHORT)}
    return StageInputs(model=str(save_folder(folder / "model")), rows=rows)


@pytest.fixture(scope="session")
def never_killed(materials, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "one"
    run(materials, out)
    return out
