"""Samples and validation while ranks share rows: every rank writes samples alone, a ring validates by document."""

from pathlib import Path
from typing import Any

import pytest

from factory import random_row, save_folder, save_rows
from unspool.training.metrics.validation import SAMPLES as WRITTEN
from unspool.training.metrics.validation import VALIDATION
from unspool.training.stage import StageInputs

from .ranks import run_ranks
from .stages import SAMPLES, lines, train

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {"ulysses": {"ulysses": 2}, "ring": {"ring": 2}}
# Rows that attend to all of themselves, which a ring needs; those of validation hold several documents.
SETTINGS: dict[str, Any] = {
    "mix": {"long": 1.0},
    "tokens": 4 * 128,
    "batch_tokens": 128,
    "validation": {"dataset": "held", "samples": 4, "every": 2},
    "rope": {"method": "dynamic", "factor": 4},
    "context_length": 128,
}


@pytest.fixture(scope="module")
def stages(tmp_path_factory) -> Path:
    """By layout and on one rank, with samples and with validation."""
    folder = tmp_path_factory.mktemp("shared-rows")
    rows = [random_row((100, 28), seed, attention="full", mask=0.3) for seed in range(5)]
    held = [random_row((5, 1, 70, 52), seed, mask=0.2) for seed in range(20, 24)]
    inputs = StageInputs(
        model=str(save_folder(folder / "model")),
        datasets={"long": save_rows(folder / "rows" / "long", rows)},
        validation=save_rows(folder / "rows" / "held", held),
    )
    sampled = SETTINGS | SAMPLES

    def both(name: str, parallel: dict[str, Any]) -> None:
        train(inputs, folder / f"{name}-validated" / "one", parallel, **SETTINGS)
        train(inputs, folder / f"{name}-sampled" / "one", parallel, **sampled)

    both("alone", {})

    def work(rank: int) -> None:
        for name, parallel in LAYOUTS.items():
            both(name, parallel)

    run_ranks(work, world_size=2, store=folder / "store")
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_that_share_rows_validate_as_one_rank_does(stages, name):
    found, wanted = (lines(stages / f"{each}-validated" / "one", VALIDATION) for each in (name, "alone"))

    assert [line["step"] for line in found] == [line["step"] for line in wanted] == [0, 2, 4]
    assert [line["n"] for line in found] == [line["n"] for line in wanted]
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=1e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_that_share_rows_write_the_samples_that_one_rank_writes(stages, name):
    found, wanted = (lines(stages / f"{each}-sampled" / "one", WRITTEN) for each in (name, "alone"))

    assert found == wanted
    assert any(line["text"] for line in found)
