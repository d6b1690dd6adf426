"""Prompts are frozen: the same on any machine, Python, hash seed and number of workers.

`golden.json` holds their hashes; a change of any of them is a new version of the suite
(`python tests/evals/ruler/hashes.py 4096 1 > tests/evals/ruler/golden.json`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unspool.core import rng as rng_module
from unspool.evals.suites.ruler import fitting

from .hashes import INDICES, prompt_hash

HERE = Path(__file__).parent
GOLDEN: dict[str, str] = json.loads((HERE / "golden.json").read_text())


def run(workers: int, hash_seed: str) -> dict[str, str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, str(HERE / "hashes.py"), "4096", str(workers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_prompts_are_the_frozen_ones_under_any_hash_seed_of_python() -> None:
    assert len(GOLDEN) == 13 * 2 * len(INDICES)
    assert run(1, "1") == GOLDEN


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_prompts_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    assert run(workers, "2") == GOLDEN


def test_another_generator_of_random_numbers_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "rng_for", lambda seed, *purpose: rng_module.rng_for(seed + 1, *purpose))

    assert prompt_hash(("niah_single_1", "fixed", 4096, 0)) != GOLDEN["niah_single_1 fixed 4096 0"]
