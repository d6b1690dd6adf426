"""A small stage, and how tests run it and compare what it leaves."""

import json
from pathlib import Path

from factory import (
    CPU,
    build_stage,
    dying_at,
    random_row,
)
from unspool.training import loop as loop_module
from unspool.training.checkpoint.resume import OPTIMIZER
from unspool.training.checkpoint.save import Saver
from unspool.training.loader import LEDGER
from unspool.training.metrics.logger import METRICS
from unspool.training.stage import StageInputs, run_stage

LONG = [random_row((20, 12), seed, mask=0.3) for seed in range(7)]
SHORT = [random_row((16,), seed) for seed in range(10, 15)]
# Six steps of two slots, three checkpoints.
STAGE = build_stage(mix={"long": 0.6, "short": 0.4}, checkpoint_every=2, rope={"method": "abf", "base": 5e5})


def run(materials: StageInputs, out: Path, stage=STAGE, seed: int = 0) -> None:
    run_stage(stage, materials, out, seed=seed, device=CPU)


def metrics(out: Path) -> list[dict]:
    """Without what the clock says."""
    lines = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if "second" not in key and key != "memory_gib"} for line in lines
    ]


def assert_same_result(out: Path, wanted: Path) -> None:
    for name in ("model/model.safetensors", "model/config.json", "model/tokenizer.json", OPTIMIZER, LEDGER):
        assert (out / name).read_bytes() == (wanted / name).read_bytes(), name
    assert metrics(out) == metrics(wanted)
    assert sorted(path.name for path in out.parent.iterdir()) == [out.name], "something was left behind"


class WritingAtOnce(Saver):
    """So that which checkpoints there are at a kill does not depend on the disk."""

    def save(self, *args) -> None:
        super().save(*args)
        self.wait()


def kill_after_step(number):
    def apply(patch) -> None:
        patch(loop_module, "Saver", WritingAtOnce)
        patch(loop_module, "train_step", dying_at(loop_module.train_step, number + 1))

    return apply
